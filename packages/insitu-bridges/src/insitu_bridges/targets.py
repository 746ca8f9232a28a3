"""Trainers that `insitu export --to` converts rows for, each with its own file and pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from insitu.errors import RecordError, SetupError, boundary
from insitu.install_hints import install_extra
from insitu.types import Segment
from insitu_bridges.rows import Conversion, GroupRows, RolloutRows
from insitu_bridges.target_rows import TargetRow, all_rows, check_rows, graded_rows, scored_rows, trained_rows
from insitu_bridges.to_dpo import pair_rows, read_dpo, to_dpo
from insitu_bridges.to_openenv import read_openenv, to_openenv
from insitu_bridges.to_prime import read_prime, to_prime
from insitu_bridges.to_sft import best_rows, read_sft, to_sft
from insitu_bridges.to_skyrl import read_skyrl, to_skyrl
from insitu_bridges.to_tinker import read_tinker, to_tinker
from insitu_bridges.to_verifiers import read_verifiers, to_verifiers
from insitu_bridges.to_verl import read_verl, to_verl


class ExportTarget(NamedTuple):
    """How rows become the form of a trainer, and back."""

    convert: Callable[[Sequence[GroupRows]], Conversion[Any]]
    read: Callable[[Sequence[Any]], list[TargetRow]]
    """Reads the rows in payloads."""
    rows: Callable[[Iterable[GroupRows]], Iterator[tuple[RolloutRows, Segment]]] = scored_rows
    """The rows that a payload holds."""


TARGETS: Mapping[str, ExportTarget] = {
    "dpo": ExportTarget(to_dpo, read_dpo, pair_rows),
    "openenv": ExportTarget(to_openenv, read_openenv, graded_rows),
    "prime": ExportTarget(to_prime, read_prime, trained_rows),
    "sft": ExportTarget(to_sft, read_sft, best_rows),
    "skyrl": ExportTarget(to_skyrl, read_skyrl),
    "tinker": ExportTarget(to_tinker, read_tinker, trained_rows),
    "verifiers": ExportTarget(to_verifiers, read_verifiers, all_rows),
    "verl": ExportTarget(to_verl, read_verl),
}
REMOVED: Mapping[str, str] = {
    "areal": "AReaL groups rows by their number, so lost rollouts and second rows shift its advantages",
    "nemo": "NeMo-RL takes tensors of its own loop",
    "rllm": "rLLM takes episodes of its own engine",
}
"""Trainers whose own code does not train rows from files as insitu does, and why."""


def check_payload(to: str, groups: Iterable[GroupRows], payload: Sequence[Any]) -> None:
    """Compare a payload with the groups it was made of, bit for bit. Raises RecordError."""
    with boundary(RecordError, f"read {to}"):
        try:
            rows = TARGETS[to].read(payload)
        except (LookupError, TypeError) as error:
            raise RecordError(f"read {to}: {error!r}") from error
    check_rows(TARGETS[to].rows(groups), rows)


def read_payload(path: Path, to: str) -> list[Any]:
    """Read what `write_payload` wrote. Raises RecordError."""
    with boundary(RecordError, f"read {path}"):
        if to == "prime":
            import msgpack

            return list(msgpack.unpackb(path.with_suffix(".bin").read_bytes()))
        return [orjson.loads(line) for line in path.with_suffix(".jsonl").read_bytes().splitlines()]


def write_payload(path: Path, to: str, payload: Sequence[Any]) -> None:
    """Write one step: JSON lines; for prime-rl the msgpack that its trainer reads. Raises SetupError."""
    if to != "prime":
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        path.with_suffix(".jsonl").write_bytes(b"".join(orjson.dumps(one, option=options) for one in payload))
        return
    try:
        import msgpack
    except ImportError as error:
        raise SetupError(f"--to prime needs msgpack: {install_extra('prime')}") from error
    path.with_suffix(".bin").write_bytes(msgpack.packb(payload))
