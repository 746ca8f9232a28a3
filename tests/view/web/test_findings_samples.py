"""Evaluations with several rollouts of each task, some ungraded: every place shows the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from samples_lab import AFTER, BEFORE, STEP, UNGRADED, Rewards, put, stored

from insitu.cli import main
from insitu.progress.base import rounded
from insitu.storage.run_dir import RunDir, read_store
from insitu_train.curve import curve_of
from insitu_view.web.findings import compare_tasks
from insitu_view.web.pages import heldout
from insitu_view.web.runs import RunHandle, run_info


@pytest.mark.parametrize(("before", "after"), [(BEFORE, AFTER), (BEFORE, UNGRADED)])
def test_one_number_has_one_value_and_one_interval_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: Rewards, after: Rewards
) -> None:
    summary, text = stored(tmp_path / "r", before, after)
    numbers = summary["evaluations"]["heldout"]
    run = RunHandle("r", tmp_path / "r")
    with run.reader() as reader:
        points = {point["phase"]: point for point in heldout(reader) if not point["category"]}
    with read_store(run.path) as store:
        curve = {point.step: point.score for point in curve_of(store, "").heldout}
    info = run_info(run)
    sides = (("before", 0, "heldout_before"), ("after", STEP, "heldout_now"))
    for side, step, listed in sides:
        found, point = numbers[side], points[f"eval_{side}"]
        assert summary[f"heldout_{side}"] == summary[f"heldout_reward_{side}"] == found["solve_rate"]
        shown = [curve[step].rate, curve[step].low, curve[step].high]
        assert shown == [point["rate"], point["low"], point["high"]]
        assert [found[name] for name in ("solve_rate", "solve_rate_low", "solve_rate_high")] == [
            round(value, 4) for value in shown
        ]
        assert info[listed] == point["rate"]
        assert point["reward_mean"] == point["rate"]
        bounds = f"95 % {rounded(shown[1])} to {rounded(shown[2])}"
        assert f"  {side:<7} {rounded(shown[0])} ({point['solved']}/{point['total']}, {bounds})\n" in text
    compared = compare_tasks(run, run, ("eval_before", 0), ("eval_after", STEP))
    assert compared["change"] == numbers["gain"]
    (gain,) = (line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("  gain"))
    assert main(["compare", str(run.path), str(run.path)]) == 0
    assert f"change {gain}\n" in capsys.readouterr().out
    assert main(["show", str(run.path)]) == 0
    assert capsys.readouterr().out.endswith(text)


def test_the_result_that_ended_a_run_is_not_its_last(tmp_path: Path) -> None:
    stored(tmp_path / "r", BEFORE, AFTER)
    with RunDir.open(tmp_path / "r") as run, run.store() as store:
        put(store, "eval_during", STEP, [(1, 1, 1)] * 6)
    assert run_info(RunHandle("r", tmp_path / "r"))["heldout_now"] == 2 / 18


def test_a_solve_rate_is_the_mean_over_tasks_of_the_graded_rollouts(tmp_path: Path) -> None:
    """Of the tasks 1/1, 2/3, 0/3, 0/3, 0/3 and one ungraded: 0.33, though 3 of 13 rollouts are solved."""
    summary, text = stored(tmp_path / "r", UNGRADED, UNGRADED)
    assert summary["heldout_after"] == summary["heldout_reward_after"] == round(5 / 15, 4)
    assert summary["evaluations"]["heldout"]["gain"]["value"] == 0.0
    assert "  after   0.33 (3/13, 95 % " in text
    assert "    a  0.33 -> 0.33  (1/7 -> 1/7)\n" in text


def test_tasks_are_compared_by_their_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, _ = stored(tmp_path / "r", BEFORE, AFTER)
    run = RunHandle("r", tmp_path / "r")
    found = compare_tasks(run, run, ("eval_before", 0), ("eval_after", STEP))
    assert found["table"] == {"better": 1, "worse": 0, "equal": 5}
    assert found["p"] == 1.0
    (better,) = (pair for pair in found["pairs"] if pair["cell"] == "better")
    assert (better["rates"], len(better["a"]), len(better["b"])) == ([0.0, 1 / 3], 3, 3)
    assert summary["evaluations"]["heldout"]["gain"]["value"] == round(1 / 18, 4)
    assert main(["compare", str(run.path), str(run.path)]) == 0
    text = capsys.readouterr().out
    assert "better after  worse after  equal\n1             0            5\nchange +0.06 (95 % " in text
    assert "sign-flip test: p = 1\n" in text
    assert "McNemar" not in text
    assert main(["compare", str(run.path), str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["change"]["tasks"] == 6


def test_tasks_with_one_rollout_each_have_a_table_of_four_cells(tmp_path: Path) -> None:
    stored(tmp_path / "r", [(1,), (1,), (0,), (0,), (0,)], [(1,), (0,), (1,), (1,), (0,)])
    run = RunHandle("r", tmp_path / "r")
    found = compare_tasks(run, run, ("eval_before", 0), ("eval_after", STEP))
    assert found["table"] == {"both": 1, "only_a": 1, "only_b": 2, "neither": 1}
    assert (found["change"]["value"], found["p"]) == (pytest.approx(0.2), 1.0)
