"""What `insitu tasks validate` found, on disk: one JSON file, replaced at once as a whole.

A finding holds for one content of a task in one image: it is kept with the task's hash and the image's
digest, and is worth nothing when either changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from insitu.errors import TaskError, boundary, describe_invalid

SCHEMA = 1
FindingStatus = Literal["passed", "failed", "no_gold", "infra"]


@checked(frozen=True, slots=True, kw_only=True, config={"extra": "forbid"})
class TaskFinding:
    """One task: whether its base fails and its solution passes, each `repeats` times."""

    status: FindingStatus
    task_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    image: str = ""
    """Image with its digest; empty = the plain sandbox."""
    repeats: int = 0
    reason: str = ""
    """One line, for what did not pass."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowlist:
    """All findings of a file, by task id."""

    path: Path
    findings: Mapping[str, TaskFinding]

    def passed(self) -> frozenset[str]:
        """Content hashes of the tasks that passed."""
        return frozenset(f.task_hash for f in self.findings.values() if f.status == "passed")


_FINDINGS = TypeAdapter(dict[str, TaskFinding])


def read_allowlist(path: Path, *, missing_ok: bool = False) -> _Allowlist:
    """Read an allowlist; raise TaskError when the file is missing or invalid."""
    if missing_ok and not path.exists():
        return _Allowlist(path=path, findings={})
    with boundary(TaskError, f"cannot read {path}"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise TaskError(f"{path} is not a file of `insitu tasks validate` (schema {SCHEMA})")
    try:
        return _Allowlist(path=path, findings=_FINDINGS.validate_python(value.get("tasks")))
    except ValidationError as error:
        raise TaskError(f"{path}: {describe_invalid(error)}") from None
