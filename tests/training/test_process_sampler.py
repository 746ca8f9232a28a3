"""What is decided of the embedded engine before a learner starts: the architecture, its memory, its size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu_train.learner.process import LearnerSpec, require_learner

SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
GIB = 1 << 30


def configured(folder: Path, *keys: str) -> Config:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    sessions = ["harness.workers=32", "model.max_context_tokens=8192", f"model.path={folder}"]
    return load_config(None, ["policy.kind=hf", *sessions, *keys])


def test_contexts_that_do_not_fit_are_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 sessions of 8,192 tokens of a 135M model and 8 GiB: by bfloat16 only."""
    monkeypatch.setattr("insitu_train.learner.process.available_memory", lambda: 8 * GIB)
    with pytest.raises(ConfigError) as found:
        require_learner(configured(tmp_path))
    assert str(found.value) == (
        "model.max_context_tokens 8,192: keys and values of 32 sessions (harness.workers) may take 11.4 GiB,"
        " 46,080 bytes a token, and 8.0 GiB of memory are available: lower either, or set"
        ' policy.dtype = "bfloat16"'
    )
    require_learner(configured(tmp_path, "policy.dtype=bfloat16"))


def test_a_model_that_the_engine_does_not_run_is_refused_before_a_learner_starts(tmp_path: Path) -> None:
    config = configured(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"^model.path: a model of type gpt2: .* engine.kind = .vllm. runs"):
        require_learner(config)


@pytest.mark.parametrize(("workers", "rows"), [(1, 4), (30, 32), (64, 64), (200, 64)])
def test_the_engine_has_a_row_for_each_session(tmp_path: Path, workers: int, rows: int) -> None:
    spec = LearnerSpec.of(configured(tmp_path, f"harness.workers={workers}"), model=tmp_path)
    assert (spec.max_rows, spec.engine_threads) == (rows, 2)
