"""Exports of a run: read back they are the run's rollouts, bit for bit, with an account of every token."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_lab import Flavour, make_rollout, make_run

import insitu
from insitu.cli import main
from insitu.config import WARM_START
from insitu.errors import InsituError, RecordError
from insitu.storage.run_dir import RunDir, read_store
from insitu_bridges.equality import difference
from insitu_bridges.export import FORMS as FORMS_OF_EXPORT
from insitu_bridges.imports import read_export
from insitu_bridges.jsonl import read_jsonl
from insitu_bridges.parquet import read_parquet
from insitu_bridges.records import ROWS, read_rollout
from insitu_bridges.verbs import EXPORT_FORMS
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.recovery import stored_groups

FORMS = ("jsonl", "parquet", "hf")


@pytest.fixture(scope="module")
def exports(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    for form in FORMS:
        insitu.export_run(run, folder / form, to=form)
    return {form: folder / form for form in FORMS}


@pytest.mark.parametrize("form", FORMS[:2])
def test_an_export_of_an_earlier_version_has_no_experts(
    run: Path, exports: dict[str, Path], form: str, tmp_path: Path
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(exports[form], folder)
    if form == "parquet":
        path = folder / "data" / "rows.parquet"
        pq.write_table(pq.read_table(path).drop_columns(["experts"]), path)
        found = list(read_parquet(folder))
    else:
        path = folder / "data" / "rollouts.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            for row in record["segments"]:
                del row["experts"]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        found = list(read_jsonl(folder))
    read = [read_rollout(record, rows).rollout for record, rows in found]
    assert read
    assert all(row.experts is None for one in read for row in one.trajectory.segments)


@pytest.mark.parametrize("form", FORMS)
def test_an_imported_run_holds_the_same_rollouts_steps_and_account(
    run: Path, exports: dict[str, Path], form: str, tmp_path: Path
) -> None:
    made = insitu.import_run(exports[form], tmp_path / "run")
    source = insitu.open_run(run)
    stored, back = source.rollouts(), made.rollouts()
    assert [one.id for one in back] == [one.id for one in stored]
    for one, other in zip(stored, back, strict=True):
        assert difference(one, other, without=("verdict.evidence",)) == ""
    assert [step.to_dict() for step in made.steps] == [step.to_dict() for step in source.steps]
    assert made.ledger == source.ledger
    with read_store(made.path) as store, read_store(run) as theirs:
        assert store.check_balance() == theirs.check_balance()
        assert store.attempts("train/00009/000/01") == theirs.attempts("train/00009/000/01")
        plan = plan_step(stored_groups(store, 2), PlanConfig.of(made.config))
        assert plan.digest == made.steps[1].plan_hash, "replay plans the step that was trained"
    assert main(["show", str(made.path)]) == 0


def test_an_imported_mix_has_its_task_sets(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mix", agents={"s": "script", "o": "single_turn"})
    cheap = replace(make_rollout(Flavour(), "eval_after.cheap", 3, 0, 0, solved=True), part="o@cheap")
    with RunDir.open(run) as opened, opened.store() as store:
        store.put_rollout("eval_after.cheap", 3, 0, 0, cheap)
    assert insitu.export_run(run, tmp_path / "out", to="jsonl", check=True)["checked"]
    for record, rows in read_jsonl(tmp_path / "out"):
        expected = "o" if record["phase"] == cheap.id.split("/")[0] else "so"[record["place"]["group_no"] % 2]
        assert {one["task_set"] for one in (record, *rows)} == {expected}
    made = insitu.import_run(tmp_path / "out", tmp_path / "run")
    stored, back = insitu.open_run(run).rollouts(), made.rollouts()
    assert [one.part for one in back] == [one.part for one in stored]
    assert {one.part for one in back} == {"s", "o", "o@cheap"}
    assert len(made.rollouts(task_set="o", phase="eval_after.cheap")) == 1
    with read_store(made.path) as store:
        plan = plan_step(stored_groups(store, 2), PlanConfig.of(made.config))
    assert plan.digest == made.steps[1].plan_hash


def test_the_account_is_that_of_the_run(run: Path, tmp_path: Path) -> None:
    report = insitu.export_run(run, tmp_path / "out", to="parquet", check=True)
    assert report["checked"]
    steps = insitu.open_run(run).steps
    account = insitu.export_run(run, tmp_path / "one", to="jsonl", phase="train", steps=(2, 3))["account"]
    assert account == {
        "captured": steps[1].ledger.captured,
        "trained": steps[1].ledger.trained,
        "excluded": dict(steps[1].ledger.excluded),
    }
    whole = report["account"]
    assert whole["captured"] == whole["trained"] + sum(whole["excluded"].values())
    assert whole["trained"] == sum(step.ledger.trained for step in steps)
    assert set(whole["excluded"]) == {"degenerate", "evaluation", "infra", "stale"}


def test_rows_say_why_they_are_not_trained_and_none_is_never_zero(exports: dict[str, Path]) -> None:
    table = pq.read_table(exports["parquet"] / "data" / "rows.parquet")
    assert table.schema.names == list(ROWS)
    assert str(table.schema.field("ids").type) == "list<element: int32>"
    assert str(table.schema.field("logprobs").type) == "list<element: float>"
    assert table.schema.metadata[b"insitu.schema"] == b"1"
    rows: list[dict[str, Any]] = table.to_pylist()
    used = {row["used"] for row in rows}
    assert used == {"", "degenerate", "evaluation", "infra", "stale"}
    for row in rows:
        lengths = {len(row[name]) for name in ("ids", "mask", "logprobs", "versions")}
        assert lengths == {len(row["ids"])}
        assert (row["weight"] > 0) == (row["used"] == "")
        if row["used"] in ("evaluation", "infra", "stale"):
            assert row["advantage"] is None
    by_id = {row["rollout_id"]: row for row in rows}
    assert by_id["train/00009/000/01"]["reward"] is by_id["train/00009/000/02"]["reward"] is None
    lines = (exports["jsonl"] / "data" / "rollouts.jsonl").read_text().splitlines()
    same = [row for line in lines for row in json.loads(line)["segments"]]
    assert [row["advantage"] for row in same] == [row["advantage"] for row in rows]


def test_an_export_names_no_folder_and_can_be_completed(run: Path, tmp_path: Path) -> None:
    shared, model = tmp_path / "shared", tmp_path / "models" / "small"
    shutil.copytree(WARM_START, model)
    shutil.copytree(run, tmp_path / "run")
    with (tmp_path / "run" / "config.toml").open() as file:
        text = file.read().replace('path = ""', f'path = "{model}"', 1)
    text = text.replace('function = ""', f'function = "{tmp_path}/rewards.py:score"', 1)
    (tmp_path / "run" / "config.toml").write_text(text)
    for form in FORMS:
        out = shared / form
        insitu.export_run(tmp_path / "run", out, to=form)
        assert not any(
            str(tmp_path).encode() in path.read_bytes() for path in out.rglob("*") if path.is_file()
        )
    made = insitu.import_run(shared / "hf", tmp_path / "copy")
    assert made.config.model.path == str(Path.cwd() / "small")
    assert made.config.reward.function == "rewards.py:score"
    again = insitu.import_run(shared / "jsonl", tmp_path / "again", [f"model.path={model}"])
    assert again.config.model.path == str(model)


def test_hidden_checks_are_not_exported(exports: dict[str, Path]) -> None:
    for form in FORMS:
        for found in read_export(exports[form]):
            assert found.rollout.verdict is None or found.rollout.verdict.evidence is None
        assert not any(b"expected" in path.read_bytes() for path in (exports[form] / "data").iterdir())


def test_messages_are_those_of_the_main_line(exports: dict[str, Path]) -> None:
    lines = (exports["jsonl"] / "data" / "rollouts.jsonl").read_text().splitlines()
    messages = json.loads(lines[0])["messages"]
    assert [message["role"] for message in messages][:3] == ["system", "user", "assistant"]
    assert all(isinstance(message["content"], str) for message in messages)


def test_the_card_names_both_tables(exports: dict[str, Path]) -> None:
    card = (exports["hf"] / "README.md").read_text()
    assert "config_name: rows" in card
    assert "data_files: data/rollouts.parquet" in card
    assert "| not trained: stale |" in card


def test_json_lines_go_to_stdout(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["export", str(run), "--phase", "eval_after"]) == 0
    lines = capfdbinary.readouterr().out.splitlines()
    assert len(lines) == 4
    assert {orjson.loads(line)["phase"] for line in lines} == {"eval_after"}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--to", "csv", "--out", "OUT"], "no such form: csv; there are: jsonl, parquet, hf, atif"),
        (
            ["--to", "atif", "--check", "--out", "OUT"],
            "--check reads back jsonl, parquet, hf, dpo, openenv, prime",
        ),
        (["--to", "areal", "--out", "OUT"], "there is no form areal: AReaL groups rows by their number"),
        (["--to", "nemo"], "NeMo-RL takes tensors of its own loop; use --to parquet"),
        (["--to", "rllm"], "rLLM takes episodes of its own engine; use --to parquet"),
        (["--to", "parquet"], "give --out DIR: only JSON lines without --check are written to stdout"),
        (["--steps", "1-3", "--out", "OUT"], "--steps takes A:B, A: or :B, not '1-3'"),
        (["--phase", "nothing", "--out", "OUT"], "holds no such rollout"),
        (["--out", "/proc/x"], "insitu: cannot create the folder /proc/x: No such file or directory\n"),
        (["--out", "RUN"], "exists already: an export needs a new or empty folder"),
    ],
)
def test_wrong_exports_are_refused_in_one_line(
    run: Path, tmp_path: Path, argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"OUT": str(tmp_path / "out"), "RUN": str(run)}
    assert main(["export", str(run), *(paths.get(word, word) for word in argv)]) != 0
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InsituError, match="is not a run directory"):
        insitu.export_run(tmp_path, tmp_path / "out")


def _changed(folder: Path, **values: object) -> None:
    manifest = orjson.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(orjson.dumps(manifest | values))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda f: (f / "manifest.json").unlink(), "is not an export of insitu"),
        (lambda f: (f / "manifest.json").write_text("[]"), "is not the manifest of exported rollouts"),
        (lambda f: _changed(f, schema_version=9), "has form jsonl, schema 9; this insitu imports"),
        (
            lambda f: (f / "data" / "rollouts.jsonl").write_text("{}\n"),
            "the export is damaged or was changed",
        ),
        (lambda f: (f / "data" / "rollouts.jsonl").unlink(), "No such file"),
    ],
)
def test_damaged_exports_are_refused(run: Path, tmp_path: Path, damage: Any, line: str) -> None:
    folder = tmp_path / "out"
    insitu.export_run(run, folder, to="jsonl", steps=(2, 3))
    damage(folder)
    with pytest.raises(RecordError, match=line):
        insitu.import_run(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _edited(run: Path, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Export a step and edit its first rollout, as if the manifest were of the edited file."""
    if not folder.exists():
        insitu.export_run(run, folder, to="jsonl", steps=(2, 3))
        shutil.copyfile(folder / "data" / "rollouts.jsonl", folder / "kept")
        _changed(folder, files={})
    first, *others = (folder / "kept").read_bytes().splitlines()
    record = orjson.loads(first)
    edit(record)
    (folder / "data" / "rollouts.jsonl").write_bytes(b"\n".join([orjson.dumps(record), *others]))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("mask", lambda old: old[:1], "lists differ in length"),
        ("mask", lambda old: [True for _ in old], "segments hold"),
        ("mask", lambda old: ["no" for _ in old], "mask is no list of one type without gaps"),
        ("ids", lambda old: [2**40 for _ in old], "is not an exported rollout"),
        ("ids", lambda old: [1.5 for _ in old], "ids is no list of one type without gaps"),
        ("ids", lambda old: [-5 for _ in old], "an id is below 0"),
        ("ids", lambda old: [[1] for _ in old], "ids is no list of one type without gaps"),
        ("ids", lambda old: 5, "ids is no list"),
        ("logprobs", lambda old: [None, *old[1:]], "logprobs is no list of one type without gaps"),
        ("rollout_id", lambda old: "other", "3 rows are expected"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    run: Path, tmp_path: Path, name: str, change: Callable[[Any], object], line: str
) -> None:
    def edit(record: dict[str, Any]) -> None:
        row = record["segments"][0]
        row[name] = change(row[name])

    with pytest.raises(RecordError, match=line):
        list(read_export(_edited(run, tmp_path / "out", edit)))


