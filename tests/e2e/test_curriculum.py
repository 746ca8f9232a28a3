"""A run that draws its tasks by their learning signal: each draw follows from the steps before it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from insitu.runtime.preflight import open_mix
from insitu.storage.run_dir import read_config, read_store
from insitu.storage.store import Store
from insitu_train.samplers import GroupOutcome, TaskDraws
from tests.e2e.test_runs import command, finish, plans, wait_for

pytestmark = pytest.mark.slow

TASKS = """
from insitu.tasks.toy import ToySource
from insitu.types import Limits

def twelve():
    source = ToySource(Limits())
    return [(task, source.oracle(task)) for task in source.tasks("train", 0, 12)]
"""
TABLES = '[harness]\nagent = "script"\n'
STEPS, GROUPS = 4, 3
SMALL = [
    f"run.steps={STEPS}", "eval.count=0", f"collect.groups_per_step={GROUPS}", "collect.group_size=4",
    "harness.workers=4", "train.threads=1", "train.min_groups=1",
    "tasks.sampler=signal", "tasks.eval_share=0",
]  # fmt: skip


def train(folder: Path, run_dir: Path, *overrides: str) -> list[str]:
    (folder / "mine.py").write_text(TASKS)
    source = f"tasks.source={folder / 'mine.py'}:twelve"
    (folder / "run.toml").write_text(TABLES)
    return command(
        "train", folder / "run.toml", "--plain", "--json", source, f"run.dir={run_dir}", *SMALL, *overrides
    )


def drawn(store: Store) -> list[str]:
    """Return the tasks of the groups of training in order of their draws."""
    places = [(1 + n // GROUPS, n % GROUPS) for n in range(STEPS * GROUPS)]
    return [store.group_states("train", *place)[0].task_id for place in places]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("curriculum")
    return folder / "run", finish(train(folder, folder / "run"))


@pytest.mark.full
def test_each_step_is_drawn_by_the_rewards_before_it(reference: tuple[Path, dict[str, Any]]) -> None:
    run_dir, _ = reference
    mix = open_mix(read_config(run_dir))
    settled: list[GroupOutcome] = []
    draw, found = TaskDraws(mix, lambda: settled), list[str]()
    with read_store(run_dir) as store:
        groups = store.group_outcomes()
        for step in range(STEPS):
            settled = [
                GroupOutcome(**{name: row[name] for name in GroupOutcome.__slots__})
                for row in groups[: step * GROUPS]
            ]
            found += [draw(number).id for number in range(step * GROUPS, (step + 1) * GROUPS)]
        assert drawn(store) == found
    assert len({*found[:GROUPS]}) == GROUPS


@pytest.mark.full
def test_a_killed_run_draws_the_same_tasks(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    arguments = train(tmp_path, run_dir)
    child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(run_dir, child, ("train", 3), 2)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    summary = finish(command("train", "--plain", "--json", "--resume", run_dir))
    assert summary["weights"] == reference[1]["weights"]
    assert plans(run_dir) == plans(reference[0])
    with read_store(run_dir) as resumed, read_store(reference[0]) as undisturbed:
        assert drawn(resumed) == drawn(undisturbed)


@pytest.mark.full
def test_ahead_of_the_trainer_the_ledger_balances(tmp_path: Path) -> None:
    run_dir = tmp_path / "ahead"
    summary = finish(train(tmp_path, run_dir, "collect.max_staleness=1"))
    assert summary["rl_steps"] == STEPS
    with read_store(run_dir) as store:
        assert store.check_balance().pending == 0


def test_a_set_without_end_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TABLES + '[tasks]\nsampler = "signal"\n')
    arguments = command("train", tmp_path / "run.toml", "--plain", f"run.dir={tmp_path / 'run'}")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "tasks.sampler = signal: toy has tasks without end, none comes again" in done.stderr
    assert not (tmp_path / "run").exists()
