"""Sealing of the sessions of `insitu serve` and export of their captures to the run directory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from insitu.errors import InsituError
from insitu.gateway.admin import Admin, Sealed
from insitu.gateway.provider_backend import ProviderCalls
from insitu.gateway.provider_usage import Spent
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.gateway.session_export import export_json
from insitu.serving.console import Console
from insitu.storage.run_dir import SESSIONS, RunDir, write_text
from insitu.types import Trajectory

SEAL_S = 1.0
"""Time that running calls of all sessions get to finish at shutdown."""


EXPIRED_S = 60.0
"""Time from a session's timeout, which its agent gets as an error, until it is sealed."""
POLL_S = 5.0
"""Interval between checks for expired sessions."""
Ledgers = dict[str, Any]
"""Ledgers of sealed sessions by session name."""


async def expire(
    console: Console,
    folder: Path,
    sessions: list[Session],
    gateway: Gateway,
    admin: Admin | None,
    ledgers: Ledgers,
) -> None:
    """Seal and export each session some time after its timeout, forever; add its ledger to `ledgers`."""
    while True:
        await asyncio.sleep(POLL_S)
        for session in gateway.open_sessions():
            if session.state not in ("open", "live") or session.calls.idle_overtime_s < EXPIRED_S:
                continue
            name = session.rollout_id if session in sessions else session.public_id
            if session in sessions:
                sessions.remove(session)
            try:
                trajectory = await session.seal(0.0)  # No call is running, so none is cut off.
            except InsituError as error:
                console.note(f"{session.rollout_id}: {error}; its log is kept")
                continue
            ledgers[name] = export(console, folder, name, session, trajectory)
            if admin is not None:
                admin.keep(Sealed(session=session, trajectory=trajectory, written=True))


async def finish(
    console: Console,
    run: RunDir,
    sessions: Sequence[Session],
    gateway: Gateway,
    admin: Admin | None,
    ledgers: Ledgers,
) -> None:
    """Seal and export all remaining sessions and write the summary.

    Includes unexported sessions that the operator sealed through the admin API. `ledgers`: sessions exported
    before. One broken session does not prevent the export of the others; its error is raised at the end.
    """
    opened = [*sessions, *(other for other in gateway.open_sessions() if other not in sessions)]
    unsealed = [session for session in opened if session.state not in ("draining", "sealed")]
    # Sealed concurrently, because the shutdown has a deadline.
    results = await asyncio.gather(*(session.seal(SEAL_S) for session in unsealed), return_exceptions=True)
    first_error: BaseException | None = None
    by_operator = [sealed for sealed in admin.sealed() if not sealed.written] if admin else []
    all_results = [
        *zip(unsealed, results, strict=True),
        *((sealed.session, sealed.trajectory) for sealed in by_operator),
    ]
    for session, result in all_results:
        if isinstance(result, BaseException):
            first_error = first_error or result
            continue
        # The operator chooses the rollout ids of own sessions, which need not be valid file names.
        name = session.rollout_id if session in sessions else session.public_id
        ledgers[name] = export(console, run.path / SESSIONS, name, session, result)
    run.write_summary({"kind": "serve", "sessions": ledgers})
    console.event("end", {"run_dir": str(run.path), "sessions": ledgers}, [f"written to {run.path}"])
    if first_error is not None:
        raise first_error


def export(
    console: Console, folder: Path, name: str, session: Session, trajectory: Trajectory
) -> dict[str, Any]:
    """Write the export of a session, delete its log, print and return its ledger."""
    if isinstance(session.calls, ProviderCalls):
        return _finish_text(console, session, session.calls.record.path)
    file = folder / f"{name}.json"
    write_text(file, exported(trajectory, session.temperature), private=True)
    session.calls.drop_log()
    ledger = trajectory.ledger
    numbers = {**asdict(ledger), "calls": session.stats.calls}
    excluded = ", ".join(f"{reason} {count}" for reason, count in ledger.excluded.items()) or "nothing"
    line = (
        f"{session.rollout_id}: {session.stats.calls} calls, sampled {ledger.captured}, "
        f"trainable {ledger.trained}, excluded {excluded}"
    )
    console.event("sealed", {"rollout_id": session.rollout_id, **numbers, "file": str(file)}, [line])
    return numbers


def _finish_text(console: Console, session: Session, file: Path) -> dict[str, Any]:
    """Print and return the usage of a provider's session, whose calls are already in `file`."""
    stats = session.stats
    used = {field.name: getattr(stats, field.name) for field in fields(Spent)}
    line = (
        f"{session.rollout_id}: {stats.calls} calls, prompt {stats.prompt_tokens}, "
        f"sampled {stats.sampled_tokens}, cost {stats.cost:.4g}; text only, never trainable"
    )
    used |= {"rollout_id": session.rollout_id, "file": str(file)}
    console.event("sealed", used, [line])
    return used


def exported(trajectory: Trajectory, temperature: float | None) -> str:
    return export_json("chains", trajectory.segments, trajectory, temperature=temperature).decode()
