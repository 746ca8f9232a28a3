"""One attempt, from Task to Rollout: lease a worker, open a session, run the agent, seal, judge.

Read this file first; every folder it names is a step of the path. Whatever happens, exactly one Rollout
comes back: host-side failures make it unscorable (INFRA_FAILED, reward None), everything the agent can cause
itself is graded. Broken capture invariants are defects and are raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from insitu import failpoint
from insitu.agents.base import AgentResult, AwayTime, ModelAccess, no_time
from insitu.agents.pool import WorkerPool
from insitu.capture.ledger import reassign
from insitu.errors import CaptureError, InsituError
from insitu.gateway.host_tools import HostCall
from insitu.gateway.session_spec import SessionStats
from insitu.grading.diff import DiffPolicy, compare
from insitu.types import (
    Ledger,
    Limits,
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


@runtime_checkable
class PreparableJudge(Protocol):
    """A judge that can also get ready beforehand, and knows what tasks with an image start from."""

    async def prepare(self, task: Task) -> None:
        """Called when the agent starts; must not raise."""

    async def base(self, task: Task) -> Tree: ...


class AttemptSession(Protocol):
    """The gateway's side of one attempt: gateway.session.Session, or one before a provider without tokens."""

    @property
    def public_id(self) -> str: ...

    @property
    def secret(self) -> str: ...

    @property
    def stats(self) -> SessionStats: ...

    @property
    def left(self) -> bool:
        """The agent said that it is done."""

    @property
    def host_calls(self) -> Sequence[HostCall]:
        """Calls of host tools so far."""

    async def seal(self, deadline_s: float) -> Trajectory: ...


class Sessions(Protocol):
    """Who opens them: gateway.server.Gateway, or runtime.upstream.UpstreamGateway."""

    def open_session(
        self,
        rollout_id: str,
        *,
        seed: int,
        limits: Limits,
        temperature: float,
        max_call_tokens: int,
        listener: Path,
    ) -> AttemptSession: ...


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


NOTHING_SAMPLED = Trajectory(segments=(), turns=(), ledger=Ledger())
WAITED_SHARE = 0.1
"""Of the wall limit: more waiting for a provider's rate limits than that, and a time-out is not graded."""
KeepLog = Callable[[Rollout, bytes], None]
"""Gets the redacted output of an agent whose try did not end `ok`; must not raise."""
KeepArtifacts = Callable[[Rollout, Mapping[str, bytes]], None]
"""Gets what was declared to be kept of a sandbox, where there is any; must not raise."""
KeepCalls = Callable[[str, int, Sequence[Mapping[str, object]]], None]
"""Gets a rollout's id, the number of the try and its calls of host tools in order, where there are any. May
raise RecordError."""


@dataclass(slots=True)
class _Under:
    """The attempt under way: seconds by phase, and what must outlive its failure."""

    start: float
    leased: float = 0.0
    agent: float = 0.0
    graded: float = 0.0
    trajectory: Trajectory = NOTHING_SAMPLED
    """From the seal on; tokens of an attempt that fails later are still accounted for."""
    log: bytes = b""
    egress: int | None = None
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    calls: Sequence[HostCall] = ()


class Began(Protocol):
    """Hears that an attempt has its worker; must not raise."""

    def __call__(self, away_s: AwayTime = no_time, /) -> None:
        """`away_s`: seconds so far in which this attempt waited for an engine that was away."""


def unheard(away_s: AwayTime = no_time, /) -> None:
    """Nobody wants to know when an attempt begins."""


def forget(rollout: Rollout) -> None:
    """Nobody wants to know of a cancelled attempt."""


async def at_once() -> None:
    """An attempt that has its worker waits for nothing else."""


