"""`python -m benchmarks step` with a tiny shape: the form of its line, and that a step got cheaper."""

from __future__ import annotations

import json

import pytest

from benchmarks import step
from insitu_train.options import Lora

pytestmark = pytest.mark.slow

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip


def test_both_ways_publish_the_same_and_are_reported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = step.Case(shape=TINY, layers=4, measured=1, vocab=512)
    adapters = step.Case(shape=TINY, layers=4, measured=1, vocab=512, lora=Lora(rank=2, alpha=4.0))
    monkeypatch.setattr(step, "CASES", {"full": case, "lora": adapters})
    assert step.main(["--json", "--repeats", "1"]) == 0
    said = capfd.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert [*found] == ["full", "lora"]
    assert found["lora"]["factor"] == 4.0, "adapters have no part of the vocabulary"
    assert found["full"]["factor"] > 4
    assert {*found["full"]["seconds"]} == {
        "update", "checksum", "publish", "copy", "background", "publish_before", "checkpoint_before",
    }  # fmt: skip
    assert said.err.count("before") == 4
