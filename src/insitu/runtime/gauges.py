"""Gauges of a run under way for its timeline: rollouts, sandboxes, tokens, memory, disk."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from insitu.errors import RecordError
from insitu.gateway.server import Gateway
from insitu.storage.store import Store
from insitu.storage.timeline import Timeline

log = logging.getLogger(__name__)

INTERVAL_S = 5.0


@asynccontextmanager
async def write_gauges(
    timeline: Timeline, store: Store, gateway: Gateway, interval_s: float = INTERVAL_S
) -> AsyncIterator[None]:
    """Write gauges every `interval_s` seconds inside the context."""

    async def watch() -> None:
        before: dict[str, int] = {}
        read_s = time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            sampled = {s.public_id: s.stats.sampled_tokens for s in gateway.open_sessions()}
            tokens = sum(count - before.get(name, 0) for name, count in sampled.items())
            now_s = time.monotonic()
            try:
                gauges = _gauges(store, len(sampled))
            except (RecordError, OSError) as error:
                log.warning("no gauges error=%s", error)
                return
            timeline.write("gauges", gauges | {"tokens_per_s": tokens / (now_s - read_s)})
            before, read_s = sampled, now_s

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


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