class AttemptExecutor:
    """Runs attempts against one gateway, one pool of workers and one judge."""

    def __init__(
        self,
        gateway: Sessions,
        workers: WorkerPool,
        judge: Judge,
        *,
        seal_s: float = 10.0,
        keep_log: KeepLog = lambda rollout, log: None,
        keep_artifacts: KeepArtifacts = lambda rollout, artifacts: None,
        keep_calls: KeepCalls = lambda rollout_id, attempt, calls: None,
        model: str = "policy",
    ) -> None:
        """`model`: what agents are told to ask for."""
        self._gateway, self._workers, self._judge = gateway, workers, judge
        self._seal_s, self._model = seal_s, model
        self._keep_log, self._keep_artifacts, self._keep_calls = keep_log, keep_artifacts, keep_calls

    async def run(
        self,
        spec: AttemptSpec,
        began: Began = unheard,
        cancelled: Callable[[Rollout], None] = forget,
        ready: Callable[[], Awaitable[object]] = at_once,
    ) -> Rollout:
        """Decide one slot. `ready` is awaited when a worker is at hand, then `began` is called and the agent
        starts. Cancelling stops agent, sandbox and engine requests at once; `cancelled` then gets what there
        was."""
        under = _Under(start=time.monotonic())
        try:
            rollout = await self._run(spec, under, began, ready)
        except asyncio.CancelledError:
            cancelled(replace(_unscorable(spec, under, "cancelled"), trajectory=under.trajectory))
            raise
        except CaptureError:
            raise
        except InsituError as error:
            if not error.infra:
                raise
            rollout = _unscorable(spec, under, str(error))
        finally:
            if under.calls:
                calls = [asdict(call) for call in under.calls]
                self._keep_calls(spec.rollout_id, spec.attempt, calls)
        if rollout.status is not Status.OK:
            self._keep_log(rollout, under.log)
        if under.artifacts:
            self._keep_artifacts(rollout, under.artifacts)
        return rollout

    async def _run(
        self,
        spec: AttemptSpec,
        under: _Under,
        began: Began,
        ready: Callable[[], Awaitable[object]],
    ) -> Rollout:
        async with self._workers.lease(spec.task.setup) as worker:
            await ready()
            under.leased = time.monotonic()
            opened: list[AttemptSession] = []
            clock = asyncio.get_running_loop().time
            began(lambda: sum(session.stats.away(clock()) for session in opened))
            session = self._gateway.open_session(
                spec.rollout_id,
                seed=spec.seed,
                limits=spec.task.limits,
                temperature=spec.temperature,
                max_call_tokens=spec.task.limits.max_call_tokens,
                listener=worker.gateway_socket,
            )
            opened.append(session)
            max_wait_s = self._seal_s
            try:
                access = self._access(session, spec.task.limits)
                async with self._preparing(spec.task):
                    result = await worker.run(spec.task, access, lambda: session.left)
            except asyncio.CancelledError:
                max_wait_s = 0.0  # nobody waits for the replies any more
                raise
            finally:
                try:
                    await _seal(session, max_wait_s, under)
                finally:
                    under.calls = session.host_calls
                    under.agent = time.monotonic() - under.leased
        under.log, under.egress, under.artifacts = result.log, result.egress_attempts, result.artifacts
        stats = session.stats
        trouble = _infra_failure(result, stats, spec.task.limits)
        if not trouble and failpoint.fails("try.lost"):
            trouble = "its sandbox was lost (a failpoint)"
        if trouble:
            return _unscorable(spec, under, trouble)
        graded = time.monotonic()
        verdict = await self._judge(spec.task, result.tree)
        under.graded = time.monotonic() - graded
        ungraded = _ungraded(verdict)
        if ungraded is not None:
            return _unscorable(spec, under, ungraded)
        base = (
            await self._judge.base(spec.task) if isinstance(self._judge, PreparableJudge) else spec.task.files
        )
        return _decided(spec, under, result, verdict, stats, base)

    @asynccontextmanager
    async def _preparing(self, task: Task) -> AsyncIterator[None]:
        """Let the judge get ready while the agent works."""
        if not isinstance(self._judge, PreparableJudge):
            yield
            return
        ready = asyncio.create_task(self._judge.prepare(task))
        try:
            yield
        except BaseException:
            ready.cancel()
            raise
        finally:
            await asyncio.wait([ready])

    def _access(self, session: AttemptSession, limits: Limits) -> ModelAccess:
        clock = asyncio.get_running_loop().time
        return ModelAccess(
            public_id=session.public_id,
            secret=session.secret,
            model=self._model,
            max_call_tokens=limits.max_call_tokens,
            max_context_tokens=limits.max_context_tokens,
            away_s=lambda: session.stats.away(clock()),
        )


