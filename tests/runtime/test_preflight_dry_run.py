"""A dry run refuses what the start would, as far as that needs no server, download or absent file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu import cli

ROW = {
    "id": "a", "prompt": "fix it", "files": {"app.py": "def f(x): return 0\n"}, "image": "python:3.12",
    "checks": [{"command": "true"}],
}  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["rollout", *arguments, "--dry-run"]) > 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_tasks_that_no_sandbox_can_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("no json\n")
    given = ["tasks.source=jsonl", f"tasks.path={rows}", "harness.agent=single_turn"]
    assert "rows.jsonl" in refused(capsys, *given)
    rows.write_text(json.dumps(ROW) + "\n")
    assert "its image is python:3.12" in refused(capsys, *given)


def test_all_that_is_wrong_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    given = ["tasks.source=jsonl", f"tasks.path={tmp_path / 'rows.jsonl'}", "harness.agent=claude_code"]
    said = refused(capsys, *given)
    assert "2 problems: " in said
    assert "its first prompt has about" in said
    assert "its image is python:3.12" in said


def test_code_of_ones_own_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("tasks.source", "engine.kind", "reward.function", "harness.agent"):
        assert "no such file" in refused(capsys, "harness.agent=single_turn", f"{key}={tmp_path / 'a.py'}:X")
    (tmp_path / "run.toml").write_text('[harness]\nagent = "single_turn"\n')
    for key in ("train.loss", "train.advantage"):
        changed = f"{key}={tmp_path / 'a.py'}:X"
        assert cli.main(["train", str(tmp_path / "run.toml"), changed, "--dry-run"]) == 2
        assert "no such file" in capsys.readouterr().err
    (tmp_path / "tasks.py").write_text("TASKS = 3\n")
    assert "TASKS is a int" in refused(capsys, f"tasks.source={tmp_path / 'tasks.py'}:TASKS")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "harness.agent=single_turn", f"model.path={tmp_path}")
    assert "it has no tokenizer.json" in said


def test_what_is_not_here_yet_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["tasks.source=jsonl", f"tasks.path={tmp_path / 'later.jsonl'}", f"model.path={tmp_path / 'm'}"]
    assert cli.main(["rollout", *given, "--dry-run"]) == 0
    assert "later.jsonl" in capsys.readouterr().out


@pytest.mark.slow
def test_the_list_of_tasks_ends_with_what_a_run_of_them_is_refused_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    given = ["tasks.source=jsonl", f"tasks.path={tmp_path / 'rows.jsonl'}", "harness.agent=single_turn"]
    assert cli.main(["tasks", "list", *given, "--json"]) > 0
    said = capsys.readouterr()
    assert [row["id"] for row in json.loads(said.out)["rows"]] == ["a"]
    assert said.err.count("\n") == 1
    assert "its image is python:3.12" in said.err
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "image": ""}) + "\n")
    assert cli.main(["tasks", "list", *given]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["tasks", "list", *given, "harness.agent=claude_code"]) > 0
    assert "its first prompt has about" in capsys.readouterr().err