def test_whatever_is_edited_is_read_or_refused(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _edited(run, folder, lambda record: None)
    record = next(read_jsonl(folder))[0]
    for name in [*record, "segments"]:
        for value in ("none", None, "x", -1, 1.5, [None], {}):

            def edit(record: dict[str, Any], name: str = name, value: object = value) -> None:
                record.pop(name)
                if value != "none":
                    record[name] = value

            with contextlib.suppress(RecordError):
                list(read_export(_edited(run, folder, edit)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("reward", "x"), ("reward", []), ("components", -1), ("began_s", {}), ("place", None), ("state", 1),
     ("attempts", [None])],
)  # fmt: skip
def test_values_that_cannot_be_stored_are_refused(
    run: Path, tmp_path: Path, name: str, value: object
) -> None:
    folder = _edited(run, tmp_path / "out", lambda record: record.update({name: value}))
    with pytest.raises(RecordError, match=r"rollout train/.* cannot be"):
        insitu.import_run(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tables_of_other_types_are_refused(exports: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exports["parquet"], folder)
    path = folder / "data" / "rows.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index("ids")
    wide = table.set_column(at, "ids", table["ids"].cast(pa.list_(pa.int64())))
    gaps = table.set_column(at, "ids", pa.array([[None]] * len(table), pa.list_(pa.int32())))
    for made, line in ((wide, "column ids has type list<.*int64>, not list<.*int32>"), (gaps, "has gaps")):
        pq.write_table(made, path)
        _changed(folder, files={})
        with pytest.raises(RecordError, match=line):
            list(read_export(folder))


@pytest.mark.parametrize(
    ("place", "line"),
    [({"step": 1}, "has no rowid"), ({"x) VALUES (1); --": 1}, "has no rowid"), ([], "cannot be read")],
)
def test_columns_do_not_come_from_a_file(run: Path, tmp_path: Path, place: object, line: str) -> None:
    folder = tmp_path / "out"
    insitu.export_run(run, folder, to="jsonl", steps=(2, 3))
    path = folder / "data" / "rollouts.jsonl"
    path.write_bytes(
        b"\n".join(
            orjson.dumps(orjson.loads(one) | {"place": place}) for one in path.read_bytes().splitlines()
        )
    )
    _changed(folder, files={})
    with pytest.raises(RecordError, match=line):
        insitu.import_run(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_manifest_without_its_facts_is_refused(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    insitu.export_run(run, folder, to="jsonl", steps=(2, 3))
    for change, line in (
        ({"steps": 1}, "has no steps"),
        ({"steps": [{"step": 1}]}, "committed step"),
        ({"meta": None}, "has no meta"),
        ({"files": []}, "has no files"),
        ({"files": {"data/rollouts.jsonl": 1}}, "the export is damaged or was changed"),
        ({"form": []}, "has no form"),
        ({"form": "verl"}, "has form verl"),
    ):
        before = (folder / "manifest.json").read_bytes()
        _changed(folder, **change)
        with pytest.raises(RecordError, match=line):
            insitu.import_run(folder, tmp_path / "run")
        (folder / "manifest.json").write_bytes(before)
    (folder / "manifest.json").write_text('{"format": "insitu-rollouts"}')
    with pytest.raises(RecordError, match="has no schema_version"):
        insitu.import_run(folder, tmp_path / "run")


def test_an_import_into_a_run_is_refused(run: Path, exports: dict[str, Path]) -> None:
    with pytest.raises(RecordError, match="holds a run already"):
        insitu.import_run(exports["jsonl"], run)


def test_the_command_line_names_every_form() -> None:
    assert EXPORT_FORMS == FORMS_OF_EXPORT