async def _seal(session: AttemptSession, max_wait_s: float, under: _Under) -> None:
    """What was sampled is accounted for, also where the cancellation lands in here: it waits until the seal
    is through, at most for the patience."""
    sealing = asyncio.ensure_future(session.seal(max_wait_s))
    try:
        await asyncio.shield(sealing)
    except asyncio.CancelledError:
        under.trajectory = await sealing
        raise
    under.trajectory = sealing.result()


def _infra_failure(result: AgentResult, stats: SessionStats, limits: Limits) -> str:
    """Why an attempt is not graded, empty when it is."""
    if stats.infra_error:
        return stats.infra_error
    if not stats.calls:  # nothing that the model sampled has led to this end
        end = result.detail or "it ended without an error"
        refused = stats.rejections
        if refused.count:
            return f"the gateway refused all {refused.count} requests of the agent ({refused.last}): {end}"
        return f"the agent never called the model: {end}"
    if result.exit == "timeout" and stats.waited_s >= WAITED_SHARE * limits.wall_s:
        return f"the agent ran out of time; {stats.waited_s:.0f} s of it were waits for the provider"
    return ""


def _ungraded(verdict: Verdict) -> str | None:
    """Why a verdict grades nothing, None when it does. A grader that gives no reward that can be one has
    failed: that is not the agent's doing, and nothing that training could use."""
    if verdict.outcome is Outcome.INFRA:
        return verdict.reason
    if verdict.reward is None or not 0.0 <= verdict.reward <= 1.0:
        return f"the grader gave reward {verdict.reward}, which is no number from 0 to 1"
    return None


def _status(result: AgentResult, stats: SessionStats) -> Status:
    if result.exit == "timeout" or stats.budget_stop or stats.truncated:
        return Status.TRUNCATED
    return Status.OK if result.exit == "finished" else Status.AGENT_FAILED


def _timings(under: _Under, engine_s: float = 0.0) -> Timings:
    now = time.monotonic()
    return Timings(
        queued_s=(under.leased or now) - under.start,
        agent_s=under.agent,
        engine_s=engine_s,
        grade_s=under.graded,
        total_s=now - under.start,
    )


def _decided(
    spec: AttemptSpec,
    under: _Under,
    result: AgentResult,
    verdict: Verdict,
    stats: SessionStats,
    base: Tree,
) -> Rollout:
    trajectory = under.trajectory
    if spec.evaluation:
        trajectory = replace(trajectory, ledger=reassign(trajectory.ledger, "evaluation"))
    # What the judge would not look at is not kept either: an agent may leave any amount of it.
    diff = compare(base, result.tree, DiffPolicy(protected=spec.task.grading.protected))
    return Rollout(
        id=spec.rollout_id,
        task_id=spec.task.id,
        category=spec.task.category,
        status=_status(result, stats),
        reward=verdict.reward,
        trajectory=trajectory,
        verdict=verdict,
        changed=diff.changed,
        deleted=diff.deleted,
        timings=_timings(under, stats.engine_s),
        attempt=spec.attempt,
        error="" if result.exit == "finished" else result.detail,
        egress_attempts=under.egress,
    )


def _unscorable(spec: AttemptSpec, under: _Under, reason: str) -> Rollout:
    return Rollout(
        id=spec.rollout_id,
        task_id=spec.task.id,
        category=spec.task.category,
        status=Status.INFRA_FAILED,
        reward=None,
        trajectory=replace(under.trajectory, ledger=reassign(under.trajectory.ledger, "infra")),
        verdict=None,
        changed={},
        deleted=(),
        timings=_timings(under),
        attempt=spec.attempt,
        error=reason,
        egress_attempts=under.egress,
    )
