"""Several evaluations in one run: other tasks, another agent, several samples; runs that stop early."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from insitu.shutdown import descendants
from insitu.storage.metrics import read_metrics
from insitu.storage.run_dir import read_store
from tests.e2e.test_runs import command, finish, is_learner, plans, wait_for

pytestmark = pytest.mark.slow

SMALL = [
    "run.steps=2", "collect.groups_per_step=2", "collect.group_size=4", "harness.workers=4",
    "train.threads=1", "train.min_groups=1",
]  # fmt: skip
PLAIN = '[harness]\nagent = "script"\n\n[[eval]]\ncount = 4\n'
MORE = """
[[tasks]]
name = "fixes"
kinds = ["operator"]

[[tasks]]
name = "swaps"
kinds = ["swapped"]
weight = 0

[[eval]]
count = 4
tasks = ["fixes"]

[[eval]]
name = "swapped"
tasks = ["swaps"]
count = 3
samples = 2
temperature = 0.7
every_steps = 1

[[eval]]
name = "plain"
tasks = ["fixes"]
count = 4
harness = { agent = "single_turn" }
limits = { max_call_tokens = 128 }

[harness]
agent = "script"
"""


def train(folder: Path, text: str, *overrides: str) -> tuple[Path, dict[str, Any]]:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(text)
    run_dir = folder / "run"
    arguments = command("train", folder / "run.toml", "--plain", "--json", f"run.dir={run_dir}", *SMALL)
    return run_dir, finish([*arguments, *overrides])


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return train(tmp_path_factory.mktemp("evaluated") / "more", MORE)


@pytest.mark.full
def test_further_evaluations_change_no_bit_of_training(
    evaluated: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    alone = PLAIN + '\n[[tasks]]\nname = "fixes"\nkinds = ["operator"]\n'
    run_dir, summary = train(tmp_path / "alone", alone)
    assert summary["weights"] == evaluated[1]["weights"]
    assert plans(run_dir) == plans(evaluated[0])
    for same in ("heldout_before", "heldout_after", "heldout_tasks", "rl_steps"):
        assert summary[same] == evaluated[1][same]


def test_each_evaluation_is_stored_under_its_name_and_never_trained(
    evaluated: tuple[Path, dict[str, Any]],
) -> None:
    run_dir, summary = evaluated
    with read_store(run_dir) as store:
        counts = {f"{phase} {step}": n for (phase, step), n in store.phases().items() if phase != "train"}
        assert counts == {
            "eval_before 0": 4, "eval_before.swapped 0": 6, "eval_before.plain 0": 4,
            "eval_during.swapped 1": 6,
            "eval_after 2": 4, "eval_after.swapped 2": 6, "eval_after.plain 2": 4,
        }  # fmt: skip
        assert store.check_balance().discarded["evaluation"] == 34
        after = store.rollouts("eval_after.swapped", 2)
        assert {rollout.part for rollout in after} == {"swaps"}
        # the two samples of a task differ in their random streams, not in the task
        assert len({rollout.task_id for rollout in after}) == 3
        plain = store.rollouts("eval_after.plain", 2)
        assert {rollout.part for rollout in plain} == {"fixes@plain"}
        assert all(len(rollout.turns) == 1 for rollout in plain)
        assert [r.task_id for r in plain] == [r.task_id for r in store.rollouts("eval_after", 2)]
    assert summary["agent"] == "script"


def test_numbers_have_intervals_and_a_comparison_with_the_start(
    evaluated: tuple[Path, dict[str, Any]],
) -> None:
    run_dir, summary = evaluated
    lines = {(line["event"], line["step"]): line for line in read_metrics(run_dir / "metrics.jsonl")}
    line = lines["eval_during.swapped", 1]
    assert (line["total"], line["version"]) == (6, 1 + lines["eval_before", 0]["version"])
    assert line["solve_rate_low"] <= line["solve_rate"] <= line["solve_rate_high"]
    assert line["solve_rate_tasks"] == line["pass_at_2_tasks"] == 3
    assert line["pass_all_2"] <= line["solve_rate"] <= line["pass_at_2"]
    found = summary["evaluations"]
    assert list(found) == ["heldout", "swapped", "plain"]
    swapped = found["swapped"]
    assert (swapped["tasks"], swapped["samples"]) == (3, 2)
    change = swapped["after"]["solve_rate"] - swapped["before"]["solve_rate"]
    assert swapped["gain"]["value"] == pytest.approx(change, abs=1e-3)
    assert swapped["gain"]["low"] <= swapped["gain"]["value"] <= swapped["gain"]["high"]


@pytest.mark.full
def test_beside_training_an_evaluation_finds_the_same_after_two_kills(
    evaluated: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The learner is killed when the first of its rollouts is there, and the whole run a little later."""
    run_dir, phase = tmp_path / "run", "eval_during.swapped"
    beside = MORE.replace("every_steps = 1", "every_steps = 1\nbeside_training = true")
    (tmp_path / "run.toml").write_text(beside)
    arguments = command("train", tmp_path / "run.toml", "--plain", f"run.dir={run_dir}", *SMALL)
    child = subprocess.Popen(
        [*arguments, "harness.workers=2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(run_dir, child, (phase, 1), 1)
    (learner,) = [pid for pid in descendants(child.pid) if is_learner(pid)]
    os.kill(learner, signal.SIGKILL)
    wait_for(run_dir, child, (phase, 1), 3)
    child.kill()
    child.wait(10)
    with read_store(run_dir) as store:
        assert store.phases()[phase, 1] < 6, "the kill came too late to tell"
        assert len(store.steps()) == 1, "the step beside it is not committed"
    done = command("train", "--plain", "--json", "--resume", run_dir)
    summary = finish(done)
    assert summary["weights"] == evaluated[1]["weights"]
    assert plans(run_dir) == plans(evaluated[0])
    assert summary["evaluations"] == evaluated[1]["evaluations"]
    with read_store(run_dir) as store, read_store(evaluated[0]) as other:
        found, same = store.rollouts(phase, 1), other.rollouts(phase, 1)
        assert [(r.id, r.reward, len(r.turns)) for r in found] == [
            (r.id, r.reward, len(r.turns)) for r in same
        ]
        balance = store.check_balance()
        assert (balance.pending, balance.discarded["evaluation"]) == (0, 34)
    (line,) = [line for line in read_metrics(run_dir / "metrics.jsonl") if line["event"] == phase]
    assert {int(v) for r in found for s in r.trajectory.segments for v in s.versions[s.mask]} == {
        line["version"]
    }


@pytest.mark.full
@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_without_improvement_ends_early_and_keeps_the_best(tmp_path: Path, beside: bool) -> None:
    stalled = [
        "run.steps=6",
        "eval.every_steps=1",
        "run.stop_after_evals=2",
        "train.lr=1e-12",
        "run.keep_checkpoints=1",
        f"eval.beside_training={str(beside).lower()}",
    ]
    run_dir, summary = train(tmp_path / "stalled", PLAIN, *stalled)
    assert summary["stopped_early"]
    assert summary["rl_steps"] < 6
    with read_store(run_dir) as store:
        last = store.steps()[-1].step
        scores = {
            step: store.scores(phase, step)[""].reward_mean
            for phase, step in store.phases()
            if phase == "eval_during"
        }
        before = store.scores("eval_before", 0)[""].reward_mean
        assert last == max(scores) + beside
        found = {last: store.scores("eval_after", last)[""].reward_mean, **scores}
    best = max(found.values())
    assert found[summary["best_step"]] == summary["best_heldout_reward"] == best
    seen = [before, *scores.values()]
    assert len(seen) - 1 - seen.index(max(seen)) == 2
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert f"step-{summary['best_step']:05d}" in kept
    assert json.loads((run_dir / "summary.json").read_text())["stopped_early"]


def test_an_evaluation_larger_than_its_tasks_ends_before_anything_starts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "Fix it.", "entry": "m.py", "files": {"m.py": "def f():\n    return 1\n"}}
    row["cases"] = [{"function": "f", "args": [], "expected": 2}]
    rows.write_text(
        "".join(json.dumps({**row, "id": f"r{n}", "prompt": f"Fix {n}."}) + "\n" for n in range(4))
    )
    tasks = f'[tasks]\nsource = "jsonl"\npath = "{rows}"\neval_share = 0.5\n'
    text = tasks + PLAIN.replace("count = 4", "count = 60")
    (tmp_path / "run.toml").write_text(text)
    arguments = command("train", tmp_path / "run.toml", "--plain", f"run.dir={tmp_path / 'run'}")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert re.search(r"eval.heldout.count = 60: jsonl has \d tasks in the eval split", done.stderr)
    assert not (tmp_path / "run").exists()
