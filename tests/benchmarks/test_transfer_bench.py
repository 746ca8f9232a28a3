"""The harness x harness matrix: demonstrations in each agent's tools, its cells, and what they say."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from benchmarks import _transfer_runs as runs
from benchmarks import _transfer_warm as warm
from benchmarks import transfer
from benchmarks._transfer_agents import SPELLINGS, SimulatedShell, command_of, conversation
from benchmarks._transfer_report import LABELS, heat_map, matrix, outcomes, rate
from benchmarks._transfer_runs import ROWS, Cell, Late, Workshop, cells
from insitu.agents.install import find
from insitu.agents.recipe import named_recipe
from insitu.chat.load import load_renderer
from insitu.config import WARM_START
from insitu.tasks.toy import ToySource
from insitu.types import Limits
from insitu_train.demo.demonstrator import Habits
from insitu_train.demo.make_warm_start import write_renderer

ROOT = Path(__file__).parents[2]
SHELL_AGENTS = [name for name, spelling in SPELLINGS.items() if spelling.command]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("agent", [name for name in SPELLINGS if name != "mini_swe"])
def test_a_recording_through_the_real_agent_equals_its_rendering(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find(named_recipe(agent)) is None:
        pytest.skip(f"{agent} is not installed: insitu install {agent}")
    monkeypatch.setattr(warm, "RECORDED", 4)
    write_renderer(tmp_path / "model", warm.first_text(agent, tmp_path))
    found, opening = warm.recording(agent, tmp_path / "model", tmp_path / "recorded")
    assert [len(rows) for rows in found.rows.values()] == [2, 2]
    renderer = load_renderer(tmp_path / "model")
    batch = next(warm.batches(renderer, {agent: (found, opening)}))
    assert batch.rows.shape[0] == warm.ROWS
    assert batch.mask.any(1).all()


@pytest.mark.full
@pytest.mark.slow
def test_a_stopped_supervised_training_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "RECORDED", 2)
    monkeypatch.setattr(warm, "ROWS", 3)
    monkeypatch.setattr(warm, "SAVED", 1)
    monkeypatch.setattr(warm, "PHASES", tuple(replace(phase, steps=1) for phase in warm.PHASES))
    notes: list[str] = []
    with pytest.raises(Late):
        warm.make(tmp_path / "stopped", ["script"], notes.append, 0.0)
    copied = shutil.copytree(tmp_path / "stopped" / "prompts", tmp_path / "whole" / "prompts")
    assert [path.name for path in copied.iterdir()] == ["script.txt"]
    models = [warm.make(tmp_path / name, ["script"], notes.append, inf) for name in ("stopped", "whole")]
    assert [note.split(":")[0] for note in notes if note.startswith("supervised")] == [
        f"supervised step {step} of 2" for step in (1, 2, 1, 2)
    ]
    first, second = (path / "model.safetensors" for path in models)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.full
def test_a_run_is_trained_inside_one_agent_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "GROUPS", 2)
    monkeypatch.setattr(runs, "GROUP_SIZE", 2)
    monkeypatch.setattr(runs, "CONTEXT", 2048)
    shop, cell = Workshop(folder=tmp_path, steps=1, tasks=4), Cell(row="script", seed=0, agent="script")
    with pytest.raises(Late):
        replace(shop, ends=0.0).train(cell.row, cell.seed, WARM_START)
    shop.measure(cell, shop.train(cell.row, cell.seed, WARM_START))
    outcome = transfer.read_cells(shop, [cell])[cell]
    assert len(outcome) == 4
    assert set(outcome) <= {"0", "1"}
    facts = runs.training_facts(tmp_path, "script", 0)
    assert len(facts["solve_rates"]) == 1
    assert facts["rollouts"] == 4
    assert facts["cpu_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("agent", SHELL_AGENTS)
def test_a_demonstrated_command_does_what_the_simulation_says(agent: str, tmp_path: Path) -> None:
    source = ToySource(Limits())
    for task in source.tasks("train", 0, 12):
        problem = source.problem(task)
        for path, entry in task.files.items():
            (tmp_path / path).write_bytes(entry.content)
        shell = SimulatedShell(problem)
        for turn, _ in conversation(agent, problem, Habits(look=0.7, wrong=0.3, verify=0.0, check=0.0), 1):
            if not (turn.tool_calls or agent == "terminus") or not (command := command_of(turn)):
                continue
            if command.startswith(("cat", "sed")):
                done = subprocess.run(
                    ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
                )
                assert shell.run(command) == done.stdout
        assert (tmp_path / problem.path).read_text() == shell.text


def test_a_plan_is_the_same_in_every_agent() -> None:
    source = ToySource(Limits())
    problems = (source.problem(task) for task in source.tasks("train", 0, 40))
    problem = next(each for each in problems if "*" in each.fault.old)
    habits = Habits(look=1.0, wrong=0.0, verify=1.0, check=0.0)
    said = {agent: [turn for turn, _ in conversation(agent, problem, habits, 0)] for agent in SPELLINGS}
    commands = [command_of(turn) for turn in said["codex"][:3]]
    edit = f"sed -i 's|{problem.fault.old.replace('*', chr(92) + '*')}|{problem.fault.new}|' {problem.path}"
    assert commands == [f"cat {problem.path}", edit, "python3 check.py"]
    assert [command_of(turn) for turn in said["mini_swe"][:3]] == commands
    assert [command_of(turn) for turn in said["terminus"][:3]] == commands
    assert [turn.tool_calls[0].name for turn in said["pi"][:3]] == ["read", "edit", "bash"]
    assert said["pi"] == said["script"]


def test_an_interval_is_over_tasks_and_seeds() -> None:
    half = ["10" * 32, "01" * 32]
    assert rate(outcomes(half))["value"] == 0.5
    one, two = rate(outcomes(half[:1])), rate(outcomes(["1" * 64, "0" * 64]))
    assert one["high"] - one["low"] < 0.3
    assert two == {"value": 0.5, "low": 0.0, "high": 1.0}, "seeds that disagree are no certainty"
    assert rate(outcomes(["1" * 64])) == {"value": 1.0, "low": 0.943, "high": 1.0}
    assert rate(outcomes(["1-0-"]))["value"] == 0.5, "what was not graded counts for neither"
    assert rate(outcomes(["1" * 64]), outcomes(["0" * 64])) == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_the_matrix_has_gains_over_the_start_and_leaves_missing_cells_empty() -> None:
    files = {
        Cell(row="start", seed=0, agent="pi"): "1000",
        Cell(row="pi", seed=0, agent="pi"): "1111",
        Cell(row="pi", seed=1, agent="pi"): "1110",
        Cell(row="pi", seed=0, agent="codex"): "1100",
    }
    made = {(cell["row"], cell["agent"]): cell for cell in matrix(files)}
    assert made["pi", "pi"]["seeds"] == [0, 1]
    assert made["pi", "pi"]["outcomes"] == ["1111", "1110"]
    assert made["pi", "pi"]["gain"]["value"] == 0.625
    assert "gain" not in made["pi", "codex"]
    picture = heat_map(list(made.values()))
    assert ">0.88<" in picture
    assert picture.count('class="none"') == len(ROWS) * len(SPELLINGS) - 3
    assert "2 seeds" in picture
    assert "not run" in picture


def test_finished_cells_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shop = Workshop(folder=tmp_path)
    for cell in cells([0]):
        if cell.row != "start":
            continue
        path = shop.cell_file(cell)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"outcomes": "10" * 32}))
    assert transfer.main(["--out", str(tmp_path), "--seeds", "1", "--only", "start:0"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cell["agent"] for cell in found["cells"]] == list(SPELLINGS)
    assert len(found["missing"]) == (len(ROWS) - 1) * len(SPELLINGS)


def test_a_warm_start_that_solves_nothing_inside_an_agent_is_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "warm").mkdir()
    shop = Workshop(folder=tmp_path)
    for agent, text in (("pi", "1000" * 16), ("terminus", "0" * 64)):
        path = shop.cell_file(Cell(row="start", seed=0, agent=agent))
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"outcomes": text}))
    assert transfer.main(["--out", str(tmp_path), "--only", "terminus:0"]) == 2
    assert capsys.readouterr().err == (
        "insitu: the warm start solves 0.0 of the held-out tasks inside terminus, not 0.01 to 0.5: "
        "nothing is trained from it\n"
    )


def test_the_page_of_results_shows_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    files = {Cell(row=row, seed=0, agent="pi"): text for row, text in (("start", "1000"), ("codex", "1110"))}
    facts = {"solve_rates": [0.1, 0.25], "ledger": {"captured": 1000, "trained": 900}}
    training = {"row": "codex", "seed": 0, **facts, "max_logprob_gap": 1e-5, "wall_s": 100.2, "cpu_s": 130.0}
    result = {"steps": 10, "rollouts": 800, "tasks": 4, "labels": LABELS, "cells": matrix(files)}
    result |= {"training": [training], "cpu_s_per_rollout": {"pi": 0.4}, "missing": ["pi-0-pi"]}
    record = {"command": "measure", "commit": "abc", "date": "2026-11-24", "conditions": "", "result": result}
    known = {**results.records(), "transfer": record}
    monkeypatch.setattr(results, "records", lambda: known)
    page = results.page()
    assert "| Codex | Pi | 0 | 0.750 (0.250 to 1.000) | +0.500 (" in page
    assert "1 of the 3 planned cells have not been run" in page
    (picture,) = results.pictures().values()
    assert "before training" in picture


def test_an_unknown_run_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        transfer.main(["--only", "aider:0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("benchmarks: transfer: argument --only: 'aider:0' is not ROW:")
