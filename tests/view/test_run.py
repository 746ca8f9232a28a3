"""`insitu.open_run`: lazy rows, numpy columns, data frames, and HTML in which agents' text stays text."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_lab import GROUPS, SLOTS, STEPS, make_run

import insitu
from insitu.results import tables
from insitu.storage.store import Store

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> insitu.Run:
    return insitu.open_run(make_run(tmp_path_factory.mktemp("runs") / "lab"))


def test_rollouts_are_read_when_they_are_asked_for(run: insitu.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    rollout = Store.rollout

    def counted(self: Store, rollout_id: str) -> insitu.Rollout:
        read.append(rollout_id)
        return rollout(self, rollout_id)

    monkeypatch.setattr(Store, "rollout", counted)
    found = run.rollouts(phase="train")
    assert len(found) == STEPS * GROUPS * SLOTS
    assert found.ids[0] == "train/00001/000/00"
    rewards = found.column("reward")
    assert rewards.dtype == np.float64
    assert np.isnan(rewards).sum() == run.rollouts(phase="train").column("status").tolist().count(
        "infra_failed"
    )
    assert found.column("task").dtype == object
    assert not read
    assert found[-1].id == found.ids[-1]
    assert [one.id for one in found[:2]] == found.ids[:2]
    assert read == [found.ids[-1], *found.ids[:2]]


def test_filters_are_those_of_the_viewer(run: insitu.Run) -> None:
    solved = run.rollouts(phase="train", solved=1)
    assert set(solved.column("reward")) == {1.0}
    assert len(run.rollouts(phase="train")) > len(solved) == len(run.rollouts(phase="train", min_reward=1.0))
    assert not run.rollouts(task="no such task")
    with pytest.raises(insitu.InsituError, match="no such filter: colour; there are: phase, step"):
        run.rollouts(colour="red")
    with pytest.raises(insitu.InsituError, match="no column colour; there are: id, phase"):
        solved.column("colour")


def test_steps_are_a_list_and_a_table(run: insitu.Run) -> None:
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert run.steps.columns[:2] == ("step", "committed_s")
    assert run.steps.column("step").tolist() == [1.0, 2.0, 3.0]


def test_a_frame_is_of_the_package_that_is_installed(
    run: insitu.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    with pytest.raises(insitu.InsituError, match="neither pandas nor polars is installed: .*pandas"):
        run.rollouts().frame()
    module = types.ModuleType("polars")
    module.DataFrame = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polars", module)
    monkeypatch.setattr(tables, "find_spec", lambda name: name == "polars" or None)
    frame = run.rollouts(phase="train").frame()
    assert frame["id"][0] == "train/00001/000/00"
    assert "excluded" not in frame


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs, (tag, attrs)
        self.found.add(tag)


def test_hostile_text_stays_text_in_html(tmp_path: Path) -> None:
    hostile = insitu.open_run(make_run(tmp_path / "<img src=x onerror=alert(1)>", hostile=True))
    shown: list[Any] = [hostile, hostile.rollouts(), hostile.steps, hostile.transcript("train/00001/000/00")]
    for value in shown:
        text = value._repr_html_()
        elements = _Elements()
        elements.feed(text)
        assert elements.found <= {"table", "tr", "th", "td", "p", "pre"}
        assert not any(char in text for char in "\u202e\u2066\x1b\x07")
    assert "&lt;script&gt;" in hostile.rollouts()._repr_html_()


class _App:
    """What the notebook needs of marimo: cells in order, with names passed on."""

    def __init__(self) -> None:
        self.cells: list[Any] = []

    def cell(self, function: Any) -> Any:
        self.cells.append(function)
        return function


def test_the_cells_of_the_notebook_run(
    run: insitu.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("marimo")
    module.App = _App  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "marimo", module)
    monkeypatch.setattr(sys, "argv", ["look.py", str(run.path)])
    spec = importlib.util.spec_from_file_location("look", ROOT / "examples" / "look.py")
    assert spec is not None
    assert spec.loader is not None
    notebook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebook)
    names: dict[str, Any] = {}
    for cell in notebook.app.cells:
        returned = cell(**{name: names[name] for name in inspect.signature(cell).parameters})
        (given,) = re.findall(r"return (.*)", inspect.getsource(cell)) or [""]
        names |= dict(zip(re.findall(r"\w+", given), returned or (), strict=True))
    out = capsys.readouterr().out
    assert "loss by step:" in out
    assert "trainable tokens:" in out


@pytest.mark.full
def test_marimo_runs_the_notebook(run: insitu.Run) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "setup-extras"], stdout=subprocess.PIPE, text=True, timeout=900, check=True
    )
    search = f"{ROOT / 'src'}:{done.stdout.strip()}"
    command = [sys.executable, str(ROOT / "examples" / "look.py"), str(run.path)]
    own = {"PYTHONPATH": search, "PATH": "/usr/bin:/bin", "HOME": str(run.path)}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "trainable tokens:" in done.stdout
