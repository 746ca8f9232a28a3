"""Parses the records of pytest_worker.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from insitu.grading.runners.common import out_of_cpu
from insitu.sandbox.base import ExecResult

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing")


class RecordsTampered(Exception):
    """The records are not those of an unmodified run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    """Records of one process on one test file."""

    outcomes: Mapping[str, str]
    started: bool
    ended: bool
    """pytest ran to its end."""
    uncollected: bool
    exit_code: int | None
    timed_out: bool
    out_of_cpu: bool
    out_of_memory: bool = False
    unusable: str = ""
    """Name of the error when pytest itself could not be imported."""


def read_run(result: ExecResult, nonce: str, cpu_s: int) -> FileRun:
    """Parse the records. Raises RecordsTampered on a line that the worker cannot have sent.

    A last line without newline, of a killed process, is ignored.
    """
    if result.truncated:
        raise RecordsTampered("more records than the worker sends")
    outcomes: dict[str, str] = {}
    marks: dict[str, str] = {}
    for seq, line in enumerate(result.stdout.split(b"\n")[:-1]):
        name, outcome = _record(line, nonce, seq)
        if "end" in marks:
            raise RecordsTampered("a record came after the last one")
        if outcome in OUTCOMES and name:
            if name in outcomes:
                raise RecordsTampered("a test was reported twice")
            outcomes[name] = outcome
        elif outcome == "planted":
            raise RecordsTampered("a conftest.py appeared that is not the grader's")
        elif outcome in ("start", "end", "uncollected", "unusable"):
            marks[outcome] = name
        else:
            raise RecordsTampered("a record has another form")
    return FileRun(
        outcomes=outcomes,
        started="start" in marks,
        ended="end" in marks,
        uncollected="uncollected" in marks,
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        out_of_cpu=out_of_cpu(result, cpu_s),
        out_of_memory=result.out_of_memory,
        unusable=marks.get("unusable", ""),
    )


def _record(line: bytes, nonce: str, seq: int) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordsTampered("a record is not JSON") from None
    if type(record) is not list or len(record) != 4 or type(record[1]) is not int:
        raise RecordsTampered("a record has another form")
    if record[0] != nonce or record[1] != seq or not all(type(part) is str for part in record[2:]):
        raise RecordsTampered("a record is not of this run or out of order")
    return record[2], record[3]
