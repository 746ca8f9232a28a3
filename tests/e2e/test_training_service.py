"""Whole runs at a training service (a stand-in for its SDK): trained, killed, resumed, sampled from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.config import WARM_START
from insitu.storage.run_dir import read_store
from insitu.types import Rollout
from insitu_bridges.equality import difference
from insitu_train.service.checkpoint import read_checkpoint

pytestmark = pytest.mark.slow

DEADLINE_S = 240
SDK = Path(__file__).parents[1] / "fakes" / "tinker_sdk"
SERVICE = [
    "run.steps=3", "eval.count=4", "collect.groups_per_step=3", "collect.group_size=4",
    "harness.workers=4", "train.threads=1", "train.min_groups=1", "train.max_logprob_gap=1e-4",
    "engine.kind=tinker", f"engine.model={WARM_START}", "policy.kind=tinker", "policy.lora_rank=8",
    "run.checkpoint_every_steps=1",
    "engine.prices={input=2.0, output=3.0, train=5.0}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "service"
    folder.mkdir()
    (folder / "rule").write_text("skyrl")
    monkeypatch.setenv("FAKE_TINKER", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SDK), os.environ.get("PYTHONPATH", "")]))
    return folder


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "insitu", *map(str, arguments)]


def finish(arguments: Sequence[str]) -> dict[str, Any]:
    """Run to the end; the summary is the last line of stdout."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def demo(run_dir: Path, *overrides: str) -> list[str]:
    return command(
        *("demo", "--agent", "script", "--plain", "--json", f"run.dir={run_dir}"), *SERVICE, *overrides
    )


def graded(run_dir: Path) -> dict[str, Rollout]:
    """Return the graded rollouts of training, also of a run that was killed."""
    rollouts = insitu.open_run(run_dir).rollouts(phase="train")
    return {rollout.id: rollout for rollout in rollouts if rollout.reward is not None}


def check(summary: dict[str, Any], run_dir: Path) -> None:
    assert (summary["rl_steps"], summary["updates"], summary["mismatched"]) == (3, 3, 0)
    assert 0 < summary["max_logprob_gap"] <= 1e-4
    run = insitu.open_run(run_dir)
    assert run.ledger.balanced
    assert run.ledger.trained > 0
    last = read_checkpoint(run_dir / "checkpoints" / "step-00003")
    assert (last.steps, last.version, last.weights) == (3, 3, summary["weights"])
    assert last.state.startswith("tinker://")
    check_bill(summary["service"], run_dir)


def check_bill(bill: dict[str, Any], run_dir: Path) -> None:
    """What is said to be billed is counted again from the stored tokens."""
    prompts = sampled = 0
    groups: defaultdict[tuple[int, str], list[Rollout]] = defaultdict(list)
    with read_store(run_dir) as store:
        for phase, step in store.phases():
            for rollout in store.rollouts(phase, step):
                turns = rollout.trajectory.turns
                ends = [0] * len(turns)
                for at, turn in enumerate(turns):
                    before = ends[turn.parent] if turn.parent >= 0 else 0
                    prompts += before + len(turn.context_ids)
                    sampled += len(turn.ids)
                    ends[at] = before + len(turn.context_ids) + len(turn.ids)
                if phase == "train":
                    groups[step, rollout.task_id].append(rollout)
    trained = sum(
        len(segment.ids)
        for group in groups.values()
        if len({rollout.reward for rollout in group}) > 1
        for rollout in group
        for segment in rollout.trajectory.segments
    )
    assert (bill["prompt_tokens"], bill["sampled_tokens"]) == (prompts, sampled)
    assert bill["trained_row_tokens"] == trained > 0
    assert bill["cost"] == round((2 * prompts + 3 * sampled + 5 * trained) / 1e6, 4)


@pytest.mark.full
def test_a_run_is_trained_at_the_service_and_resumed_after_kill_9(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with (tmp_path / "out").open("wb") as out:
        child = subprocess.Popen(demo(run_dir), stdout=out, stderr=out)
    deadline = time.monotonic() + DEADLINE_S
    # A step is committed, and rollouts of the next one are graded.
    while not (run_dir / "checkpoints" / "step-00001").exists() or len(graded(run_dir)) <= 12:
        assert child.poll() is None, (tmp_path / "out").read_text()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = graded(run_dir)
    check(finish(command("demo", "--plain", "--json", "--resume", run_dir)), run_dir)
    rollouts = insitu.open_run(run_dir).rollouts(phase="train")
    assert len({rollout.id for rollout in rollouts}) == len(rollouts) == 36
    after = {rollout.id: rollout for rollout in rollouts}
    assert [difference(rollout, after[name]) for name, rollout in before.items()] == [""] * len(before)


@pytest.mark.full
def test_tokens_carry_the_version_that_sampled_them_while_it_trains(tmp_path: Path) -> None:
    summary = finish(demo(tmp_path / "run", "collect.max_staleness=2"))
    check(summary, tmp_path / "run")
    rollouts = insitu.open_run(tmp_path / "run").rollouts(phase="train")
    tokens = [rollout.tokens() for rollout in rollouts]
    assert {int(v) for t in tokens for v in t.versions[t.mask]} <= {0, 1, 2}
    assert any(t.versions[t.mask].max(initial=0) > 0 for t in tokens)


@pytest.mark.full
def test_rollouts_without_training(tmp_path: Path, service: Path) -> None:
    summary = finish(
        command(
            *("rollout", "--json", f"run.dir={tmp_path / 'run'}", "harness.agent=script", "rollout.count=2"),
            *("engine.kind=tinker", f"engine.model={WARM_START}"),
        )
    )
    assert summary["rollouts"] == 2
    assert not list(service.glob("*.pt")), "nothing is trained"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["policy.kind=builtin", "policy.lora_rank=0"], "needs policy.kind = 'tinker' too"),
        pytest.param(["policy.lora_rank=0"], "needs policy.lora_rank", marks=pytest.mark.full),
        pytest.param(["engine.temperature=0.7"], "at engine.temperature = 1 only", marks=pytest.mark.full),
        pytest.param(
            ["train.kl=k2", "train.kl_weight=0.1"],
            "train.kl needs a reference policy",
            marks=pytest.mark.full,
        ),
        (["engine.key_env=NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY is not set"),
        (["engine.urls=http://127.0.0.1:1"], "training service: connect to http://127.0.0.1:1 with SDK"),
        (["engine.model=tinker://x/y"], "is not a base model"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(tmp_path: Path, overrides: list[str], line: str) -> None:
    done = subprocess.run(
        demo(tmp_path / "run", *overrides), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode != 0
    assert line in done.stderr.splitlines()[-1], done.stderr[-1000:]
    assert "Traceback" not in done.stderr
