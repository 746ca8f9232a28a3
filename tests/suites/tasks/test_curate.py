"""`insitu tasks`: what it prints, what it finds, what it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from insitu import cli
from insitu.tasks.allowlist import read_allowlist
from insitu_tasksets.validate import write_allowlist

RIGHT = "def f(x):\n    return x + 1\n"


def row(name: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": f"Fix {name}.",
        "files": {"m.py": "def f(x):\n    return x\n"},
        "entry": "m.py",
        "cases": [{"function": "f", "args": [1], "expected": 2}],
        "gold": {"m.py": RIGHT},
    } | more


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        row("good"),
        row("solved", files={"m.py": RIGHT}, gold={"m.py": RIGHT + "# same\n"}),
        row("wrong", gold={"m.py": "def f(x):\n    return x + 2\n"}),
        row("bare", gold={}),
    ]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"id": "odd"}\n')
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["tasks", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.slow
def test_validate_tells_the_rows_apart_and_keeps_what_it_found(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowlist = tmp_path / "allowlist.json"
    words = ["validate", "tasks.source=jsonl", f"tasks.path={data}", "tasks.on_invalid_row=skip", "--json"]
    code, out, err = run(capsys, *words, "--out", str(allowlist), "--repeats", "2")
    summary = json.loads(out.splitlines()[-1])
    assert code == 1
    counts = {key: summary[key] for key in ("tasks", "passed", "failed", "no_gold", "infra", "refused_rows")}
    assert counts == {"tasks": 4, "passed": 1, "failed": 2, "no_gold": 1, "infra": 0, "refused_rows": 1}
    reasons = {found["id"]: found["reason"] for found in summary["not_passed"]}
    assert reasons["solved"] == "the base already passes"
    assert reasons["wrong"].startswith("the gold fails (unresolved): 0 of 1 cases pass")
    assert reasons["bare"] == "the row has no solution to try"
    assert "passed   good" in err
    found = read_allowlist(allowlist).findings
    assert {name: f.status for name, f in found.items()} == {
        "good": "passed",
        "solved": "failed",
        "wrong": "failed",
        "bare": "no_gold",
    }
    assert found["good"].repeats == 2
    # What is settled is not run again; what changed is.
    write_allowlist(allowlist, {**found, "wrong": found["good"]})
    code, out, err = run(capsys, *words, "--out", str(allowlist), "--repeats", "2")
    assert json.loads(out.splitlines()[-1])["failed"] == 2
    assert "wrong" in err
    assert "good" not in err
    # A run that names the allowlist sees the one good task only.
    code, out, _ = run(capsys, "list", *words[1:], f"tasks.allowlist={allowlist}")
    listed = json.loads(out)
    assert listed["train"] + listed["eval"] == 1


@pytest.mark.slow
def test_a_row_that_has_no_place_in_the_sandboxes_is_a_finding_and_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, allowlist = tmp_path / "a.jsonl", tmp_path / "allowlist.json"
    rows = [row("big", image="python:3.12", workdir="/work"), row("good")]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    words = ["tasks.source=jsonl", f"tasks.path={path}", "--repeats", "1", "--out", str(allowlist), "--json"]
    code, out, err = run(capsys, "validate", *words)
    said = json.loads(out.splitlines()[-1])
    assert (code, said["tasks"], said["passed"], said["infra"]) == (1, 2, 1, 1)
    why = "cannot run with sandbox.backend = local: its image is python:3.12, and it cannot run images"
    assert said["not_passed"] == [{"task_set": "", "id": "big", "status": "infra", "reason": why}]
    assert f"infra    big (0.0 s): {why}\n" in err
    assert {name: f.status for name, f in read_allowlist(allowlist).findings.items()} == {
        "big": "infra",
        "good": "passed",
    }


MIX = """
[[tasks]]
name = "mine"
source = "jsonl"
path = "good.jsonl"
allowlist = "mine.json"

