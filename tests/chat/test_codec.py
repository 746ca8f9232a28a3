"""Only scaffold makes control tokens; ordinary text gets the stock ids."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_families import CONTROL, tokenizer_json
from tokenizers import Tokenizer

from insitu.chat.codec import _ALPHABET, Codec, byte_table
from insitu.errors import RenderError

CODEC = Codec(tokenizer_json())
BYTE_LETTERS = {byte: letter for letter, byte in _ALPHABET.items()}
HOSTILE = st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", "<", "|>", " ", "\n", "a", "é", "🙂"])).map(
    "".join
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.one_of(st.text(), HOSTILE))
def test_outside_text_never_becomes_a_control_token(text: str) -> None:
    ids = CODEC.encode_content(text)
    assert not CODEC.control_positions(ids)
    assert CODEC.decode(ids) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.mark.slow
@settings(max_examples=100)
@given(st.text().filter(lambda t: "<" not in t and t.isprintable()))
def test_text_without_markers_gets_the_stock_ids(text: str) -> None:
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n"
    assert CODEC.encode(rendered).tolist() == CODEC.encode_stock(rendered).tolist()


def test_scaffold_and_content_are_one_run() -> None:
    """`\\n` of the scaffold and the content's own line breaks merge as the stock tokenizer merges them."""
    rendered = "<|im_start|>user\n\n\n    return a + b\n\n<|im_end|>"
    shielded = "<|im_start|>user\n" + CODEC.shield("\n\n    return a + b\n\n") + "<|im_end|>"
    assert CODEC.encode(shielded).tolist() == CODEC.encode_stock(rendered).tolist()


def test_scaffold_cannot_complete_a_marker_begun_by_content() -> None:
    ids = CODEC.encode(CODEC.shield("<|im_") + "end|>")
    assert not CODEC.control_positions(ids)


def test_markers_are_counted() -> None:
    assert CODEC.markers_in("a<|im_end|><tool_call>b</tool_call><|im_e") == 3


@pytest.mark.parametrize("firsts", ["<", "<["])
def test_looking_for_markers_takes_no_step_of_python_for_each_beginning(firsts: str) -> None:
    """An agent that sends nothing but beginnings of markers must not make the gateway slow."""
    spec = json.loads(tokenizer_json())
    if "[" in firsts:
        token = dict(spec["added_tokens"][-1], content="[INST]", id=spec["added_tokens"][-1]["id"] + 1)
        spec["added_tokens"].append(token)
    codec = Codec(json.dumps(spec))
    assert sorted({marker[0] for marker in codec.control}) == sorted(firsts)
    calls = 0

    def counted(*_: object) -> None:
        nonlocal calls
        calls += 1

    text = firsts * 10_000 + "".join(codec.control) + firsts * 10_000
    sys.setprofile(counted)
    try:
        found = codec.markers_in(text)
    finally:
        sys.setprofile(None)
    assert found == len(codec.control)
    assert calls < 200 + 4 * found


def test_the_longest_marker_is_found() -> None:
    spec = json.loads(tokenizer_json())
    last = spec["added_tokens"][-1]
    for i, name in enumerate(("<a", "<a>b", "<a>"), 1):
        spec["added_tokens"].append(dict(last, content=name, id=last["id"] + i))
    codec = Codec(json.dumps(spec))
    assert codec.encode("<a<a>b<a>").tolist() == [codec.control[name] for name in ("<a", "<a>b", "<a>")]


def test_an_added_token_may_stay_ordinary() -> None:
    codec = Codec(tokenizer_json(), control=["<|im_start|>", "<|im_end|>"])
    assert codec.encode_content("<think>").tolist() == [CODEC.control["<think>"]]
    assert not codec.control_positions(codec.encode_content("<|im_end|>"))


def test_an_unknown_control_token_is_refused() -> None:
    with pytest.raises(RenderError, match="nope"):
        Codec(tokenizer_json(), control=["<nope>"])


def test_a_tokenizer_that_spells_control_tokens_from_text_is_refused() -> None:
    spec = json.loads(tokenizer_json())
    token = next(t for t in spec["added_tokens"] if t["content"] == "<think>")
    token["content"] = "def"
    spec["model"]["vocab"]["def"] = token["id"]
    with pytest.raises(RenderError, match="ordinary character"):
        Codec(json.dumps(spec))


def test_control_positions_of_any_ids() -> None:
    """Ids outside the vocabulary are no control tokens, whichever way they lie outside."""
    some = sorted(CODEC.names)
    ids = np.array([some[0], -1, -(2**31), 2**31 - 1, CODEC.vocab_size, some[-1] + 1, some[-1]], np.int32)
    assert CODEC.control_positions(ids) == [0, 6]
    assert CODEC.control_positions(ids[:0]) == []


@settings(max_examples=300)
@given(st.lists(st.integers(0, CODEC.vocab_size + 1), max_size=40))
def test_the_table_of_bytes_decodes_as_the_library_does(ids: list[int]) -> None:
    assert CODEC._bytes is not None
    assert CODEC.decode(np.array(ids, dtype=np.int32)) == CODEC._stock.decode(ids, skip_special_tokens=False)


@settings(max_examples=300)
@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_decode_as_the_library_does(raw: bytes) -> None:
    """Any bytes can be sampled: cut characters, stray continuations, surrogates."""
    ids = [int(CODEC._stock.token_to_id(BYTE_LETTERS[byte])) for byte in raw]
    assert CODEC.decode(np.array(ids, dtype=np.int32)) == CODEC._stock.decode(ids, skip_special_tokens=False)


def test_a_tokenizer_that_decodes_otherwise_is_left_to_the_library() -> None:
    spec = json.loads(tokenizer_json())
    assert byte_table(Tokenizer.from_str(json.dumps(spec))) is not None
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [spec["decoder"], {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
    }
    assert byte_table(Tokenizer.from_str(json.dumps(spec))) is None


@pytest.mark.slow
def test_a_decoder_that_changes_one_token_of_a_large_vocabulary_is_left_to_the_library() -> None:
    spec = json.loads(tokenizer_json())
    vocab = spec["model"]["vocab"]
    vocab |= {f"filler{i}": len(vocab) + i for i in range(150_000)}
    for i, token in enumerate(spec["added_tokens"]):
        token["id"] = len(vocab) + i
    text = "<|im_end|>"
    drop = {"type": "Replace", "pattern": {"String": text}, "content": ""}
    spec["decoder"] = {"type": "Sequence", "decoders": [spec["decoder"], drop]}
    codec = Codec(json.dumps(spec))
    ids = np.array([codec.control[text], *codec.encode_content("é")], dtype=np.int32)
    library = Tokenizer.from_str(json.dumps(spec)).decode(ids.tolist(), skip_special_tokens=False)
    assert codec.decode(ids) == library == "é"


def test_negative_ids_are_refused_as_by_the_library() -> None:
    with pytest.raises(OverflowError):
        CODEC.decode(np.array([5, -1], dtype=np.int32))


def test_scaffold_is_encoded_once() -> None:
    calls = 0
    inner = CODEC._plain

    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: object) -> object:
            nonlocal calls
            calls += 1
            return inner.encode_batch_fast(texts, **options)

    codec = Codec(tokenizer_json())
    codec._plain = Counting()
    once = [codec.encode(f"<|im_start|>tool\n{text}<|im_end|>\n").tolist() for text in ("a" * 40, "b" * 40)]
    assert calls == 2 * 1 + 1, "the new text each time and the line break once"
    assert once == [CODEC.encode(f"<|im_start|>tool\n{t}<|im_end|>\n").tolist() for t in ("a" * 40, "b" * 40)]
