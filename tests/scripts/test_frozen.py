"""What a change of structure must not change is as it was recorded, and each kind of difference is found."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("frozen")


@pytest.mark.slow
def test_nothing_frozen_has_changed() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "frozen.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, (
        f"see CONTRIBUTING.md, What must not change\n{done.stdout}{done.stderr[-3000:]}"
    )


@pytest.mark.parametrize(
    ("recorded", "found", "said"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ["a.b: 1 became 2"]),
        ({"a": 1.0}, {"a": 1.0000000000000002}, ["a: 1.0 became 1.0000000000000002"]),
        ({"a": 1, "b": 2}, {"b": 2}, ["a is gone: 1"]),
        ({}, {"a": "x"}, ["a is new: x"]),
        ({"a": ["x", "x", "y"]}, {"a": ["y", "x"]}, ["a: x is gone"]),
        ({"a": ["x"]}, {"a": ["x", "z"]}, ["a: z is new"]),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}, ["a: the order changed"]),
        (["x"], [], ["x is gone"]),
        ({"a": "-" * 80 + "b"}, {"a": "-" * 80 + "c"}, [f"a: ...{'-' * 20}b became ...{'-' * 20}c"]),
        ({"a": [1]}, {"a": {"b": 1}}, ['a: [1] became {"b": 1}']),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}, []),
    ],
)
def test_a_difference_is_one_line(frozen: ModuleType, recorded: Any, found: Any, said: list[str]) -> None:
    assert list(frozen.differences(recorded, found)) == said


def test_tests_may_be_added_and_not_lost(frozen: ModuleType) -> None:
    recorded = {"1": ["a", "b"], "2": ["c"]}
    more = {"1": ["b", "a", "d"], "2": ["c"], "3": ["e"]}
    assert not list(frozen.differences(recorded, more, more=True))
    assert list(frozen.differences(more, recorded, more=True)) == ["1: d is gone", '3 is gone: ["e"]']


def test_a_changed_record_is_found_and_recorded_again(
    frozen: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frozen, "RECORDS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["frozen", "--record", "extensions"])
    assert frozen.main() == 0
    path = tmp_path / "extensions.json"
    record = json.loads(path.read_text())
    record["agents"].append("mine")
    path.write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["frozen", "extensions"])
    assert frozen.main() == 1
    found, hint = capsys.readouterr().out.split("frozen: what is meant")
    assert found == "frozen: extensions   1 DIFFERENCES\n  agents: mine is gone\n"
    assert hint.endswith("--record extensions\n")


def test_the_bits_of_another_processor_are_not_compared(
    frozen: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.json").write_text('{"machine": {"torch": "0", "vendor": "Other"}}')
    monkeypatch.setattr(frozen, "RECORDS", tmp_path)
    assert frozen.compare("demo", "quick")
    assert "not compared: recorded with {'torch': '0', 'vendor': 'Other'}" in capsys.readouterr().out


def test_a_test_that_kills_is_found_by_what_it_does(frozen: ModuleType) -> None:
    module = frozen.frozen_names.ast.parse(
        "def stop(pid): os.kill(pid, 9)\n"
        "def helper(pid): stop(pid)\n"
        "@pytest.fixture\n"
        "def dead(): helper(1)\n"
        "def test_by_a_fixture(dead): ...\n"
        "def test_by_a_helper(): helper(1)\n"
        "def test_what_a_killed_one_left(): ...\n"
        "class TestIt:\n"
        "    async def test_in_a_class(self): process.send_signal(signal.SIGKILL)\n"
        "def test_of_skill_and_deadline(): ...\n"
    )
    found = {"test_by_a_fixture", "test_by_a_helper", "test_in_a_class", "test_what_a_killed_one_left"}
    assert frozen.frozen_names.killing_tests(module) == found
    # A recorded one stays in the record when its helper moves to another file.
    known = "test_of_skill_and_deadline"
    assert frozen.frozen_names.killing_tests(module, {known}) == {*found, known}
