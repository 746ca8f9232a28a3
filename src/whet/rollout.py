"""One attempt, from Task to Rollout: lease a worker, open a session, run the agent, seal, judge.

Read this file first; every folder it names is a step of the path. Whatever happens, exactly one Rollout
comes back: host-side failures make it unscorable (INFRA_FAILED, reward None), everything the agent can cause
itself is graded. Broken capture invariants are defects and are raised.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from whet.capture.ledger import reassign
from whet.errors import CaptureError, WhetError
from whet.gateway.server import Gateway
from whet.gateway.session import Session
from whet.gateway.turn import SessionStats
from whet.grade.diff import changes
from whet.harness.base import AgentResult, ModelAccess
from whet.harness.pool import WorkerPool
from whet.types import (
    Ledger,
    Outcome,
    Rollout,
    Status,
    Task,
    Timings,
    Trajectory,
    Tree,
    Verdict,
)

Judge = Callable[[Task, Tree], Awaitable[Verdict]]
"""The grading side, with the oracle inside it: the rollout side never holds one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """What one attempt needs to know."""

    rollout_id: str
    task: Task
    seed: int
    attempt: int = 1
    temperature: float = 1.0
    evaluation: bool = False
    """Its tokens are never trained; the ledger says so."""


@dataclass(slots=True)
class _Clock:
    """Seconds by phase of the attempt under way."""

    start: float
    leased: float = 0.0
    agent: float = 0.0
    graded: float = 0.0


class Attempts:
    """Runs attempts against one gateway, one pool of workers and one judge."""

    def __init__(self, gateway: Gateway, workers: WorkerPool, judge: Judge, *, seal_s: float = 10.0) -> None:
        self._gateway, self._workers, self._judge = gateway, workers, judge
        self._seal_s = seal_s

    async def run(self, spec: AttemptSpec, began: Callable[[], None] = lambda: None) -> Rollout:
        """Decide one slot. `began` is called when a worker is at hand and the agent starts."""
        clock = _Clock(start=time.monotonic())
        try:
            return await self._run(spec, clock, began)
        except CaptureError:
            raise
        except WhetError as error:
            if not error.infra:
                raise
            return _unscorable(spec, clock, str(error))

    async def _run(self, spec: AttemptSpec, clock: _Clock, began: Callable[[], None]) -> Rollout:
        async with self._workers.lease() as worker:
            clock.leased = time.monotonic()
            began()
            session = self._gateway.open_session(
                spec.rollout_id,
                seed=spec.seed,
                limits=spec.task.limits,
                temperature=spec.temperature,
                max_call_tokens=spec.task.limits.max_call_tokens,
                listener=worker.gateway_socket,
            )
            try:
                result = await worker.run(spec.task, _access(session, spec.task))
            finally:
                trajectory = await session.seal(self._seal_s)
            clock.agent = time.monotonic() - clock.leased
        stats = session.stats
        if stats.infra_error:
            return _unscorable(spec, clock, stats.infra_error, trajectory)
        graded = time.monotonic()
        verdict = await self._judge(spec.task, result.tree)
        clock.graded = time.monotonic() - graded
        if verdict.outcome is Outcome.INFRA:
            return _unscorable(spec, clock, verdict.reason, trajectory)
        return _decided(spec, clock, result, trajectory, verdict, stats)


def _access(session: Session, task: Task) -> ModelAccess:
    return ModelAccess(
        public_id=session.public_id,
        secret=session.secret,
        max_call_tokens=task.limits.max_call_tokens,
    )


def _status(result: AgentResult, stats: SessionStats) -> Status:
    if result.exit == "timeout" or stats.budget_stop or stats.truncated:
        return Status.TRUNCATED
    return Status.OK if result.exit == "finished" else Status.AGENT_FAILED


def _timings(clock: _Clock, engine_s: float = 0.0) -> Timings:
    now = time.monotonic()
    return Timings(
        queued_s=(clock.leased or now) - clock.start,
        agent_s=clock.agent,
        engine_s=engine_s,
        grade_s=clock.graded,
        total_s=now - clock.start,
    )


def _decided(
    spec: AttemptSpec,
    clock: _Clock,
    result: AgentResult,
    trajectory: Trajectory,
    verdict: Verdict,
    stats: SessionStats,
) -> Rollout:
    changed, deleted = changes(spec.task.files, result.tree)
    if spec.evaluation:
        trajectory = replace(trajectory, ledger=reassign(trajectory.ledger, "evaluation"))
    return Rollout(
        id=spec.rollout_id,
        task_id=spec.task.id,
        family=spec.task.family,
        status=_status(result, stats),
        reward=verdict.reward,
        trajectory=trajectory,
        verdict=verdict,
        changed=changed,
        deleted=deleted,
        timings=_timings(clock, stats.engine_s),
        attempt=spec.attempt,
        error="" if result.exit == "finished" else result.detail,
    )


def _unscorable(
    spec: AttemptSpec, clock: _Clock, reason: str, trajectory: Trajectory | None = None
) -> Rollout:
    kept = trajectory or Trajectory(segments=(), turns=(), ledger=Ledger())
    return Rollout(
        id=spec.rollout_id,
        task_id=spec.task.id,
        family=spec.task.family,
        status=Status.INFRA_FAILED,
        reward=None,
        trajectory=replace(kept, ledger=reassign(kept.ledger, "infra")),
        verdict=None,
        changed={},
        deleted=(),
        timings=_timings(clock),
        attempt=spec.attempt,
        error=reason,
    )
