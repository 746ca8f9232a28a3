"""One attempt, from Task to Rollout: lease a worker, open a session, run the agent, seal, grade.

This file is the entry point to the code: every folder it imports is a step of the path. Exactly one Rollout
is returned: failures of the host make it unscorable (INFRA_FAILED, reward None), everything the agent can
cause itself is graded. Broken capture invariants are defects and are raised.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from insitu import failpoint
from insitu.agents.base import AgentResult, Clock, Harness, ModelAccess, Worker, loop_time
from insitu.agents.pool import WorkerPool
from insitu.attempt_end import infra_failure, status_of, ungraded
from insitu.capture.ledger import reassign
from insitu.errors import CaptureError, ConfigError, GradeError, InsituError, user_code
from insitu.gateway.host_tools import HostCall, HostTool, ToolBox
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session, SessionStats
from insitu.grading.diff import DiffPolicy, compare, unified
from insitu.grading.reward import EARNED, ToolEnvironment
from insitu.grading.steps import StepGrades
from insitu.grading.verdict import NOTHING_CHANGED, with_ending
from insitu.sandbox.base import Sandbox
from insitu.types import (
    Ledger,
    Limits,
    Rollout,
    Status,
    Task,
    Timings,
    Trajectory,
    Tree,
    Turn,
    Verdict,
)

Judge = Callable[[Task, Tree], Awaitable[Verdict]]
"""Grades the final files; holds the oracle, which the rollout side never sees."""


@runtime_checkable
class PreparableJudge(Protocol):
    """A judge that can prepare ahead of time and provides the base files of tasks with an image."""

    async def prepare(self, task: Task) -> None:
        """Prepare for grading while the agent runs; must not raise."""

    async def base(self, task: Task) -> Tree: ...

    def environment(self, task: Task) -> AbstractAsyncContextManager[ToolEnvironment | None]:
        """Open the environment that the agent acts on by tools, if there is one. Raises GradeError."""

    async def step(self, task: Task, number: int, tree: Tree) -> Verdict:
        """Grade the files after one of the task's steps, counted from 0."""

    async def live(self, task: Task, sandbox: Sandbox) -> Verdict:
        """Grade a task in the sandbox of its agent, as the agent left it."""

    async def score(self, task: Task, rollout: Rollout) -> Rollout:
        """Return the graded rollout with its reward; raise GradeError if the reward function fails."""

    @property
    def scores_groups(self) -> bool:
        """Whether rewards need the whole group; `score` returns None as reward then."""

    async def score_group(self, task: Task, rollouts: Sequence[Rollout]) -> Sequence[Rollout]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """Inputs of one attempt."""

    rollout_id: str
    task: Task
    seed: int
    attempt: int = 1
    temperature: float = 1.0
    evaluation: bool = False
    """Its tokens are never trained; the ledger excludes them as `evaluation`."""


NOTHING_SAMPLED = Trajectory(segments=(), turns=(), ledger=Ledger())
SEAL_S = 10.0
"""Time for the calls of an ended agent to finish."""
MAX_DIFF_CHARS = 256 << 10
"""Most characters of the judged diff that are stored."""
KeepLog = Callable[[Rollout, bytes], None]
"""Gets the redacted output of an agent whose attempt did not end `ok`; must not raise."""
KeepArtifacts = Callable[[Rollout, Mapping[str, bytes]], None]
"""Gets the declared artifacts of a sandbox, if any; must not raise."""
KeepCalls = Callable[[str, int, Sequence[Mapping[str, object]]], None]
"""Gets rollout id, attempt number and the calls of host tools in order, if any; may raise RecordError."""
Ending = Callable[[Sequence[Turn]], str]
"""Says in a line how a rollout ended that changed nothing; empty if it cannot."""


