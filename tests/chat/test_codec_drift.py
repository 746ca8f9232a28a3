"""The measurements of `python -m benchmarks.drift` on Qwen's real vocabulary, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from qwen_vocabulary import qwen_tokenizer_json

from benchmarks import drift
from insitu.chat.codec import Codec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def codec(request: pytest.FixtureRequest) -> Codec:
    return Codec(qwen_tokenizer_json(request.config.cache.mkdir("insitu")))


def test_the_vocabulary_is_qwens(codec: Codec) -> None:
    assert codec.vocab_size == 151669
    assert codec.control["<|im_end|>"] == 151645
    assert codec.encode("<|im_start|>user\n").tolist() == [151644, 872, 198]


@pytest.mark.case(1, 51)
def test_encoding_again_changes_ids_and_our_encoder_makes_no_control_tokens(codec: Codec) -> None:
    cuts, splits = drift.cuts(codec, 100, 1), drift.splits(codec, 100, 1)
    assert cuts.hits > 10, "cutting a text changes its ids: sampled spans must not be encoded again"
    assert splits.trials == 100
    assert splits.hits == 0, "a split that no tokenizer chooses never survives"
    texts = drift.marked_texts(codec, 1)
    assert drift.injected(codec, texts, stock=True).hits == len(texts)
    assert drift.injected(codec, texts, stock=False).hits == 0
    assert drift.agreement(codec, 50, 1).hits == 0


def test_the_command_prints_one_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, codec: Codec
) -> None:
    from render_families import tokenizer_json

    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    assert drift.main([str(tmp_path), "--trials", "5", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert reported["cuts_differ"]["trials"] == 5
    assert drift.main([str(tmp_path / "nothing")]) == 1
    assert "no tokenizer.json" in capsys.readouterr().err
