"""docs/results.md is what its records say, and the documentation quotes no other figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, working on a folder with one record."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("The gateway adds 2.5 ms.\n")
    (tmp_path / "page.md").write_text("It adds {{ my_run.result.ms }} ms: {{ my_run.command }}\n")
    (tmp_path / "my-run.json").write_text(json.dumps({"command": "measure", "result": {"ms": 2.5}}))
    for name, path in (("ROOT", tmp_path), ("RECORDS", tmp_path), ("PAGE", tmp_path / "docs" / "results.md")):
        monkeypatch.setattr(module, name, path)
    assert module.main([]) == 0
    return module


def test_the_page_is_written_from_the_records(results: ModuleType) -> None:
    assert results.PAGE.read_text() == "It adds 2.5 ms: measure\n"
    assert results.main(["--check"]) == 0


def test_an_edited_page_fails_the_check(results: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    results.PAGE.write_text("It adds 2.5 ms: measure; and 2 ms\n")
    assert results.main(["--check"]) == 1
    assert "differs from its records" in capsys.readouterr().out


def test_a_figure_without_a_record_fails_the_check(
    results: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (results.ROOT / "README.md").write_text("The gateway adds 1.5 ms, or 12.5 ms.\n")
    assert results.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "README.md quotes '1.5 ms', which is not in docs/results.md",
        "README.md quotes '12.5 ms', which is not in docs/results.md",
    ]


def test_a_record_that_the_page_needs_must_be_there(results: ModuleType) -> None:
    (results.RECORDS / "my-run.json").unlink()
    with pytest.raises(results.jinja2.UndefinedError):
        results.page()


@pytest.mark.slow
def test_a_command_is_recorded_with_its_circumstances(
    results: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ROOT", ROOT)
    results.main(["--record", "new", sys.executable, "-c", "print('table'); print('{\"ms\": 3}')"])
    record = json.loads((results.RECORDS / "new.json").read_text())
    assert record["result"] == {"ms": 3}
    assert {"command", "machine", "date", "commit", "load_average"} <= set(record)
