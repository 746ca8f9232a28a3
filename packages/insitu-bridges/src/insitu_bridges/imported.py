"""Store that takes decided rollouts and committed steps as another run recorded them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from insitu.errors import RecordError
from insitu.storage.rollout_rows import dumps, insert, write_rollout
from insitu.storage.store import StepRecord, Store
from insitu.types import Rollout

PLACE = ("rowid", "ulid", "phase", "step", "group_no", "slot")
STATE = ("state", "reason", "attempt", "version", "oldest", "account")
ATTEMPT = ("attempt", "status", "error", "timings", "ledger", "egress", "began_s", "ended_s")
"""Columns that are taken. Others are dropped: names of columns must not come from a file."""


def _picked(rollout_id: str, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    lacking = [name for name in names if name not in values]
    if lacking:
        raise RecordError(f"rollout {rollout_id} has no {lacking[0]}")
    return {name: values[name] for name in names}


class ImportedStore(Store):
    """A store that is written once, rollout by rollout; `check_balance` verifies the whole."""

    def add(
        self,
        rollout: Rollout,
        place: Mapping[str, Any],
        state: Mapping[str, Any],
        attempts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store a rollout with its state and its failed attempts. Raises RecordError when it is there."""
        place, state = _picked(rollout.id, place, PLACE), _picked(rollout.id, state, STATE)
        failed = [_picked(rollout.id, attempt, ATTEMPT) for attempt in attempts]
        with self._writing("graded") as db:
            key = {"rollout_id": rollout.id}
            if db.execute("SELECT 1 FROM rollouts WHERE rollout_id = :rollout_id", key).fetchone():
                raise RecordError(f"rollout {rollout.id} is there twice")
            write_rollout(db, place, rollout)
            at = {name: place[name] for name in ("phase", "step", "group_no", "slot")}
            insert(db, "states", key | at | {"task_id": rollout.task_id} | state)
            for attempt in failed:
                texts = {name: dumps(attempt[name]) for name in ("timings", "ledger")}
                insert(db, "attempts", {**key, **attempt, **texts})

    def add_step(self, record: StepRecord) -> None:
        """Store a committed step."""
        with self._writing("step") as db:
            names = ("step", "checkpoint", "plan_hash", "committed_s")
            values: dict[str, object] = {name: getattr(record, name) for name in names}
            insert(db, "steps", values | {"metrics": dumps(dict(record.metrics))})
            ledger = record.ledger
            entries = {"captured": ledger.captured, "trained": ledger.trained, **ledger.excluded}
            for entry, tokens in entries.items():
                insert(db, "ledger", {"step": record.step, "entry": entry, "tokens": tokens})