@dataclass(slots=True)
class _AttemptState:
    """State of a running attempt: seconds by phase, and results that must survive its failure."""

    start: float
    began_s: float
    """Start in seconds since the epoch."""
    leased: float = 0.0
    agent: float = 0.0
    graded: float = 0.0
    trajectory: Trajectory = NOTHING_SAMPLED
    """Set by the seal; tokens of an attempt that fails later are still accounted for."""
    log: bytes = b""
    egress: int | None = None
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    calls: Sequence[HostCall] = ()
    earned: dict[str, float] = field(default_factory=dict)
    """Parts of the reward: by the steps of the task, and of its environment."""
    verdict: Verdict | None = None
    """Of a task that is graded while its sandbox is there: in it, or step by step."""
    begun: Task | None = None
    """The task with the steps that were graded, if it has steps."""

    @contextmanager
    def grading(self) -> Iterator[None]:
        """Count the time as that of grading."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.graded += time.monotonic() - began


class OnStart(Protocol):
    """Callback when an attempt has its worker; must not raise."""

    def __call__(self, clock: Clock = loop_time, /) -> None:
        """Handle the start; `clock` measures the time of this attempt."""


def ignore_start(clock: Clock = loop_time, /) -> None:
    """No-op start callback."""


def ignore_cancelled(rollout: Rollout) -> None:
    """No-op callback for a cancelled attempt."""


async def no_wait() -> None:
    """No-op gate: the attempt starts at once."""


class AttemptExecutor:
    """Runs attempts against one gateway, one pool of workers and one judge."""

    def __init__(
        self,
        gateway: Gateway,
        workers: WorkerPool,
        judge: Judge,
        *,
        keep_log: KeepLog = lambda rollout, log: None,
        keep_artifacts: KeepArtifacts = lambda rollout, artifacts: None,
        keep_calls: KeepCalls = lambda rollout_id, attempt, calls: None,
        ending: Ending = lambda turns: "",
        model: str = "policy",
        harness: Harness | None = None,
    ) -> None:
        """Connect gateway, workers and judge.

        `model` is the model name that agents request; `harness`: the agent, if not that of the pool.
        """
        self._gateway, self._workers, self._judge = gateway, workers, judge
        self._ending = ending
        self._model, self._harness = model, harness
        self._keep_log, self._keep_artifacts, self._keep_calls = keep_log, keep_artifacts, keep_calls

    @property
    def scores_groups(self) -> bool:
        return isinstance(self._judge, PreparableJudge) and self._judge.scores_groups

    async def score_group(self, task: Task, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Return the rollouts of a group with the rewards of a function that needs all of them."""
        judge = self._judge
        return await judge.score_group(task, rollouts) if isinstance(judge, PreparableJudge) else rollouts

    async def run(
        self,
        spec: AttemptSpec,
        on_start: OnStart = ignore_start,
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        """Run one attempt from sandbox to verdict.

        `ready` is awaited when a worker is available, then `on_start` is called and the agent starts.
        Cancelling stops agent, sandbox and engine requests at once; `on_cancelled` then gets the partial
        rollout. Raises CaptureError when a capture invariant is broken.
        """
        state = _AttemptState(start=time.monotonic(), began_s=time.time())
        try:
            rollout = await self._run(spec, state, on_start, ready)
        except asyncio.CancelledError:
            on_cancelled(replace(_unscorable_rollout(spec, state, "cancelled"), trajectory=state.trajectory))
            raise
        except CaptureError:
            raise
        except InsituError as error:
            if not error.infra:
                raise
            rollout = _unscorable_rollout(spec, state, str(error))
        finally:
            if state.calls:
                calls = [asdict(call) for call in state.calls]
                self._keep_calls(spec.rollout_id, spec.attempt, calls)
        if rollout.status is not Status.OK:
            self._keep_log(rollout, state.log)
        if state.artifacts:
            self._keep_artifacts(rollout, state.artifacts)
        return rollout

    async def _run(
        self,
        spec: AttemptSpec,
        state: _AttemptState,
        on_start: OnStart,
        ready: Callable[[], Awaitable[object]],
    ) -> Rollout:
        async with (
            self._workers.lease(spec.task.setup, self._harness) as worker,
            self._environment(spec.task) as environment,
        ):
            await ready()
            result, stats = await self._work(spec, state, worker, on_start, environment)
        state.log, state.egress, state.artifacts = result.log, result.egress_attempts, result.artifacts
        trouble = infra_failure(result, stats, spec.task.limits)
        if not trouble and failpoint.fails("try.lost"):
            trouble = "its sandbox was lost (failpoint)"
        if trouble:
            return _unscorable_rollout(spec, state, trouble)
        graded = time.monotonic() - state.graded
        verdict = state.verdict or await self._judge(spec.task, result.tree)
        if result.exit == "finished" and verdict.reason.startswith(NOTHING_CHANGED):
            ending = await asyncio.to_thread(self._ending, state.trajectory.turns)
            verdict = with_ending(verdict, ending)
        state.graded = time.monotonic() - graded
        why = ungraded(verdict)
        if why is not None:
            return _unscorable_rollout(spec, state, why)
        if not isinstance(self._judge, PreparableJudge):
            return await _graded_rollout(spec, state, result, verdict, stats, spec.task.files)
        task = state.begun or spec.task
        base = await self._judge.base(task)
        rollout = await _graded_rollout(spec, state, result, verdict, stats, base)
        rollout = replace(rollout, reward_components=state.earned)
        rollout = await self._judge.score(task, rollout)
        state.graded = time.monotonic() - graded
        return replace(rollout, timings=_timings(state, stats.engine_s))

    async def _work(
        self,
        spec: AttemptSpec,
        state: _AttemptState,
        worker: Worker,
        on_start: OnStart,
        environment: ToolEnvironment | None,
    ) -> tuple[AgentResult, SessionStats]:
        """Let the agent work in a session of its own, and seal it."""
        state.leased = time.monotonic()
        opened: list[Session] = []
        on_start(lambda: opened[0].clock() if opened else loop_time())
        session = self._gateway.open_session(
            spec.rollout_id,
            seed=spec.seed,
            limits=spec.task.limits,
            temperature=spec.temperature,
            max_call_tokens=spec.task.limits.max_call_tokens,
            listener=worker.gateway_socket,
            tools=self._tools(environment),
        )
        opened.append(session)
        with closing(session.tools):
            max_wait_s = SEAL_S
            try:
                access = self._access(session, spec.task.limits)
                async with self._preparing(spec.task):
                    # a worker of the user's own may take the first three arguments only
                    more = self._grading(session, spec.task, state)
                    result = await worker.run(spec.task, access, lambda: session.done, **more)
                # what it does after its answer counts no more
                if session.tools.ended and result.exit == "failed":
                    result = replace(result, exit="finished")
            except asyncio.CancelledError:
                max_wait_s = 0.0  # the replies are no longer needed
                raise
            finally:
                try:
                    if session.state != "sealed":
                        await _seal(session, max_wait_s, state)
                finally:
                    state.calls = session.host_calls
                    state.agent = time.monotonic() - state.leased - state.graded
            if environment is not None:
                await session.tools.answered()
                earned = environment.earned
                state.earned |= {} if earned is None else {EARNED: earned}
        return result, session.stats

    def _grading(self, session: Session, task: Task, state: _AttemptState) -> Mapping[str, Any]:
        """Return what grades a task while its sandbox is there, as arguments of the worker."""
        judge = self._judge
        if not isinstance(judge, PreparableJudge) or not (task.steps or task.grading.where == "live"):
            return {}
        grades = StepGrades(task)

        async def live(sandbox: Sandbox) -> None:
            await _seal(session, SEAL_S, state)
            with state.grading():
                state.verdict = await judge.live(task, sandbox)

        async def graded(number: int, tree: Tree) -> bool:
            with state.grading(), session.grading():
                more = grades.add(await judge.step(task, number, tree))
            state.begun = replace(task, steps=task.steps[: number + 1])
            state.verdict = grades.verdict
            state.earned = dict(grades.parts)
            session.left = False  # it may have said so of its step
            return more and not session.tools.ended

        return {"graded": graded} if task.steps else {"live": live}

    @asynccontextmanager
    async def _preparing(self, task: Task) -> AsyncIterator[None]:
        """Let the judge prepare while the agent works."""
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

    @asynccontextmanager
    async def _environment(self, task: Task) -> AsyncIterator[ToolEnvironment | None]:
        """Open the environment of an attempt, if it has one."""
        if not isinstance(self._judge, PreparableJudge):
            yield None
            return
        async with self._judge.environment(task) as environment:
            yield environment

    def _tools(self, environment: ToolEnvironment | None) -> Sequence[HostTool] | None:
        """Return the host tools of a session: those of the configuration, and those of an environment."""
        if environment is None:
            return None
        made = [
            HostTool(
                name=tool.name,
                description=tool.description,
                parameters=json.loads(tool.parameters),
                answer=partial(_step, environment, tool.name),
            )
            for tool in environment.tools
        ]
        tools = [*self._gateway.config.tools, *made]
        try:
            ToolBox(tools)
        except ConfigError as error:
            raise GradeError(f"the environment: {error}") from error
        return tools

    def _access(self, session: Session, limits: Limits) -> ModelAccess:
        return ModelAccess(
            public_id=session.public_id,
            secret=session.secret,
            model=self._model,
            max_call_tokens=limits.max_call_tokens,
            max_context_tokens=limits.max_context_tokens,
            clock=session.clock,
        )


async def _step(environment: ToolEnvironment, name: str, arguments: Mapping[str, object]) -> str:
    with user_code(GradeError, f"the environment's tool {name}"):
        return await environment.call(name, arguments)


async def _seal(session: Session, max_wait_s: float, state: _AttemptState) -> None:
    """Seal the session and store its trajectory, even if cancelled meanwhile."""
    # On cancellation the seal is still awaited (at most `max_wait_s`): sampled tokens must be accounted for.
    sealing = asyncio.ensure_future(session.seal(max_wait_s))
    try:
        await asyncio.shield(sealing)
    except asyncio.CancelledError:
        state.trajectory = await sealing
        raise
    state.trajectory = sealing.result()


def _timings(state: _AttemptState, engine_s: float = 0.0) -> Timings:
    now = time.monotonic()
    return Timings(
        queued_s=(state.leased or now) - state.start,
        agent_s=state.agent,
        engine_s=engine_s,
        grade_s=state.graded,
        total_s=now - state.start,
    )


async def _graded_rollout(
    spec: AttemptSpec,
    state: _AttemptState,
    result: AgentResult,
    verdict: Verdict,
    stats: SessionStats,
    base: Tree,
) -> Rollout:
    trajectory = state.trajectory
    if spec.evaluation:
        trajectory = replace(trajectory, ledger=reassign(trajectory.ledger, "evaluation"))
    # Files that the judge ignores are not kept either: an agent may leave any amount of them.
    policy = DiffPolicy(protected=spec.task.grading.protected, roots=spec.task.setup.roots)
    diff = compare(base, result.tree, policy)
    before = {path: base[path] for path in (*diff.changed, *diff.deleted) if path in base}
    text = await asyncio.to_thread(unified, before, diff.changed, max_chars=MAX_DIFF_CHARS)
    return Rollout(
        id=spec.rollout_id,
        task_id=spec.task.id,
        category=spec.task.category,
        part=spec.task.part,
        status=status_of(result, stats),
        reward=verdict.reward,
        trajectory=trajectory,
        verdict=verdict,
        changed=diff.changed,
        deleted=diff.deleted,
        timings=_timings(state, stats.engine_s),
        attempt=spec.attempt,
        error="" if result.exit == "finished" else result.detail,
        egress_attempts=state.egress,
        began_s=state.began_s,
        diff=text,
    )


def _unscorable_rollout(spec: AttemptSpec, state: _AttemptState, reason: str) -> Rollout:
    rollout = infra_failed(spec, reason, _timings(state), state.began_s)
    excluded = replace(state.trajectory, ledger=reassign(state.trajectory.ledger, "infra"))
    return replace(rollout, trajectory=excluded, egress_attempts=state.egress)


def infra_failed(spec: AttemptSpec, reason: str, timings: Timings, began_s: float) -> Rollout:
    """Return an attempt that failed of the infrastructure and left nothing."""
    return Rollout(
        id=spec.rollout_id,
        task_id=spec.task.id,
        category=spec.task.category,
        part=spec.task.part,
        status=Status.INFRA_FAILED,
        reward=None,
        trajectory=NOTHING_SAMPLED,
        verdict=None,
        changed={},
        deleted=(),
        timings=timings,
        attempt=spec.attempt,
        error=reason,
        began_s=began_s,
    )
