"""Data sets on disk: reading, ids, splits, refusals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from insitu.config import load_config
from insitu.errors import ConfigError, TaskError
from insitu.grading.runners.find import runner_for
from insitu.tasks.allowlist import TaskFinding, read_allowlist
from insitu.tasks.base import Item, split_of
from insitu.tasks.dataset import LoadOptions, RowSource
from insitu.tasks.factory import open_rows, open_source
from insitu.tasks.own_formats import PlainJsonl
from insitu.tasks.row_files import RawRow, RowLocation
from insitu.tasks.row_files import TestIds as IdList
from insitu.types import Limits
from insitu_tasksets.validate import settles, write_allowlist


def row(name: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": f"Fix {name}.",
        "files": {"m.py": "def f(x):\n    return x\n"},
        "entry": "m.py",
        "cases": [{"function": "f", "args": [1], "expected": 2}],
        "gold": {"m.py": "def f(x):\n    return x + 1\n"},
    } | more


def by_tests(ids: object) -> dict[str, Any]:
    """What makes a row one that hidden tests judge."""
    return {"cases": [], "entry": "", "tests": {"test_u.py": "def test_f(): ...\n"}, "fail_to_pass": ids}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (["a", "b"], ("a", "b")),
        ('["a", "b"]', ("a", "b")),
        ("['a', \"b's\"]", ("a", "b's")),
        ("('a',)", ("a",)),
        (["a", "b", "a"], ("a", "b")),
        ([], ()),
    ],
)
def test_ids_in_every_spelling(value: object, ids: tuple[str, ...]) -> None:
    assert TypeAdapter(IdList).validate_python(value) == ids


@pytest.mark.parametrize(
    "value",
    [
        "test_a",
        '"test_a"',
        "'test_a'",
        "[test_a]",
        '{"a": 1}',
        "{'a'}",
        [1],
        ["a", None],
        [""],
        None,
        3,
        "",
        "[",
    ],
)
def test_a_string_is_never_taken_apart(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(IdList).validate_python(value)


def test_ids_are_not_code() -> None:
    with pytest.raises(ValidationError, match="neither a list nor JSON nor a Python literal"):
        TypeAdapter(IdList).validate_python("[__import__('os').getpid()]")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_files_of_each_kind_give_the_same_tasks(tmp_path: Path, name: str) -> None:
    rows = [row(f"t{n}") for n in range(9)]
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n\n" for r in rows).encode()))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    else:
        write(path, rows)
    source = RowSource("jsonl", PlainJsonl(), path)
    assert [item.task.id for item in source.every()] == [f"t{n}" for n in range(9)]
    task = next(source.every()).task
    assert source.oracle(task).cases[0].expected == 2
    assert source.oracle(task).gold["m.py"].content.endswith(b"x + 1\n")


def test_the_gold_is_in_the_oracle_only(tmp_path: Path) -> None:
    source = RowSource(
        "jsonl", PlainJsonl(), write(tmp_path / "a.jsonl", [row("t", gold={"m.py": "SECRET\n"})])
    )
    task = next(source.every()).task
    assert "SECRET" not in repr(task) + task.prompt + str([e.content for e in task.files.values()])


def test_splits_are_made_by_content_and_share_nothing(tmp_path: Path) -> None:
    rows = [row(f"t{n}") for n in range(200)]
    source = RowSource("jsonl", PlainJsonl(), write(tmp_path / "a.jsonl", rows))
    counts = {"train": source.size("train"), "eval": source.size("eval")}
    assert counts["train"] is not None
    assert counts["eval"] is not None
    assert counts["train"] + counts["eval"] == 200
    assert 25 < counts["eval"] < 75
    held = {t.id for t in source.tasks("eval", 0, counts["eval"])}
    train = {t.id for t in source.tasks("train", 0, counts["train"])}
    assert held | train == {f"t{n}" for n in range(200)}
    # Order and company do not matter.
    other = RowSource("jsonl", PlainJsonl(), write(tmp_path / "b.jsonl", list(reversed(rows))[:150]), seed=3)
    assert {t.id for t in other.tasks("eval", 0, other.size("eval") or 0)} <= held
    assert split_of("00000000" + "0" * 56, 0.0) == "train"
    assert split_of("ffffffff" + "0" * 56, 1.0) == "eval"


def test_the_train_split_goes_round_in_new_orders(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(f"t{n}") for n in range(12)])
    source = RowSource("jsonl", PlainJsonl(), path, eval_share=0.0, seed=1)
    asked = [t.id for t in source.tasks("train", 0, 24)]
    assert sorted(asked[:12]) == sorted(asked[12:]) == sorted(f"t{n}" for n in range(12))
    assert asked[:12] != asked[12:]
    assert [t.id for t in source.tasks("train", 7, 9)] == asked[7:16]
    with pytest.raises(TaskError, match="the eval split of jsonl has 0 tasks"):
        source.tasks("eval", 0, 1)
    whole = RowSource("jsonl", PlainJsonl(), path, eval_share=1.0)
    with pytest.raises(TaskError, match="has 12 tasks"):
        whole.tasks("eval", 5, 8)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "a.jsonl:2: "),
        ("[1]", "not a JSON object"),
        ('{"id": "x", "prompt": NaN}', "NaN is no JSON"),
        (json.dumps(row("t1")), "row t1: duplicate id, also in"),
        (json.dumps(row("u", prompt="Fix t1.")), "row u: duplicate of t1"),
        (
            json.dumps(row("u", cases=[])),
            "row u: needs exactly one of cases, io, fail_to_pass (with tests) and checks",
        ),
        (json.dumps(row("u", fail_to_pass=["a"])), "row u: needs exactly one of"),
        (json.dumps(row("u", **by_tests("test_u.py::test_f"))), "row u: fail_to_pass: is neither a list nor"),
        (json.dumps(row("u", **by_tests("[3]"))), "row u: fail_to_pass: must hold test ids"),
        (json.dumps(row("u", **by_tests("[]"))), "row u: needs exactly one of"),
        (json.dumps(row("u", **by_tests([]))), "row u: needs exactly one of"),
        (json.dumps(row("u", pass_to_pass="abc")), "row u: pass_to_pass: is neither a list nor JSON"),
        (json.dumps(row("u", files={})), "there is nothing to work on"),
        (json.dumps(row("u", files={"../x": "y"})), "is not a path inside the work folder"),
        (json.dumps(row("u", files={"a": "y", "a/b": "z"})), "lies under a file"),
        (
            json.dumps(row("u", gold={"m.py": "def f(x):\n    return x\n"})),
            "the gold solution changes nothing",
        ),
        (json.dumps(row("u", promt="x")), "row u: unknown key 'promt': did you mean prompt?"),
        (
            json.dumps(row("u", cases=[{"function": "f", "arguments": [1], "expected": 2}])),
            "row u: cases.0: unknown key 'arguments': did you mean args?",
        ),
        (
            json.dumps(row("u", cases=[], checks=[{"command": "true", "marker": "x"}])),
            "row u: checks.0: unknown key 'marker': did you mean markers?",
        ),
        (
            json.dumps(row("u", limits={"max_steps": 3})),
            "row u: limits: unknown key 'max_steps': did you mean",
        ),
        (json.dumps(row("u", zzz=3)), "row u: unknown key 'zzz': known are id, prompt,"),
        (json.dumps(row("u", prompt=3)), "row u: prompt: Input should be a valid string"),
        (json.dumps(row("u", prompt=" ")), "the prompt is empty"),
        (json.dumps(row("u", entry="")), "cases and io need entry"),
        (json.dumps(row("u", limits={"wall_s": -1})), "row u: limits.wall_s: Input should be greater than 0"),
    ],
)
def test_bad_rows_are_refused_with_their_id(tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row("t1")) + "\n" + bad + "\n")
    with pytest.raises(TaskError) as caught:
        RowSource("jsonl", PlainJsonl(), path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    left = RowSource("jsonl", PlainJsonl(), path, on_invalid_row="skip")
    assert [item.task.id for item in left.every()] == ["t1"]
    assert len(left.refused) == 1


class Careless(PlainJsonl):
    """A format whose code trips over a row."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        if row["id"] == "u":
            raise ValueError("no such thing")
        return super().build(row, place, options)


