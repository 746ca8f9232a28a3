"""A run of two task sets and two agents through the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from insitu.chat.load import load_renderer
from insitu.config import WARM_START
from insitu.storage.metrics import read_metrics
from insitu.storage.run_dir import read_store
from insitu_view.tracking.names import numbers
from tests.e2e.test_runs import command, finish, plans, wait_for

pytestmark = pytest.mark.slow

SMALL = [
    "run.steps=2", "eval.count=6", "collect.groups_per_step=3", "collect.group_size=4", "harness.workers=4",
    "train.threads=1", "train.min_groups=1",
]  # fmt: skip


def train(run_dir: Path) -> list[str]:
    return command("train", "examples/mix.toml", "--plain", "--json", f"run.dir={run_dir}", *SMALL)


def run_text(*arguments: object) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One undisturbed run."""
    run_dir = tmp_path_factory.mktemp("mix") / "reference"
    return run_dir, finish(train(run_dir))


def test_each_group_has_the_agent_and_the_limits_of_its_set(reference: tuple[Path, dict[str, Any]]) -> None:
    run_dir, summary = reference
    assert summary["agent"] == "script + pi"
    with read_store(run_dir) as store:
        assert store.check_balance().pending == 0
        groups = [store.rollouts("train", step) for step in (1, 2)]
    parts = [[rollout.part for rollout in rollouts[::4]] for rollouts in groups]
    assert [sorted(names) for names in parts] == [["operators", "operators", "swaps"]] * 2
    renderer = load_renderer(WARM_START)
    for rollout in (one for rollouts in groups for one in rollouts):
        prompt = renderer.decode(rollout.turns[0].context_ids)
        assert ("operating inside pi" in prompt) == (rollout.part == "swaps"), prompt
        assert rollout.category in (("swapped",) if rollout.part == "swaps" else ("operator", "comparison"))


def test_every_metric_of_a_step_is_there_by_name(reference: tuple[Path, dict[str, Any]]) -> None:
    steps = [line for line in read_metrics(reference[0] / "metrics.jsonl") if line["event"] == "step"]
    for line in steps:
        assert (line["operators/rollouts"], line["swaps/rollouts"]) == (8, 4)
        assert min(line["operators/calls_mean"], line["swaps/calls_mean"]) > 0
        graded = 8 * line["operators/solve_rate"] + 4 * line["swaps/solve_rate"]
        assert graded == pytest.approx(12 * line["solve_rate"])


def test_every_number_of_an_evaluation_is_there_by_name(reference: tuple[Path, dict[str, Any]]) -> None:
    run_dir, summary = reference
    for line in read_metrics(run_dir / "metrics.jsonl"):
        if not line["event"].startswith("eval"):
            continue
        assert (line["operators/total"], line["swaps/total"]) == (3, 3)
        assert line["operators/solved"] + line["swaps/solved"] == line["solved"]
        assert line["swaps/solve_rate_low"] <= line["swaps/solve_rate"] <= line["swaps/solve_rate_high"]
        assert numbers(line)["heldout/swaps/solve_rate"] == line["swaps/solve_rate"]
    found = summary["evaluations"]["heldout"]
    gains = [found["sets"][name]["gain"]["value"] for name in ("operators", "swaps")]
    assert sum(gains) / 2 == pytest.approx(found["gain"]["value"], abs=1e-3)
    report = (run_dir / "report.txt").read_text()
    assert "\n  operators  script  training " in report
    assert "\n  swaps      pi      training " in report


@pytest.mark.full
def test_a_killed_mix_resumes_to_the_same_bits(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "killed"
    child = subprocess.Popen(train(run_dir), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(run_dir, child, ("train", 1), 3)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    summary = finish(command("train", "--plain", "--json", "--resume", run_dir))
    assert summary["weights"] == reference[1]["weights"]
    assert plans(run_dir) == plans(reference[0])


@pytest.mark.full
def test_a_group_of_two_agents_is_one_group(tmp_path: Path) -> None:
    file, run_dir = "examples/two-agents.toml", tmp_path / "run"
    one_step = ["run.steps=1", *SMALL[1:]]
    summary = finish(command("train", file, "--plain", "--json", f"run.dir={run_dir}", *one_step))
    assert summary["agent"] == "script + pi"
    with read_store(run_dir) as store:
        rollouts = store.rollouts("train", 1)
        assert store.ledger().balanced
    parts = [rollout.part for rollout in rollouts]
    both = ["@+script", "@+pi"]
    for group in (parts[:4], parts[4:8], parts[8:]):
        assert group in (both * 2, both[::-1] * 2)
    (step,) = [line for line in read_metrics(run_dir / "metrics.jsonl") if line["event"] == "step"]
    assert (step["script/rollouts"], step["pi/rollouts"]) == (6, 6)
    assert step["script/solve_rate"] + step["pi/solve_rate"] == pytest.approx(2 * step["solve_rate"])
    report = (run_dir / "report.txt").read_text()
    assert re.search(r"\nAgents\n  script  .* held-out .*\n  pi      .* held-out ", report)
    counted = "SELECT agent, COUNT(*) AS n FROM v_rollouts GROUP BY agent ORDER BY agent"
    rows = run_text("query", run_dir, counted, "--json").splitlines()
    assert [json.loads(row) for row in rows] == [
        {"agent": "pi", "n": 12},
        {"agent": "script", "n": 12},
    ]
    run_text("export", run_dir, "--to", "atif", "--out", tmp_path / "atif")
    names = [
        json.loads(path.read_text())["agent_info"]["name"]
        for path in (tmp_path / "atif").rglob("result.json")
    ]
    assert sorted(names) == ["pi"] * 12 + ["script"] * 12
    assert "was " not in run_text("grade", run_dir)
    ends = [line for line in read_metrics(run_dir / "metrics.jsonl") if line["event"] == "eval_after"]
    assert [line["script/total"] + line["pi/total"] for line in ends] == [6]


@pytest.mark.full
def test_rollouts_without_training_are_counted_by_agent(tmp_path: Path) -> None:
    file, run_dir = tmp_path / "agents.toml", tmp_path / "run"
    file.write_text('[[tasks]]\nagents = [{ agent = "script" }, { agent = "single_turn" }]\n')
    numbers = ["rollout.count=3", "rollout.samples=1", "harness.workers=2", f"run.dir={run_dir}"]
    summary = finish(command("rollout", file, "--plain", "--json", *numbers))
    assert {name: one["graded"] for name, one in summary["sets"].items()} == {"script": 2, "single_turn": 1}
    lines = [json.loads(line) for line in (run_dir / "results.jsonl").read_text().splitlines()]
    assert [line["agent"] for line in lines] == ["script", "single_turn", "script"]
