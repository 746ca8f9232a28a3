"""Every file in examples/ is a configuration that its verb takes, on a machine that has nothing of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from insitu import cli
from insitu.config import load_config
from insitu_train.options import TrainConfig

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def verb_of(example: Path) -> str:
    return "rollout" if "rollout" in tomllib.loads(example.read_text()) else "train"


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_dry(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([verb_of(example), str(example), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert load_config(base=tomllib.loads(said.out)) == load_config(example)
    assert said.err == ""
    assert list(tmp_path.iterdir()) == []


def test_the_examples_are_all_here() -> None:
    assert [path.name for path in EXAMPLES] == [
        "curriculum.toml",
        "demo.toml",
        "distill.toml",
        "eight-80gb.toml",
        "evaluation.toml",
        "fleet.toml",
        "mix.toml",
        "one-24gb.toml",
        "one-80gb.toml",
        "qwen3-vllm.toml",
        "rollout.toml",
        "small-agent-teacher.toml",
        "small-agent.toml",
        "small-model.toml",
        "two-agents.toml",
        "two-engines.toml",
    ]


def test_the_qwen3_example_trains_adapters_and_bears_bfloat16() -> None:
    train = TrainConfig.of(load_config(next(path for path in EXAMPLES if path.stem == "qwen3-vllm")))
    assert train.policy.lora is not None
    assert train.policy.lora.rank == 16
    assert train.max_logprob_gap == 1.0
