"""Seals the sessions of `insitu serve` and writes what they captured to the run directory. Caller: run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from insitu.errors import InsituError
from insitu.gateway.admin import Admin, Sealed
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.gateway.session_export import export_json
from insitu.serving.console import Console
from insitu.storage.run_dir import RunDir, write_text
from insitu.types import Trajectory

SESSIONS = "sessions"
"""Folder of a run directory with a log per live session and an export per sealed one."""
SEAL_S = 1.0
"""Calls under way when the operator stops get so long to end, all sessions together."""


EXPIRED_S = 60.0
"""After its wall time a session tells its agent so for so long, before it is sealed."""
LOOK_S = 5.0
"""Between two looks for sessions whose time is over."""
Ledgers = dict[str, Any]
"""By session, what became of those that are sealed."""


async def expire(
    voice: Console,
    folder: Path,
    sessions: list[Session],
    gateway: Gateway,
    admin: Admin | None,
    ledgers: Ledgers,
) -> None:
    """Seal and write each session some time after its wall time was over, so that none stays in memory, and
    put its ledger into `ledgers`. Never ends. The operator can export those sealed last."""
    while True:
        await asyncio.sleep(LOOK_S)
        for session in gateway.open_sessions():
            if session.state not in ("open", "live") or session.idle_overtime_s < EXPIRED_S:
                continue
            name = session.rollout_id if session in sessions else session.public_id
            if session in sessions:
                sessions.remove(session)
            try:
                trajectory = await session.seal(0.0)  # nothing is under way: it cannot be cut in between
            except InsituError as error:
                voice.note(f"{session.rollout_id}: {error}; its log stays")
                continue
            ledgers[name] = _written(voice, folder, name, session, trajectory)
            if admin is not None:
                admin.keep(Sealed(session=session, trajectory=trajectory, written=True))


async def finish(
    voice: Console,
    run: RunDir,
    sessions: Sequence[Session],
    gateway: Gateway,
    admin: Admin | None,
    ledgers: Ledgers,
) -> None:
    """Seal, write, tell; of what the operator sealed, as much as is kept. Sessions that the operator opened
    have names of their own choice, which need not be file names: theirs is the public id. A session whose
    capture is broken does not keep the others from being written. All are sealed at the same time: the stop
    of a program has a deadline. `ledgers`: of those that are written already."""
    opened = [*sessions, *(other for other in gateway.open_sessions() if other not in sessions)]
    left = [session for session in opened if session.state not in ("draining", "sealed")]
    ends = await asyncio.gather(*(session.seal(SEAL_S) for session in left), return_exceptions=True)
    broken: BaseException | None = None
    by_operator = [kept for kept in admin.sealed() if not kept.written] if admin else []
    all_ends = [*zip(left, ends, strict=True), *((kept.session, kept.trajectory) for kept in by_operator)]
    for session, end in all_ends:
        if isinstance(end, BaseException):
            broken = broken or end
            continue
        name = session.rollout_id if session in sessions else session.public_id
        ledgers[name] = _written(voice, run.path / SESSIONS, name, session, end)
    run.write_summary({"kind": "serve", "sessions": ledgers})
    voice.say("end", {"run_dir": str(run.path), "sessions": ledgers}, [f"written to {run.path}"])
    if broken is not None:
        raise broken


def _written(
    voice: Console, folder: Path, name: str, session: Session, trajectory: Trajectory
) -> dict[str, Any]:
    """Its ledger, told; the file takes the place of its log."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.json"
    write_text(file, exported(trajectory, session.temperature), private=True)
    session.drop_log()
    ledger = trajectory.ledger
    kept = {**asdict(ledger), "calls": session.stats.calls}
    excluded = ", ".join(f"{reason} {count}" for reason, count in ledger.excluded.items()) or "nothing"
    line = (
        f"{session.rollout_id}: {session.stats.calls} calls, sampled {ledger.captured}, "
        f"trainable {ledger.trained}, excluded {excluded}"
    )
    voice.say("sealed", {"rollout_id": session.rollout_id, **kept, "file": str(file)}, [line])
    return kept


def exported(trajectory: Trajectory, temperature: float | None) -> str:
    return export_json("chains", trajectory.segments, trajectory, temperature=temperature).decode()
