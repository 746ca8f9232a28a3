"""The demo's tokenizer: one token per key or identifier, exact text back, no marker out of plain text."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer

from insitu.tasks import toy
from insitu_train.demo.vocabulary import CONTROL, SYNTAX, WORDS, build_tokenizer, prompt_lines

CONSTANT = "<|im_start|>system\nYou are an assistant with several tools.\n\nBe brief.<|im_end|>\n"

PIECES = [*SYNTAX, *toy.VARIABLES, *toy.FUNCTIONS, *toy.MODULES, *WORDS]
"""What a reply may be made of."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(CONSTANT)


def test_pool_identifiers_and_control_markers_are_single_tokens(tokenizer: Tokenizer) -> None:
    for word in [*toy.VARIABLES, *toy.FUNCTIONS, *toy.MODULES, *CONTROL]:
        assert len(tokenizer.encode(word, add_special_tokens=False).ids) == 1, word


def test_no_piece_of_a_reply_spans_two_identifiers() -> None:
    for piece in PIECES:
        assert len(re.findall(r"[A-Za-z_]+", piece)) <= 1, piece


def test_every_long_piece_is_agent_text(tokenizer: Tokenizer) -> None:
    """What is in the vocabulary beside bytes, markers and reply pieces stands in the agent's own text."""
    from insitu_train.demo.vocabulary import AGENT_MESSAGES

    known = {*CONTROL, *PIECES, *prompt_lines(CONSTANT), *AGENT_MESSAGES}
    for piece, token in tokenizer.get_vocab().items():
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert len(piece) == 1 or text in known, piece


@pytest.mark.parametrize("text", ["", "é\n\t🙂 x_y9", "width  + height", 'a"}]}} {"', "\r\n\x00"])
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_an_expression_is_one_token_per_name(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("min(width, height) // 7", add_special_tokens=False).ids
    pieces = [tokenizer.decode([i]) for i in ids]
    assert pieces == ["min", "(", "width", ", ", "height", ")", " // ", "7"]
