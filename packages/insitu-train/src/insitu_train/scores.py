"""Scores of the trained tokens of a step: `scores/step-00012.bin` of a run, one file per rank of the learner.

    u32 header length | header (JSON) | for each row zlib(mask bits | f32 gap | f16 entropy | u8 flags)

The numbers are those of the step's first pass, before its update. The header has the digest of the plan: a
file of a step that was trained again after a crash is not that of the committed step. Writing never raises:
a failure is logged.
"""

from __future__ import annotations

import contextlib
import logging
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from insitu.errors import RecordError
from insitu.types import BoolArray, FloatArray

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
CLIPPED, BOUNDED, MISMATCHED = 1, 2, 4
"""Flags of a token: the loss's own clip or mask bounds its gradient; a correction or off_policy_mask does;
excluded because sampler and trainer disagree."""
_NAME = re.compile(r"step-(\d+)(\.\d+)?\.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Scores of the trained tokens of one row."""

    rollout_id: str
    segment: int
    mask: BoolArray
    """[T] which tokens are trained, up to the last; the arrays below have one value for each."""
    gap: FloatArray
    """[N] log-probability of the trainer minus that of the sampler."""
    entropy: FloatArray
    """[N] nats."""
    flags: npt.NDArray[np.uint8]
    """[N] CLIPPED | BOUNDED | MISMATCHED."""


def score_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:05d}.bin"


def write_scores(path: Path, rank: int, plan: str, rows: Iterable[RowScores]) -> None:
    """Write the rows of one rank of the learner beside those of the first, which are at `path`.

    plan: digest of the step's plan.
    """
    path = path.with_suffix(f".{rank}.bin") if rank else path
    listed: list[list[Any]] = []
    packed: list[bytes] = []
    for row in rows:
        parts = (np.packbits(row.mask), row.gap, row.entropy.astype(np.float16), row.flags)
        packed.append(zlib.compress(b"".join(part.tobytes() for part in parts), 1))
        listed.append([row.rollout_id, row.segment, len(row.mask), len(row.gap), len(packed[-1])])
    header = orjson.dumps({"schema_version": SCHEMA_VERSION, "plan": plan, "rows": listed})
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(b"".join([struct.pack("<I", len(header)), header, *packed]))
        temporary.replace(path)
    except OSError as error:
        log.warning("scores not written file=%s error=%s", path.name, error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_row(folder: Path, step: int, plan: str, rollout_id: str, segment: int) -> RowScores:
    """Return the scores of a row of a committed step, whose plan has the digest `plan`.

    Raises RecordError, which says why there are none.
    """
    files = sorted(folder.glob(f"step-{step:05d}*.bin"))
    if not files:
        raise RecordError(f"step {step} has no scores: record.scores was off, or keeps fewer steps")
    parts: list[RowScores] = []
    for file in files:
        try:
            found = _read(file, plan, rollout_id, segment)
        except (OSError, ValueError, KeyError, TypeError, struct.error, zlib.error) as error:
            raise RecordError(f"scores/{file.name} cannot be read") from error
        # several ranks may have computed a row, each some of its tokens
        if found is not None and not any((found.mask & part.mask).any() for part in parts):
            parts.append(found)
    if not parts:
        raise RecordError(f"step {step} did not train this row")
    return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[RowScores]) -> RowScores:
    """Return the scores of a row from those of its parts."""
    order = np.argsort(np.concatenate([np.flatnonzero(part.mask) for part in parts]))

    def all_of(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    return RowScores(
        rollout_id=parts[0].rollout_id,
        segment=parts[0].segment,
        mask=np.logical_or.reduce([part.mask for part in parts]),
        gap=all_of("gap"),
        entropy=all_of("entropy"),
        flags=all_of("flags"),
    )


def _read(file: Path, plan: str, rollout_id: str, segment: int) -> RowScores | None:
    with file.open("rb") as opened:
        header = orjson.loads(opened.read(struct.unpack("<I", opened.read(4))[0]))
        if header["schema_version"] != SCHEMA_VERSION:
            raise RecordError(f"scores/{file.name} is of version {header['schema_version']}")
        if header["plan"] != plan:
            raise RecordError(f"scores/{file.name} is of another attempt at this step")
        for name, number, length, trained, size in header["rows"]:
            if (name, number) == (rollout_id, segment):
                bits = -(-length // 8)
                raw = zlib.decompressobj().decompress(opened.read(size), bits + 7 * trained)
                mask = np.unpackbits(np.frombuffer(raw, np.uint8, bits), count=length).astype(np.bool_)
                return RowScores(
                    rollout_id=name,
                    segment=number,
                    mask=mask,
                    gap=np.frombuffer(raw, "<f4", trained, bits),
                    entropy=np.frombuffer(raw, "<f2", trained, bits + 4 * trained).astype(np.float32),
                    flags=np.frombuffer(raw, np.uint8, trained, bits + 6 * trained),
                )
            opened.seek(size, 1)
    return None


def prune_scores(folder: Path, newest: int, keep: int | None) -> None:
    """Remove the files of all but the last `keep` steps up to `newest`; None = keep all."""
    for file in folder.glob("step-*.bin") if keep is not None else ():
        named = _NAME.fullmatch(file.name)
        if named and int(named[1]) <= newest - (keep or 0):
            with contextlib.suppress(OSError):
                file.unlink()
