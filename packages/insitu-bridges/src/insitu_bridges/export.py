"""`insitu export RUN`: rollouts of a run directory in files of another form, each with the same manifest.

DIR/manifest.json   counts, account of all tokens, committed steps, size and SHA-256 of each file
DIR/config.toml     configuration, without folders      DIR/tokenizer/  what turns ids into text
DIR/data/           the rollouts                        DIR/README.md   card (form hf)
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from insitu.config import Config, dump_toml
from insitu.errors import ConfigError, RecordError
from insitu.storage.files import sha256_of, write_text
from insitu.storage.queries import RunReader
from insitu.storage.run_dir import TOKENIZER, TOKENIZER_FILES, read_config, tokenizer_folder
from insitu.storage.store import add_ledgers
from insitu.types import Ledger
from insitu_bridges.atif import AtifWriter
from insitu_bridges.card import dataset_card
from insitu_bridges.equality import difference
from insitu_bridges.imports import MANIFEST, read_export
from insitu_bridges.jsonl import FILE, JsonlWriter
from insitu_bridges.otlp import OtlpWriter
from insitu_bridges.parquet import ParquetWriter
from insitu_bridges.records import SCHEMA, Record, StoredRollout, rollout_record, row_records
from insitu_bridges.rows import Conversion, GroupRows, convert
from insitu_bridges.stored import READ_S, RolloutFilter, RunPart, run_parts, stored_rollouts
from insitu_bridges.targets import REMOVED, TARGETS, check_payload, read_payload, write_payload
from insitu_train.plan.digest import is_plan
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.recovery import stored_groups
from insitu_train.redaction import Redaction
from insitu_train.words import Words, WordsCache

FILES = ("jsonl", "parquet", "hf")
"""Forms that `insitu import` reads."""
FORMS = (*FILES, "atif", "otlp", *TARGETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutExport:
    """Options of one export."""

    run: Path
    to: str = "jsonl"
    out: Path | None = None
    """Folder; None = JSON lines on `stdout`."""
    phase: str = ""
    """Empty = all."""
    steps: tuple[int, int | None] = (0, None)
    """First step, and the one after the last; None = all that follow."""
    check: bool = False
    """Read the export back and compare every value with the store."""
    send: str = ""
    """otlp: URL of a receiver that gets the spans too."""
    without: frozenset[str] = frozenset()
    """Ids of rollouts that are left out."""

    @property
    def chosen(self) -> RolloutFilter:
        return RolloutFilter(phase=self.phase, first=self.steps[0], end=self.steps[1])


@dataclass(slots=True)
class _Counts:
    rollouts: int = 0
    rows: int = 0
    tokens: int = 0
    """Ids in rows."""
    ledgers: list[Ledger] = field(default_factory=list)
    steps: dict[int, Ledger] = field(default_factory=dict)
    """Account of each committed step, of the rollouts that were written."""
    lost: tuple[str, ...] = ()
    """What the target has no place for."""

    def add(self, part: RunPart) -> None:
        taken = [(row.rollout_id, row.segment) for group in part.groups for row in group.rows]
        self.ledgers.append(convert(None, part.groups, taken).account)
        if part.committed:
            self.steps[part.step] = self.ledgers[-1]

    def converted(self, part: RunPart, made: Conversion[Any]) -> None:
        self.ledgers.append(made.account)
        self.lost = made.lost
        for item in (item for group in part.groups for item in group.rollouts):
            rows = [s for s in item.segments if (item.rollout.id, s.index) in made.taken]
            self.rollouts += bool(rows)
            self.rows += len(rows)
            self.tokens += sum(len(row.ids) for row in rows)

    @property
    def account(self) -> Ledger:
        return add_ledgers(self.ledgers)


def steps_of(text: str) -> tuple[int, int | None]:
    """Return the steps of A:B, A: or :B; all when empty. Raises ConfigError."""
    found = re.fullmatch(r"(\d*):(\d*)", text or ":")
    if found is None:
        raise ConfigError(f"--steps takes A:B, A: or :B, not {text!a}")
    return int(found[1] or 0), int(found[2]) if found[2] else None


class _Writer(Protocol):
    def add(self, stored: StoredRollout) -> None: ...


class _RecordSink(Protocol):
    def add(self, record: Record, rows: Sequence[Record]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Records:
    """Writes rollouts as records."""

    sink: _RecordSink
    config: Config

    def add(self, stored: StoredRollout) -> None:
        run, temperature = _run(self.config), self.config.engine.temperature
        self.sink.add(rollout_record(stored, run, temperature), row_records(stored, run, temperature))


def write_export(options: RolloutExport, stdout: IO[bytes] | None = None) -> Mapping[str, Any]:
    """Write the export and return its counts. Raises InsituError, and OSError when it cannot be written."""
    _check_options(options, stdout)
    config = read_config(options.run)
    counts = _Counts()
    with RunReader(options.run, query_s=READ_S) as reader:
        words, problem = WordsCache().of(config)
        if options.to == "atif" and words is None:
            raise ConfigError(f"--to atif writes text: {problem}")
        if options.out is None:
            if stdout is not None:
                _write(reader, config, options, _Records(JsonlWriter(stdout), config), words, counts)
            return _report(counts, options.to)
        folder = _new_folder(options.out)
        if options.to in TARGETS:
            _convert(reader, config, options, folder, counts)
        else:
            with _writer(options, folder, config, words) as writer:
                _write(reader, config, options, writer, words, counts)
        _finish(reader, config, options, folder, counts)
        report = _report(counts, options.to, folder)
        if options.check:
            if options.to in FILES:
                _check(reader, config, options, folder)
            report["checked"] = True
    return report


def _check_options(options: RolloutExport, stdout: IO[bytes] | None) -> None:
    if why := REMOVED.get(options.to):
        raise ConfigError(
            f"there is no form {options.to}: {why}; use --to parquet, whose columns are in docs/bridges.md"
        )
    if options.to not in FORMS:
        raise ConfigError(f"no such form: {options.to}; there are: {', '.join(FORMS)}")
    if options.out is None and (options.to != "jsonl" or options.check or stdout is None):
        raise ConfigError("give --out DIR: only JSON lines without --check are written to stdout")
    if options.check and options.to not in (*FILES, *TARGETS):
        raise ConfigError(f"--check reads back {', '.join((*FILES, *TARGETS))}, not {options.to}")
    if options.send and options.to != "otlp":
        raise ConfigError("--send URL only applies to --to otlp")


def _new_folder(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already: an export needs a new or empty folder")
    try:
        (out / "data").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"cannot create the folder {out}: {error.strerror}") from error
    return out


@contextlib.contextmanager
def _writer(options: RolloutExport, folder: Path, config: Config, words: Words | None) -> Iterator[_Writer]:
    if options.to == "jsonl":
        with (folder / FILE).open("wb") as file:
            yield _Records(JsonlWriter(file), config)
    elif options.to == "otlp":
        yield OtlpWriter(folder, config, words, options.send)
    elif options.to == "atif" and words is not None:
        yield AtifWriter(folder, config, words)
    else:
        facts = {"schema": str(SCHEMA), "model": Path(config.model.path).name, "run": _run(config)}
        with ParquetWriter(folder, facts) as tables:
            yield _Records(tables, config)


def _run(config: Config) -> str:
    return Path(config.run.dir).name


def _write(
    reader: RunReader,
    config: Config,
    options: RolloutExport,
    writer: _Writer,
    words: Words | None,
    counts: _Counts,
) -> None:
    for stored in _chosen(reader, config, options, words, counts.add):
        writer.add(stored)
        segments = stored.item.rollout.trajectory.segments
        counts.rollouts += 1
        counts.rows += len(segments)
        counts.tokens += sum(len(segment.ids) for segment in segments)
    if not counts.rollouts:
        raise RecordError(f"{options.run} holds no such rollout: see insitu show {options.run}")


def _convert(
    reader: RunReader, config: Config, options: RolloutExport, folder: Path, counts: _Counts
) -> None:
    """Write what a trainer takes, one file per step."""
    for (phase, step), parts in groupby(
        run_parts(reader, config, options.chosen, sampled=True), key=lambda part: (part.phase, part.step)
    ):
        made: list[Conversion[Any]] = []
        written: list[GroupRows] = []
        for part in parts:
            one = TARGETS[options.to].convert(part.groups)
            counts.converted(part, one)
            if one.account.trained:
                made.append(one)
                written += part.groups
        if made:
            # A trainer takes a file as one step.
            whole = made[0] if len(made) == 1 else TARGETS[options.to].convert(written)
            payload = whole.payload if isinstance(whole.payload, list) else [whole.payload]
            path = folder / "data" / f"{phase}-{step:05d}"
            write_payload(path, options.to, payload)
            if options.check:
                check_payload(options.to, written, read_payload(path, options.to))
    if not counts.ledgers:
        raise RecordError(f"{options.run} holds no such rollout: see insitu show {options.run}")


def _chosen(
    reader: RunReader,
    config: Config,
    options: RolloutExport,
    words: Words | None = None,
    began: Callable[[RunPart], None] = lambda part: None,
) -> Iterator[StoredRollout]:
    for whole in run_parts(reader, config, options.chosen):
        part = whole.leaving_out(options.without)
        began(part)
        yield from stored_rollouts(reader, [part], words)


def _finish(reader: RunReader, config: Config, options: RolloutExport, folder: Path, counts: _Counts) -> None:
    """Write what stands beside the data; the manifest last."""
    redaction = Redaction()
    shared = redaction.config(config.model_copy(update={"run": config.run.changed(dir="")}))
    write_text(folder / "config.toml", dump_toml(shared))
    with contextlib.suppress(ConfigError):
        source = tokenizer_folder(config)
        for path in (source / name for name in TOKENIZER_FILES if (source / name).is_file()):
            (folder / TOKENIZER).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / TOKENIZER / path.name)
    steps = [
        (replace(step, ledger=counts.steps[step.step]) if options.without else step).to_dict()
        for step in reader.steps()
        if options.chosen.has("train", step.step)
    ]
    manifest = {
        "format": "insitu-rollouts",
        "schema_version": SCHEMA,
        "form": options.to,
        "run": _run(config),
        "meta": reader.meta(),
        "temperature": config.engine.temperature,
        **_report(counts, options.to),
        "steps": steps,
        "left_out": sorted(options.without),
    }
    if options.to == "hf":
        write_text(folder / "README.md", redaction.text(dataset_card(config, manifest)))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest["files"] = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files
    }
    text = orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode()
    write_text(folder / MANIFEST, text + "\n")


def _report(counts: _Counts, to: str, folder: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rollouts": counts.rollouts,
        "rows": counts.rows,
        "tokens": counts.tokens,
        "account": counts.account.to_dict(),
    }
    if folder is not None:
        size = sum(path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file())
        found |= {
            "to": to,
            "lost": counts.lost,
            "out": str(folder),
            "bytes": size,
            "bytes_per_token": size / max(1, counts.tokens),
        }
    return found


def _check(reader: RunReader, config: Config, options: RolloutExport, folder: Path) -> None:
    """Compare an export with the store. Raises RecordError with the first difference."""
    stored = _chosen(reader, config, options)
    for found in read_export(folder):
        expected = next(stored, None)
        if expected is None:
            raise RecordError(f"{folder} has rollout {found.rollout.id}, which was not given")
        where = difference(expected.item.rollout, found.rollout, without=("verdict.evidence",))
        if where or expected.place != found.place or expected.state != found.state:
            raise RecordError(
                f"rollout {found.rollout.id} differs in the export: {where or 'place or state'}"
            )
    if next(stored, None) is not None:
        raise RecordError(f"{folder} lacks rollouts")
    plan = PlanConfig.of(config)
    for step in reader.steps():
        if not options.chosen.has("train", step.step) or not (groups := stored_groups(reader, step.step)):
            continue
        if not is_plan(plan_step(groups, plan), step.plan_hash):
            raise RecordError(f"step {step.step}: the plan differs from the one that was trained")
