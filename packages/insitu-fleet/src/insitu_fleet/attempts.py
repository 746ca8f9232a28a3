"""Runs each attempt on a node of a fleet; the collector calls it as it calls the local executor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from insitu.attempt import (
    AttemptSpec,
    OnStart,
    ignore_cancelled,
    ignore_start,
    infra_failed,
    no_wait,
)
from insitu.errors import EngineError, InsituError
from insitu.storage.artifacts import AgentArtifacts
from insitu.storage.host_calls import HostCallLog
from insitu.storage.logs import AgentLogs
from insitu.storage.run_dir import RunDir
from insitu.tasks.base import UNTESTED
from insitu.types import Oracle, Rollout, Task, Timings
from insitu_fleet.values import pack, unpack
from insitu_train.channel.rpc import Frame

if TYPE_CHECKING:
    from insitu_fleet.controller import Fleet, FleetNode

DAY_S = 86400.0
"""Deadline of an attempt: the collector's own limits end it before."""
STOP_S = 30.0
"""Time for a cancelled attempt to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Callbacks of an attempt that a node is about to start."""

    ready: Callable[[], Awaitable[object]]
    on_start: OnStart


class FleetAttempts:
    """Implements `collect.options.AttemptRunner`."""

    def __init__(self, fleet: Fleet, run: RunDir) -> None:
        """Keep logs, artifacts and host calls in `run`."""
        self._fleet = fleet
        self._logs, self._artifacts = AgentLogs(run.logs), AgentArtifacts(run.artifacts)
        self._calls = HostCallLog(run.host_calls)

    async def run(
        self,
        spec: AttemptSpec,
        on_start: OnStart = ignore_start,
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        """Run one attempt on a free node; see `attempt.AttemptExecutor.run`.

        Raises SetupError if no node is left.
        """
        began_s, partial = time.time(), list[Rollout]()
        try:
            async with self._fleet.place() as node:
                return await self._on(node, spec, Gate(ready=ready, on_start=on_start), partial)
        except asyncio.CancelledError:
            on_cancelled(partial[0] if partial else _unscorable(spec, began_s, "cancelled"))
            raise

    async def _on(self, node: FleetNode, spec: AttemptSpec, gate: Gate, partial: list[Rollout]) -> Rollout:
        began_s, peer, key = time.time(), node.peer, (spec.rollout_id, spec.attempt)
        if peer is None:  # lost since it was chosen
            return _unscorable(spec, began_s, f"node {node.link.name} is being started")
        frame = pack(spec, *self._hidden(spec.task))
        self._fleet.gates[key] = gate
        calling = asyncio.ensure_future(peer.call("attempt.run", frame.meta, frame.arrays, deadline_s=DAY_S))
        try:
            answer = await asyncio.shield(calling)
            return await self._keep(answer)
        except asyncio.CancelledError:
            stopping = asyncio.ensure_future(self._stop(node, spec, calling))
            try:
                partial += await asyncio.shield(stopping)
            except asyncio.CancelledError:
                partial += await stopping
            raise
        except EngineError as error:
            return _unscorable(spec, began_s, str(error) if peer.alive else node.loss(peer.gone))
        except InsituError as error:
            raise type(error)(f"node {node.link.name}: {error}") from error
        finally:
            del self._fleet.gates[key]

    async def _stop(
        self, node: FleetNode, spec: AttemptSpec, calling: asyncio.Future[Frame]
    ) -> Sequence[Rollout]:
        """Cancel the attempt on its node; return what it has left, if the node answers."""
        peer, key = node.peer, [spec.rollout_id, spec.attempt]
        try:
            async with asyncio.timeout(STOP_S):
                if peer is not None:
                    await peer.call("attempt.stop", {"key": key}, deadline_s=STOP_S)
                return [await self._keep(await calling)]
        except (InsituError, TimeoutError):
            return []
        finally:
            calling.cancel()

    def _hidden(self, task: Task) -> tuple[Oracle, Mapping[str, Any]]:
        """Return what only the grader of the node gets."""
        fleet = self._fleet
        untested = task.grading.runner == UNTESTED
        oracle = Oracle(task_id=task.id) if untested else fleet.source.oracle(task)
        return oracle, fleet.source.row(task) if fleet.config.reward.function else {}

    async def _keep(self, answer: Frame) -> Rollout:
        """Return the rollout of a finished attempt, and write down the rest."""
        rollout, log, artifacts, calls = await asyncio.to_thread(unpack, answer)
        if calls:
            self._calls.keep(rollout.id, rollout.attempt, calls)
        if log is not None:
            self._logs.keep(rollout, log)
        if artifacts:
            self._artifacts.keep(rollout, artifacts)
        done: Rollout = rollout
        return done


def _unscorable(spec: AttemptSpec, began_s: float, reason: str) -> Rollout:
    return infra_failed(spec, reason, Timings(total_s=time.time() - began_s), began_s)