[[tasks]]
name = "other"
source = "jsonl"
path = "bad.jsonl"
limits = { wall_s = 7.0 }
"""


@pytest.fixture
def mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("good", [row("a"), row("b")]), ("bad", [row("a"), row("c", gold={})])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    Path("mix.toml").write_text(MIX)
    write_allowlist(Path("mine.json"), {})
    return "mix.toml"


@pytest.mark.slow
def test_each_task_set_of_a_mix_is_validated(mix: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "validate", mix, "--repeats", "1")
    assert code == 1
    assert [line.partition(",")[0] for line in out.splitlines()] == [
        "mine: 2 of 2 tasks passed", "other: 1 of 2 tasks passed"
    ]  # fmt: skip
    assert out.splitlines()[0].endswith("kept in mine.json")
    assert out.splitlines()[1].endswith("0 rows refused"), "no file was named"
    assert sorted(path.name for path in Path().iterdir()) == [
        "bad.jsonl",
        "good.jsonl",
        "mine.json",
        "mix.toml",
    ]
    code, out, _ = run(capsys, "validate", mix, "--id", "c", "--repeats", "1", "--json")
    summary = json.loads(out.splitlines()[-1])
    assert (code, summary["tasks"], list(summary["sets"])) == (1, 1, ["mine", "other"])
    assert [(one["task_set"], one["id"]) for one in summary["not_passed"]] == [("other", "c")]
    assert run(capsys, "validate", mix, "--set", "mine", "--repeats", "1")[0] == 0


def test_tasks_of_a_mix_are_named_by_their_set(mix: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.json").unlink()
    words = (mix, "tasks.allowlist=")
    _, out, _ = run(capsys, "list", *words)
    assert [line.split()[:2] for line in out.splitlines()[:4]] == [
        ["mine", "a"], ["mine", "b"], ["other", "a"], ["other", "c"]
    ]  # fmt: skip
    assert len(run(capsys, "list", *words, "--set", "other")[1].splitlines()) == 3
    assert "task_set   other\n" in run(capsys, "show", *words, "--id", "c")[1]
    assert "task_set   other\n" in run(capsys, "show", *words, "--id", "a", "--set", "other")[1]
    assert len(run(capsys, "export", *words, "--set", "mine")[1].splitlines()) == 2
    for wrong, message in (
        (("export", *words), "export writes one task set: choose one of mine, other by --set"),
        (("list", *words, "--set", "x"), "no task set 'x'; there are: mine, other"),
        (("show", *words, "--id", "z"), "there is no task z"),
    ):
        code, _, err = run(capsys, *wrong)
        assert (code != 0, message in err) == (True, True)


@pytest.mark.slow
def test_a_set_of_good_rows_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row("one")) + "\n")
    config = tmp_path / "c.toml"
    config.write_text(f'[tasks]\nsource = "jsonl"\npath = "{path}"\n')
    code, out, _ = run(capsys, "validate", str(config), "--repeats", "1", "--out", str(tmp_path / "g.json"))
    assert code == 0
    assert out.startswith("1 of 1 tasks passed, 0 failed")


@pytest.mark.slow
def test_toy_tasks_validate_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "validate", "--limit", "3", "--repeats", "1", "--json", "--out", str(tmp_path / "g.json")
    )
    assert code == 0
    assert json.loads(out.splitlines()[-1])["passed"] == 3


def test_list_and_show_tell_nothing_of_the_solution(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tasks.source=jsonl", f"tasks.path={data}", "tasks.on_invalid_row=skip"]
    code, out, err = run(capsys, "list", *words)
    assert code == 0
    assert out.splitlines()[0].split() == ["good", "json_io", "strong", "1", "tests", "gold"]
    assert out.splitlines()[-1].startswith("4 tasks (")
    assert "set.jsonl:5: row odd: prompt: Field required" in err
    _, reported, _ = run(capsys, "show", *words, "--id", "good", "--tests")
    assert "required   case f(1) == 2\n" in reported
    code, out, _ = run(capsys, "show", *words, "--id", "good")
    assert "case f(1)" not in out
    assert "Fix good." in out
    assert "m.py (23 bytes)" in out
    assert "x + 1" not in out
    shown = json.loads(run(capsys, "show", *words, "--id", "good", "--json")[1])
    assert shown["runner"] == "json_io"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "tasks.source=jsonl", "tasks.path=/no/such.jsonl"], "/no/such.jsonl is not a file"),
        (["list", "tasks.source=jsonl"], "needs path"),
        (["validate", "--repeats", "0"], "--repeats and --limit take positive numbers"),
        (["show", "--id", "nobody"], "there is no task nobody"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = run(capsys, *words)
    assert code != 0
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_bad_row_stops_the_command_with_its_id(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "validate", "tasks.source=jsonl", f"tasks.path={data}")
    assert code == 1
    assert "row odd: prompt: Field required" in err
    assert "tasks.on_invalid_row=skip" in err


def terminus(name: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": f"Count the words of in.txt for {name}.",
        "setup": ["printf 'a b c' > in.txt"],
        "verify": ["test -f out.txt", 'grep -q "^3$" out.txt'],
        "solution": ["wc -w < in.txt | tr -d ' ' > out.txt"],
    } | more


@pytest.mark.slow
def test_a_solution_that_is_a_program_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        terminus("good"),
        terminus("half", solution=["touch out.txt"]),
        terminus("breaks", solution=["exit 3"]),
        terminus("idle", solution=["true"]),
    ]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    words = ["tasks.source=terminus", f"tasks.path={path}", "--repeats", "1", "--json"]
    _, out, err = run(capsys, "validate", *words, "--out", str(tmp_path / "g.json"))
    summary = json.loads(out.splitlines()[-1])
    reasons = {found["id"]: (found["status"], found["reason"]) for found in summary["not_passed"]}
    assert summary["passed"] == 1, err
    assert reasons["half"][0] == "failed"
    assert reasons["breaks"] == ("failed", "the solution ended with 3")
    assert reasons["idle"] == ("failed", "the gold change would not be graded: it changes nothing")
