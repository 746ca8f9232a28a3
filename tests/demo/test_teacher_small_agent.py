"""The way of docs/sft.md with a small model: demonstrations, imitation, a step from its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu import cli
from insitu.chat.load import load_renderer
from insitu.config import load_config, model_folder
from insitu.errors import ConfigError
from tests.training.gguf_lab import gguf_of
from tests.training.gguf_lab import model_folder as random_model

REWARD = """
def by_token(rollout):
    return int(rollout.turns[0].ids[0]) % 5 / 5
"""
STEP = [
    *("run.steps=1", "eval.count=2", "collect.groups_per_step=2", "collect.group_size=4"),
    *("harness.workers=4", "limits.max_calls=2", "limits.max_call_tokens=16"),
]


@pytest.mark.full
def test_from_a_gguf_file_without_tools_to_a_step_in_an_agent_with_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    source = random_model(tmp_path / "model", "llama")
    described = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (source / "config.json").write_text(json.dumps(described))
    file = gguf_of(source, tmp_path / "model.gguf")
    (tmp_path / "own.py").write_text(REWARD)
    teacher, imitated, learnt = (tmp_path / name for name in ("teacher", "imitated", "learnt"))
    long = ["--plain", "model.max_context_tokens=2048", "policy.dtype=float32"]
    taught = ["rollout.count=8", f"model.path={file}", f"run.dir={teacher}", "limits.max_call_tokens=256"]
    assert cli.main(["rollout", "examples/small-agent-teacher.toml", *long, *taught]) == 0
    assert cli.main(["sft", str(teacher), "--plain", "sft.rollouts_per_step=4", f"run.dir={imitated}"]) == 0
    summary = json.loads((imitated / "summary.json").read_text())
    assert summary["choice"] == "8 rollouts, 8 chosen"
    start = [f"model.path={summary['checkpoint']}", f"run.dir={learnt}"]
    own = f"reward.function={tmp_path}/own.py:by_token"
    assert cli.main(["train", "examples/small-agent.toml", *long, *STEP, *start, own]) == 0
    assert json.loads((learnt / "summary.json").read_text())["updates"] == 1
    # Another server gets the template with tools too, and no setting.
    (checkpoint,) = (learnt / "checkpoints").iterdir()
    assert load_renderer(checkpoint).caps.tools


def test_no_model_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model folder: it has no tokenizer.json"):
        model_folder(load_config(None, [f"model.path={tmp_path}/none", "model.renderer=hermes"]))
