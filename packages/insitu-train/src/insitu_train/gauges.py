"""Gauges of a run under way for its timeline: rollouts, sandboxes, tokens, memory, disk, GPUs."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from insitu.errors import RecordError
from insitu.runtime.running import OpenSession
from insitu.storage.store import Store
from insitu.storage.timeline import Timeline
from insitu_train.gpus import gpu_reader

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
Sessions = Callable[[], Sequence[OpenSession]]


@asynccontextmanager
async def write_gauges(
    timeline: Timeline,
    store: Store,
    sessions: Sessions,
    more: Callable[[], Mapping[str, int]] = dict,
    interval_s: float = INTERVAL_S,
) -> AsyncIterator[None]:
    """Write gauges every `interval_s` seconds inside the context; `more`: further ones."""

    async def watch() -> None:
        before: dict[str, int] = {}
        gpus = gpu_reader()
        read_s = time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            sampled = {s.public_id: s.stats.sampled_tokens for s in sessions()}
            tokens = sum(count - before.get(name, 0) for name, count in sampled.items())
            now_s = time.monotonic()
            try:
                gauges = _gauges(store, len(sampled))
            except (RecordError, OSError) as error:
                log.warning("no gauges error=%s", error)
                return
            timeline.write(
                "gauges", {**gauges, **more(), **gpus(), "tokens_per_s": tokens / (now_s - read_s)}
            )
            timeline.write("agent", _agent(sessions()))
            before, read_s = sampled, now_s

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def _agent(sessions: Sequence[OpenSession]) -> dict[str, str]:
    """Return what the agent under way for the longest time does: its rollout, and its newest reply."""
    session = next((session for session in sessions if session.stats.doing), None)
    return {} if session is None else {"rollout": session.rollout_id, "doing": session.stats.doing}


def _gauges(store: Store, sessions: int) -> dict[str, float | int | str | bool | None]:
    """Return the gauges except the token rate; `sessions`: rollouts whose agent is at work."""
    counts = store.open_counts()
    path = store.path.parent
    return {
        "rollouts_running": counts["running"],
        "rollouts_queued": counts["planned"],
        "rollouts_grading": max(0, counts["running"] - sessions),
        "agents": sessions,
        "rss_bytes": _rss_bytes(),
        "disk_free_bytes": shutil.disk_usage(path).free,
    }


def _rss_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