def test_no_row_ends_the_reading_of_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("t"), row("u")])
    with pytest.raises(TaskError, match="a.jsonl:2: row u: no such thing"):
        RowSource("jsonl", Careless(), path)
    left = RowSource("jsonl", Careless(), path, on_invalid_row="skip")
    assert [item.task.id for item in left.every()] == ["t"]


def test_nothing_but_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("t", cases=[])])
    with pytest.raises(TaskError, match="holds no task; .*row t: needs exactly one"):
        RowSource("jsonl", PlainJsonl(), path, on_invalid_row="skip")


def test_a_row_that_changed_on_disk_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("t")])
    source = RowSource("jsonl", PlainJsonl(), path, eval_share=0.0)
    write(path, [row("t", prompt="Other.")])
    with pytest.raises(TaskError, match="task t changed on disk"):
        source.tasks("train", 0, 1)


def test_limits_of_a_row_win(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("t", limits={"wall_s": 7.0, "max_calls": 3})])
    config = load_config(None, ["tasks.source=jsonl", f"tasks.path={path}", "tasks.eval_share=1"])
    limits = (
        open_source(config, Limits(wall_s=100, max_calls=9, max_call_tokens=5), runner_for)
        .tasks("eval", 0, 1)[0]
        .limits
    )
    assert (limits.wall_s, limits.max_calls, limits.max_call_tokens) == (7.0, 3, 5)


