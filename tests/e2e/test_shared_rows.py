"""Whole runs of `insitu train` with rows that no rank holds and all ranks together do: as one process that
holds them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from insitu.config import WARM_START, load_config
from insitu.errors import SetupError
from insitu.storage.run_dir import read_store
from insitu_train.channel.host_link import SECRET
from insitu_train.model.load import open_policy
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.recovery import stored_groups
from insitu_train.run_report import show_run
from insitu_train.trainer.trainer import Trainer
from sources import SOURCES
from tests.fakes.net_hosts import net_hosts

pytestmark = pytest.mark.full

STEPS, RUN_S = 2, 300.0
INSITU = [sys.executable, "-m", "insitu"]
GIB = 0.006
"""Of what a rank may fill: a long row takes 0.0075 by all memory options, one of two parts 0.0049."""
CONFIG = f"""
[run]
steps = {STEPS}
dir = "run"
[eval]
count = 0
[model]
path = "model"
max_context_tokens = 2048
[tasks]
source = "jsonl"
path = "tasks.jsonl"
eval_share = 0.0
[reward]
function = "rewards.py:score"
[harness]
agent = "single_turn"
workers = 2
[limits]
max_calls = 1
max_call_tokens = 24
[collect]
groups_per_step = 2
group_size = 2
[policy]
kind = "hf"
device = "cpu"
memory_gib = {GIB}
[train]
lr = 1e-3
threads = 1
min_groups = 1
token_budget = 600
"""
REWARD = """
def score(rollout):
    return sum(int(number) for turn in rollout.turns for number in turn.ids) % 97 / 97
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a random Llama, a task with a long prompt, one with a short prompt, and a reward."""
    folder = tmp_path / "work"
    model = folder / "model"
    model.mkdir(parents=True)
    torch.manual_seed(0)
    shape = {
        "vocab_size": 454, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, eos_token_id=2)).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(WARM_START / name, model / name)
    case = {"function": "f", "args": [1], "expected": 2}
    rows = [
        {
            "id": f"task-{words}", "prompt": "Write f. " + "one two " * words, "cases": [case],
            "files": {"a.py": "def f(x):\n    return x\n"}, "entry": "a.py",
            "gold": {"a.py": "def f(x):\n    return x + 1\n"},
        }
        for words in (150, 6)
    ]  # fmt: skip
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    return folder


def variables() -> dict[str, str]:
    return {**os.environ, SECRET: "a secret", "PYTHONPATH": SOURCES}


def one_process(place: Path, run: Path) -> dict[str, torch.Tensor]:
    """The weights of one process, without a limit of memory, after the steps of the run's own rollouts."""
    config = load_config(place / "mine.toml", ["train.ranks=1", "policy.memory_gib=0"])
    train = TrainConfig.of(config)
    trainer = Trainer(open_policy(place / "model", train.policy), train)
    with read_store(run) as store:
        for step in range(1, STEPS + 1):
            trainer.step(plan_step(stored_groups(store, step), PlanConfig.of(config)))
    return {name: weight.detach() for name, weight in trainer.optimiser.named.items()}


def check(place: Path, said: str) -> None:
    """Each step has shared rows, says so, and the last weights are those of one process."""
    run = place / "run"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(one["ranks"], one["shared_rows"]) for one in steps if one["event"] == "step"] == [(2, 2)] * STEPS
    assert all(0 < one["shared_s"] < one["seconds"] for one in steps if one["event"] == "step")
    assert said.count("2 rows that no rank holds were computed by 2 ranks together in ") == STEPS, said
    assert said.count(" s (1,2") == STEPS, said
    assert "shared  4 rows in 2 of 2 steps" in show_run(run)
    trained = load_file(run / "checkpoints" / f"step-{STEPS:05d}" / "model.safetensors")
    start = load_file(place / "model" / "model.safetensors")
    expected = one_process(place, run)
    assert len(trained) == len(expected)
    for name, weight in expected.items():
        assert float((trained[name] - start[name]).abs().max()) > 5e-4, name
        assert float((trained[name] - weight).abs().max()) < 2e-4, name


def test_two_ranks_of_one_host(place: Path) -> None:
    (place / "mine.toml").write_text(CONFIG + "ranks = 2\n")
    words = [*INSITU, "train", "mine.toml", "--plain"]
    done = subprocess.run(
        words, cwd=place, env=variables(), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(place, done.stdout + done.stderr)


def test_two_hosts_of_one_rank_and_a_replay_on_one(place: Path, tmp_path: Path) -> None:
    (place / "mine.toml").write_text(CONFIG + 'ranks = "1+1@10.77.0.1:29400"\n')
    log, ranks_log = tmp_path / "log", tmp_path / "ranks"
    with ExitStack() as stack:
        try:
            one, two = stack.enter_context(net_hosts("one", "two"))
        except SetupError as error:
            pytest.skip(f"no hosts here: {error}")
        # host two has a copy of the model and nothing else of the learner's folder
        copied = shutil.copytree(place / "model", tmp_path / "copy")
        two.run("mount", "-t", "tmpfs", "none", str(place))
        ranks = [*INSITU, "ranks", "10.77.0.1:29400", "--model", str(copied)]
        stack.enter_context(two.started(*ranks, log=ranks_log, env=variables(), cwd=tmp_path))
        train = [*INSITU, "train", "mine.toml", "--plain"]
        run = stack.enter_context(one.started(*train, log=log, env=variables(), cwd=place))
        assert run.wait(RUN_S) == 0, log.read_text() + ranks_log.read_text()
    assert "train.ranks: 2 ranks, 1 here, 1 of two (10.77.0.2)" in log.read_text()
    check(place, log.read_text())
    replay = [*INSITU, "replay", "run", "--json"]
    done = subprocess.run(replay, cwd=place, env=variables(), capture_output=True, timeout=RUN_S, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["identical"]
