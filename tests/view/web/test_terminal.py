"""Commands that look at runs from the terminal."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_lab import make_run

import insitu
from insitu.cli import main
from insitu.errors import RecordError
from insitu.progress.base import rounded

Capture = pytest.CaptureFixture[str]
PAGE = (Path(__file__).parents[3] / "docs" / "viewer.md").read_text()
MANY = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"


def looked(capsys: Capture, *argv: object, code: int = 0) -> str:
    assert main([str(word) for word in argv]) == code
    shown = capsys.readouterr()
    text = shown.err if code else shown.out
    assert all(c.isprintable() or c == "\n" for c in text)
    if code:
        assert len(text.splitlines()) == 1
    return text


def test_runs_are_listed_as_the_viewer_finds_them(
    lab_run: Path, hostile_run: Path, capsys: Capture, tmp_path: Path
) -> None:
    line = looked(capsys, "runs", lab_run.parent).splitlines()[1]
    assert line.split()[:2] == ["lab", "pi"]
    assert "3 of 3  finished  0.25 -> 0.50" in line
    (info,) = json.loads(looked(capsys, "runs", lab_run.parent, "--json"))["runs"]
    assert (info["name"], info["step"], info["heldout_now"]) == ("lab", 3, 0.5)
    assert "onerror" in looked(capsys, "runs", hostile_run)
    assert "there is no folder" in looked(capsys, "runs", tmp_path / "none", code=1)
    assert "is not a run directory" in looked(capsys, "runs", tmp_path, code=1)


def test_a_store_written_by_half_is_a_line_of_the_list(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text("")
    (tmp_path / "a" / "run.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 90)
    assert "stopped: cannot " in looked(capsys, "runs", tmp_path)
    assert "cannot " in looked(capsys, "query", tmp_path / "a", "SELECT 1", code=1)


@pytest.mark.parametrize(
    ("view", "count"), [("v_rollouts", 56), ("v_steps", 3), ("v_attempts", 56), ("v_turns", None)]
)
def test_every_view_can_be_queried(lab_run: Path, capsys: Capture, view: str, count: int | None) -> None:
    (row,) = looked(capsys, "query", lab_run, f"SELECT COUNT(*) AS n FROM {view}", "--json").splitlines()
    assert json.loads(row)["n"] == count or count is None
    text = looked(capsys, "query", lab_run, f"SELECT * FROM {view}", "--csv", "--limit", 2)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 2
    assert rows[0].get("step") or rows[0]["id"]
    (documented,) = re.findall(rf"^\| `{view}` \|[^|]*\| `([^`]*)`", PAGE, re.MULTILINE)
    assert documented.split() == [*rows[0]], "docs/viewer.md lists the columns"


def test_a_group_has_one_name_in_queries_lists_and_exports(
    lab_run: Path, capsys: Capture, tmp_path: Path
) -> None:
    sql = "SELECT DISTINCT group_id FROM v_rollouts WHERE phase = 'train' AND step = 2 ORDER BY 1"
    asked = [
        json.loads(line)["group_id"] for line in looked(capsys, "query", lab_run, sql, "--json").splitlines()
    ]
    assert asked == [f"train/00002/{number:03d}" for number in range(4)]
    listed = insitu.open_run(lab_run).rollouts(group_id=asked[1])
    assert {row["group_id"] for row in listed.rows} == {asked[1]}
    assert [rollout.id for rollout in listed] == [f"{asked[1]}/{slot:02d}" for slot in range(4)]
    insitu.export_run(lab_run, tmp_path / "out", to="jsonl", phase="train")
    lines = [line for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert {json.loads(line)["group_id"] for line in lines} >= set(asked)


def test_a_query_prints_a_table_and_says_where_it_was_cut(lab_run: Path, capsys: Capture) -> None:
    assert main(["query", str(lab_run), MANY, "--limit", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == ["x", "1", "2", "3"]
    assert "only the first 3 rows" in shown.err


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("DELETE FROM rollouts", "only SELECT is allowed"),
        ("ATTACH 'x.db' AS x", "only SELECT is allowed"),
        ("PRAGMA journal_mode = DELETE", "only SELECT is allowed"),
        ("SELECT load_extension('x')", "only SELECT is allowed"),
        ("SELECT wrong FROM v_rollouts", "no such column: wrong; views: v_rollouts,"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("", "no statement"),
    ],
)
def test_a_query_that_is_no_select_is_refused(lab_run: Path, capsys: Capture, sql: str, reason: str) -> None:
    assert reason in looked(capsys, "query", lab_run, sql, code=1)


def test_an_endless_query_ends(lab_run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu_view.sql.SQL_S", 0.1)
    text = looked(capsys, "query", lab_run, MANY.replace("SELECT x FROM", "SELECT COUNT(*) FROM"), code=1)
    assert "it took longer than" in text


def test_rollouts_with_calls_that_do_not_parse_are_shown_and_marked(
    lab_run: Path, capsys: Capture, tmp_path: Path
) -> None:
    found = looked(capsys, "show", lab_run, "--unparsed", 2).splitlines()
    assert [line.split()[0] for line in found[::2]] == ["eval_after/00003/003/00", "eval_after/00003/000/00"]
    (row,) = json.loads(looked(capsys, "show", lab_run, "--unparsed", 1, "--json"))["rollouts"]
    lines = looked(capsys, "show", lab_run, row["id"]).splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("-- turn")][1:3] == [
        "-- turn 1, wipe, malformed", "-- turn 2, unknown tool",
    ]  # fmt: skip
    under_way = shutil.copytree(lab_run, tmp_path / "lab")
    (under_way / "summary.json").unlink()
    steps = [line for line in looked(capsys, "show", under_way).splitlines() if line.startswith("  step ")]
    assert [line.rpartition("  ")[2] for line in steps] == [
        "unparsed calls 14.3%", "unparsed calls 28.6%", "unparsed calls 42.9%",
    ]  # fmt: skip
    text = looked(capsys, "show", lab_run, "--unparsed", 0, code=2)
    assert "--failed and --unparsed take a positive number" in text


def test_two_runs_are_compared_with_intervals_and_tables(
    lab_run: Path, hostile_run: Path, capsys: Capture
) -> None:
    text = looked(capsys, "compare", lab_run, hostile_run)
    assert "A    eval_after 3   0.50    0.15 to 0.85  2 of 4" in text
    assert "McNemar's exact test: p = 1" in text
    found = json.loads(looked(capsys, "compare", lab_run, lab_run, "--json"))
    assert found["differences"] == []
    assert found["pairs"][0]["table"] == {"both": 0, "only_a": 1, "only_b": 2, "neither": 1}


def test_two_agents_on_the_same_task_are_told_apart(mixed_run: Path, lab_run: Path, capsys: Capture) -> None:
    found = json.loads(looked(capsys, "compare", mixed_run, mixed_run, "--json"))
    assert found["pairs"][0]["table"] == {"both": 0, "only_a": 1, "only_b": 2, "neither": 1}
    text = looked(capsys, "compare", mixed_run, mixed_run)
    assert "A    eval_after 3   0.50    0.15 to 0.85  2 of 4" in text
    by_set = "SELECT task_set, COUNT(*) AS n FROM v_rollouts WHERE task = 'task-0-0' GROUP BY 1"
    assert looked(capsys, "query", mixed_run, by_set, "--csv") == "task_set,n\no,2\ns,2\n"
    by_agent = "SELECT agent, COUNT(*) AS n FROM v_rollouts WHERE task = 'task-0-0' GROUP BY 1"
    assert looked(capsys, "query", mixed_run, by_agent, "--csv") == "agent,n\nscript,2\nsingle_turn,2\n"
    line = looked(capsys, "show", mixed_run, "train/00001/001/00").splitlines()[1]
    assert line == "task task-1-0, task set o, agent single_turn, step 1, attempt 1"
    assert ", task set s\n" in looked(capsys, "show", mixed_run, "--failed", 9)
    assert "task set" not in looked(capsys, "show", lab_run, ONE)


def test_runs_with_one_task_set_each_pair_their_tasks_by_id(
    lab_run: Path, mixed_run: Path, tmp_path: Path, capsys: Capture
) -> None:
    named = make_run(tmp_path / "named", agents={"s": "script"})
    between = json.loads(looked(capsys, "compare", lab_run, named, "--json"))["pairs"][-1]
    assert sum(between["table"].values()) == 4
    several = json.loads(looked(capsys, "compare", named, mixed_run, "--json"))["pairs"][-1]
    assert [(pair["task_set"], pair["task"]) for pair in several["pairs"]] == [
        ("s", "task-0-0"), ("s", "task-0-1")
    ]  # fmt: skip


def test_cells_of_two_runs_name_the_runs(lab_run: Path, hostile_run: Path, capsys: Capture) -> None:
    text = looked(capsys, "compare", lab_run, hostile_run)
    assert "both solved  only A solved  only B solved  neither" in text
    assert "solved both times  only before  only after  never" in text
    alone = looked(capsys, "compare", lab_run, lab_run)
    assert "only A solved" not in alone


def test_numbers_of_a_query_have_six_digits_and_all_of_them_as_json(lab_run: Path, capsys: Capture) -> None:
    assert looked(capsys, "query", lab_run, "SELECT 2.0 / 3 AS x").split() == ["x", "0.666667"]
    assert looked(capsys, "query", lab_run, "SELECT 2.0 / 3 AS x", "--json") == '{"x":0.6666666666666666}\n'


def test_a_share_is_rounded_half_up() -> None:
    assert [rounded(share) for share in (0.125, 0.12, 0.375, 0.0, 1.0)] == [
        "0.13", "0.12", "0.38", "0.00", "1.00"
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, -1])
def test_no_failed_rollouts_are_refused(lab_run: Path, capsys: Capture, count: int) -> None:
    assert "take a positive number" in looked(capsys, "show", lab_run, "--failed", count, code=2)


@pytest.mark.parametrize("verb", ["top", "show", "track", "runs", "view"])
def test_a_damaged_store_is_one_line(lab_run: Path, tmp_path: Path, capsys: Capture, verb: str) -> None:
    half = tmp_path / "half"
    shutil.copytree(lab_run, half, ignore=shutil.ignore_patterns("run.sqlite-*", "logs"))
    with (half / "run.sqlite").open("rb+") as file:
        file.truncate(10_000)
    more = {"track": ("--to", "tensorboard"), "view": ("--no-open", "--port", 0)}.get(verb, ())
    line = f"insitu: cannot read {half / 'run.sqlite'}: database disk image is malformed\n"
    assert looked(capsys, verb, half, *more, code=1) == line
    with pytest.raises(RecordError, match="database disk image is malformed"):
        insitu.open_run(half)


@pytest.mark.parametrize("verb", [("view", "--export", "x.html"), ("view", "--no-open"), ("runs",)])
def test_a_run_of_another_tool_is_one_line(tmp_path: Path, capsys: Capture, verb: tuple[str, ...]) -> None:
    (tmp_path / "config.toml").write_text("[orchestrator]\nbatch = 3\n")
    line = looked(capsys, verb[0], tmp_path, *verb[1:], code=1)
    assert "is not a run of insitu: config.toml: unknown key orchestrator" in line
    assert not (tmp_path / "x.html").exists()


def without_rights(*argv: object) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody whom modes of files stop, which root is not."""
    command = [sys.executable, "-m", "insitu", *map(str, argv)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("modes do not stop root, and there is no setpriv here")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_what_may_not_be_read_is_one_line_and_hides_no_other_run(lab_run: Path, tmp_path: Path) -> None:
    shut, folder = tmp_path / "shut", tmp_path / "folder"
    for path in (shut, folder / "a", folder / "b"):
        shutil.copytree(lab_run, path)
    closed = {shut / "run.sqlite": 0o644, folder / "a": 0o755}
    for path in closed:
        path.chmod(0)
    try:
        done = without_rights("view", shut, "--no-open")
        assert (done.returncode, done.stderr) == (
            1, f"insitu: cannot open {shut / 'run.sqlite'}: permission denied\n"
        )  # fmt: skip
        done = without_rights("view", folder / "a", "--no-open")
        assert done.stderr == f"insitu: cannot read {folder / 'a'}: permission denied\n"
        done = without_rights("show", folder / "a")
        assert done.stderr == f"insitu: {folder / 'a/config.toml'}: Permission denied\n"
        done = without_rights("runs", folder)
        assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["b"]
    finally:
        for path, mode in closed.items():
            path.chmod(mode)


@pytest.mark.parametrize(
    "words", [["query", "none", "SELECT 1"], ["show", "none", "x"], ["compare", "none", "none"]]
)
def test_no_run_is_one_line(capsys: Capture, words: list[str]) -> None:
    assert "none is not a run directory" in looked(capsys, *words, code=1)


ONE = "train/00001/000/01"


def test_a_rollout_is_shown_with_why_it_is_not_solved_first(lab_run: Path, capsys: Capture) -> None:
    lines = looked(capsys, "show", lab_run, ONE).splitlines()
    assert lines[0] == f"rollout {ONE}"
    assert lines[2].startswith(
        "NOT SOLVED: unresolved, reward 0, 1 of 4 checks, truncated, case 1 raised NameE"
    )
    assert lines[3] == "  case 1: f(1): wrong; expected 2, got 1"
    text = "\n".join(lines)
    assert "user   | Fix shop.py." in text
    assert 'calls  | bash {"command": "python3 check.py"}' in text
    assert "tool   | 1 failed\ntool   | étoile" in text
    assert "time: 4 s (queue 0.1 s, " in text
    assert lines[-1] == "changed: shop.py, old.py (deleted)"
    assert "+def f(): pass" in looked(capsys, "show", lab_run, ONE, "--diff")


def test_every_token_is_shown_with_its_fate(lab_run: Path, capsys: Capture) -> None:
    found = json.loads(looked(capsys, "show", lab_run, ONE, "--tokens", "--json"))
    tokens = found["tokens"]
    assert len(tokens) == sum(segment["tokens"] for segment in found["segments"])
    text = "".join(token["text"] for token in tokens)
    assert "étoile 🎉" in text
    assert {token["fate"] for token in tokens if token["logprob"] is None} >= {"context"}
    shown = looked(capsys, "show", lab_run, ONE, "--tokens").splitlines()
    assert len([line for line in shown if line.endswith("'")]) >= len(tokens)


def test_rollouts_that_failed_are_listed(lab_run: Path, capsys: Capture) -> None:
    text = looked(capsys, "show", lab_run, "--failed", 2)
    assert text.count("NOT SOLVED") == 2
    found = json.loads(looked(capsys, "show", lab_run, "--failed", 2, "--json"))
    assert [row["reward"] for row in found["rollouts"]] == [0.0, 0.0]


def test_no_control_character_of_a_rollout_reaches_the_terminal(hostile_run: Path, capsys: Capture) -> None:
    for words in ([ONE, "--diff", "--tokens"], ["train/00001/000/03"], ["--failed", "50"]):
        assert "window.pwned" in looked(capsys, "show", hostile_run, *words)


def test_an_unknown_rollout_gets_a_suggestion(lab_run: Path, capsys: Capture) -> None:
    text = looked(capsys, "show", lab_run, "train/00001/000/1", code=1)
    assert text.startswith("insitu: lab has no rollout train/00001/000/1; did you mean train/00001/000/")
    assert "give its id" in looked(capsys, "show", lab_run, "--diff", code=2)