# ------------------------------------------------------------------------- the configuration, the gate


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tasks.source=jsonl"], "source = 'jsonl' needs path"),
        (["tasks.path=x"], "path has no effect with source = 'toy'"),
        (["tasks.eval_share=0.5"], "eval_share has no effect with source = 'toy'"),
        (
            ["tasks.source=jsonl", "tasks.path=x", 'tasks.kinds=["swapped"]'],
            "kinds has no effect with source = 'jsonl'",
        ),
        (["tasks.source=nope"], "tasks.source: unknown name 'nope' of kind tasks; known: toy, jsonl"),
    ],
)
def test_keys_that_fit_no_source(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("no.jsonl", "is not a file"), ("x.parquet", "not a Parquet file")],
)
def test_paths_that_hold_no_rows(tmp_path: Path, name: str, message: str) -> None:
    if name.startswith("x"):
        (tmp_path / name).write_bytes(b"PAR1")
    config = load_config(None, ["tasks.source=jsonl", f"tasks.path={tmp_path / name}"])
    with pytest.raises(TaskError, match=message):
        open_source(config, Limits(), runner_for)


def test_only_tasks_that_passed_the_gate_are_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(f"t{n}") for n in range(4)])
    base = ["tasks.source=jsonl", f"tasks.path={path}", "tasks.eval_share=1"]
    tasks = {t.id: t for t in open_source(load_config(None, base), Limits(), runner_for).tasks("eval", 0, 4)}
    findings = {
        "t0": TaskFinding(status="passed", task_hash=tasks["t0"].content_hash, repeats=3),
        "t1": TaskFinding(status="failed", task_hash=tasks["t1"].content_hash, repeats=3, reason="x"),
        "t2": TaskFinding(status="passed", task_hash="0" * 64, repeats=3),
    }
    gate = tmp_path / "deep" / "gate.json"
    write_allowlist(gate, findings)
    assert read_allowlist(gate).findings == findings
    source = open_source(load_config(None, [*base, f"tasks.allowlist={gate}"]), Limits(), runner_for)
    assert source.size("eval") == 1
    assert source.tasks("eval", 0, 1)[0].id == "t0"
    write_allowlist(gate, {})
    with pytest.raises(TaskError, match="none of the 4 tasks passed"):
        open_source(load_config(None, [*base, f"tasks.allowlist={gate}"]), Limits(), runner_for)


def test_what_a_gate_settles(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    found = TaskFinding(status="passed", task_hash="a" * 64, repeats=2)
    failed = TaskFinding(status="infra", task_hash="b" * 64)
    write_allowlist(path, {"t": found, "u": failed})
    assert read_allowlist(path).findings == {"t": found, "u": failed}
    assert settles(found, "a" * 64, 2)
    assert not settles(found, "a" * 64, 3)
    assert not settles(found, "c" * 64, 1)
    assert not settles(failed, "b" * 64, 1)
    path.write_text('{"schema": 1, "tasks": {"t": {"status": "great", "task_hash": "x"}}}')
    with pytest.raises(TaskError, match=r"g\.json: t\.status"):
        read_allowlist(path)
    path.write_text("{}")
    with pytest.raises(TaskError, match="is not a file of `insitu tasks validate`"):
        read_allowlist(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"entry": "n.py"}, "row u: task u: the entry n.py is not among its files: m.py"),
        ({"entry": "m.txt"}, "json_io needs grading.entry, a .py file"),
        (
            {"cases": [], "entry": "", "fail_to_pass": ["t.py::a"], "tests": {"other.py": "x = 1\n"}},
            "t.py is neither hidden nor in the base",
        ),
        (
            {"cases": [], "entry": "", "fail_to_pass": ["t.py::a"], "tests": {"t.py": "def a(:\n"}},
            "t.py is not a Python file",
        ),
        ({"cases": [], "entry": "", "fail_to_pass": ["a"], "tests": {"t.py": ""}}, "'a' is not a pytest id"),
        ({"cases": [], "entry": "", "checks": [{"command": " "}]}, "check 'check 1' has no command"),
    ],
)
def test_every_row_is_held_against_its_runner_at_load(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    """What no runner can judge is refused by the load, in every verb, not by the first grade."""
    path = write(tmp_path / "a.jsonl", [row("t1"), row("u", **more)])
    config = load_config(None, ["tasks.source=jsonl", f"tasks.path={path}"])
    with pytest.raises(TaskError) as caught:
        open_rows(config, Limits(), runner_for)
    assert message in str(caught.value)
    skipping = load_config(None, ["tasks.source=jsonl", f"tasks.path={path}", "tasks.on_invalid_row=skip"])
    source = open_rows(skipping, Limits(), runner_for)
    assert [item.task.id for item in source.every()] == ["t1"]
    assert [refusal.id for refusal in source.refused] == ["u"]


def test_an_entry_that_only_the_gold_has_is_one_to_write(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [row("t", entry="n.py", gold={"n.py": "def f(x):\n    return x + 1\n"})]
    )
    config = load_config(None, ["tasks.source=jsonl", f"tasks.path={path}"])
    assert [item.task.id for item in open_rows(config, Limits(), runner_for).every()] == ["t"]
