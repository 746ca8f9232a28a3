"""A gateway for agents that the user runs, and the store of its sessions.

    engine (in a learner, or a server) or provider <- gateway <-HTTP- any agent
    sealed session -> rollout of phase `serve` in the run's store

Sessions of one task form a group. Does not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from insitu.capture.ledger import reassign
from insitu.chat.load import load_renderer
from insitu.config import Config, model_folder
from insitu.errors import GatewayError, InsituError, RecordError
from insitu.gateway.admin import Admin
from insitu.gateway.host_tools import HostCall, HostTool
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.gateway.text_log import spent_in
from insitu.runtime.agents import limits_of
from insitu.runtime.gateway import gateway_config, public_url
from insitu.runtime.preflight import check_local_engine
from insitu.runtime.prompt_sizes import PromptFit
from insitu.runtime.run import open_backend
from insitu.serving.console import Console
from insitu.storage.files import write_text
from insitu.storage.host_calls import HostCallLog
from insitu.storage.lifecycle import SERVE
from insitu.storage.open_run import open_run
from insitu.storage.run_dir import REPORT, SESSIONS, RunDir, read_config
from insitu.storage.session_log import recover
from insitu.storage.store import Store
from insitu.types import Rollout, Status, Timings, Trajectory

SEAL_S = 10.0
"""Time that running calls get to finish when their session is sealed."""
CLOSE_S = 1.0
"""The same at shutdown, for all sessions together."""
EXPIRED_S = 60.0
"""Time from a session's timeout, which its agent gets as an error, until it is sealed."""
POLL_S = 5.0
"""Interval between checks for expired sessions."""
LISTED_TASKS = 20
"""Tasks named in the report."""


class SessionStore:
    """Stores sessions as rollouts of one run: a group per task, a slot per session."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: dict[str, list[str]] = {}
        for rollout in store.outcomes(SERVE, 0):
            self._groups.setdefault(rollout.task_id, []).append(rollout.rollout_id)

    def put(self, rollout: Rollout) -> None:
        """Store a rollout durably; raise RecordError."""
        members = self._groups.setdefault(rollout.task_id, [])
        group = list(self._groups).index(rollout.task_id)
        self._store.put_rollout(SERVE, 0, group, len(members), rollout)
        members.append(rollout.id)


def _rollout(name: str, trajectory: Trajectory, **more: Any) -> Rollout:
    """Return a session's rollout; its task is the name unless `more` has one."""
    given = {"task_id": name, "status": Status.OK, "reward": None, "timings": Timings(), **more}
    nothing: dict[str, Any] = {"category": "", "verdict": None, "changed": {}, "deleted": ()}
    return Rollout(id=name, trajectory=trajectory, **nothing, **given)


def rollout_of(session: Session, trajectory: Trajectory) -> Rollout:
    """Return a sealed session as a rollout; one that the infrastructure broke has no reward."""
    stats = session.stats
    more = {"task_id": session.task or session.rollout_id, "timings": Timings(engine_s=stats.engine_s)}
    if stats.infra_error:
        trajectory = replace(trajectory, ledger=reassign(trajectory.ledger, "infra"))
        more |= {"status": Status.INFRA_FAILED, "error": stats.infra_error}
        return _rollout(session.rollout_id, trajectory, **more)
    status = Status.TRUNCATED if stats.budget_stop or stats.truncated else Status.OK
    return _rollout(session.rollout_id, trajectory, **more, status=status, reward=session.reward)


class HostCallReporter:
    """Writes host tool calls to the log file and reports them as events; not thread-safe."""

    def __init__(
        self, log: HostCallLog, on_event: Callable[[str, Mapping[str, Any], list[str]], None]
    ) -> None:
        """Take the log file and a callback for (event name, JSON fields, text lines)."""
        self._log, self._on_event = log, on_event
        self.error: RecordError | None = None
        """First write error of the log file."""

    def on_call(self, session: Session, call: HostCall) -> None:
        """Log one call."""
        # A write error, such as a full disk, must not fail the agent's call.
        record = {"public_id": session.public_id, **asdict(call)}
        try:
            self._log.keep(session.rollout_id, 1, [record])
        except RecordError as error:
            self.error = self.error or error
        end = f"refused: {call.error}" if call.error else "accepted"
        line = f"{session.rollout_id} host tool {call.name} called by the {call.source}, {end}"
        if call.source == "hook":
            line = f"{session.rollout_id} the hook on tool calls acted on one of {call.name}"
        self._on_event("host_call", {"rollout_id": session.rollout_id, **record}, [line])


class Served:
    """A gateway that listens for agents; made by `open_served`."""

    def __init__(
        self,
        run: RunDir,
        store: Store,
        gateway: Gateway,
        origin: str,
        fit: PromptFit | None,
        console: Console,
    ) -> None:
        self.run, self.gateway, self.fit = run, gateway, fit
        self.origin = origin
        """http://127.0.0.1:PORT."""
        self.admin: Admin | None = None
        self._store, self._console = store, console
        self._sessions = SessionStore(store)
        self._names: set[str] = set()

    @property
    def config(self) -> Config:
        return self.run.config

    def open(self, name: str, task: str = "", tools: Sequence[HostTool] | None = None) -> Session:
        """Open a session with the configured limits and temperature; `name` becomes the rollout's id.

        Halves of surrogate pairs in the two names become U+FFFD, as in a request: nothing could store them.
        `tools`: None = those of the configuration. Raises GatewayError when there was one of this name.
        """
        name, task = (
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in (name, task)
        )
        if name in self._names:
            raise GatewayError(f"session {name} exists already")
        self._names.add(name)
        session = self.gateway.open_session(
            name,
            seed=self.config.run.seed,
            limits=limits_of(self.config),
            temperature=self.config.engine.temperature,
            tools=tools,
        )
        session.task = task
        return session

    async def seal(self, session: Session, wait_s: float = SEAL_S) -> Trajectory:
        """Seal and store a session; running calls get `wait_s`. Raises InsituError."""
        trajectory = await session.seal(wait_s)
        self.keep(session, trajectory)
        return trajectory

    def keep(self, session: Session, trajectory: Trajectory) -> None:
        """Store a sealed session, delete its log and report it."""
        rollout = rollout_of(session, trajectory)
        self._sessions.put(rollout)
        session.drop_log()
        ledger, stats = trajectory.ledger, session.stats
        fields = {
            **asdict(ledger),
            "rollout_id": rollout.id,
            "task_id": rollout.task_id,
            "reward": rollout.reward,
            "calls": stats.calls,
            "prompt_tokens": stats.prompt_tokens,
            "sampled_tokens": stats.sampled_tokens,
            "cost": stats.cost,
        }
        excluded = ", ".join(f"{reason} {count}" for reason, count in ledger.excluded.items()) or "nothing"
        kept = f"trainable {ledger.trained}, excluded {excluded}"
        if self.config.engine.kind == "upstream":
            kept = f"cost {stats.cost:.4g}; text only, never trainable"
        line = f"{rollout.id}: {stats.calls} calls, sampled {stats.sampled_tokens}, {kept}"
        self._console.event("sealed", fields, [line])

    async def expire(self) -> None:
        """Seal and store each session some time after its timeout, forever."""
        while True:
            await asyncio.sleep(POLL_S)
            for session in self.gateway.open_sessions():
                if session.state not in ("open", "live") or session.idle_overtime_s < EXPIRED_S:
                    continue
                try:
                    trajectory = await self.seal(session, 0.0)  # No call is running, so none is cut off.
                except InsituError as error:
                    self._console.note(f"{session.rollout_id}: {error}; its log is kept")
                    continue
                if self.admin is not None:
                    self.admin.keep(session, trajectory)

    async def close(self) -> None:
        """Seal and store the open sessions and write summary and report.

        One broken session does not prevent the others from being stored; its error is raised at the end.
        """
        opened = [one for one in self.gateway.open_sessions() if one.state not in ("draining", "sealed")]
        # Sealed concurrently, because the shutdown has a deadline.
        results = await asyncio.gather(*(one.seal(CLOSE_S) for one in opened), return_exceptions=True)
        for session, result in zip(opened, results, strict=True):
            if not isinstance(result, BaseException):
                self.keep(session, result)
        summary = summarise(self.run, self._store)
        self.run.write_summary(summary)
        write_text(self.run.path / REPORT, report(summary))
        self._console.event("end", summary, report(summary).splitlines())
        for result in results:
            if isinstance(result, BaseException):
                raise result


@asynccontextmanager
async def open_served(config: Config, console: Console) -> AsyncIterator[Served]:
    """Serve on a loopback port; at the end every session is sealed and stored.

    Raises InsituError when the start fails.
    """
    check_local_engine(config)
    async with AsyncExitStack() as stack:
        run, store = stack.enter_context(open_run("serve", config))
        config, folder = run.config, run.path / SESSIONS
        upstream = config.engine.kind == "upstream"
        renderer = None if upstream else load_renderer(model_folder(config), config.model.renderer)
        opened = await stack.enter_async_context(open_backend(run, renderer, console.wait))
        fit = None
        if opened.engine is not None:
            context = min(config.model.max_context_tokens, opened.engine.info.max_context_tokens)
            fit = PromptFit(model_folder(config), context)
        folder.mkdir(exist_ok=True)
        reporter = HostCallReporter(HostCallLog(run.host_calls), console.event)
        options = gateway_config(config, folder)
        gateway = await stack.enter_async_context(
            Gateway(opened.backend, options, console.call, console.note, reporter.on_call)
        )
        listener = await stack.enter_async_context(gateway.listen_tcp(*config.gateway.address))
        url = await stack.enter_async_context(public_url(config, gateway, listener.origin, console.note))
        served = Served(run, store, gateway, url or listener.origin, fit, console)
        try:
            yield served
        finally:
            await served.close()
            if reporter.error is not None:
                raise reporter.error


def recover_run(path: Path) -> list[Rollout]:
    """Store the sessions of a killed `insitu serve` from their logs, without a reward, and return them.

    Raises RecordError.
    """
    logs = sorted((path / SESSIONS).glob("*.log"))
    found: list[Rollout] = []
    if not logs:
        return found
    with open_run("serve", read_config(path), path) as (run, store):
        sessions = SessionStore(store)
        for log in logs:
            session = recover(log)
            error = "the gateway was killed" + (", its log is torn at its end" if session.torn else "")
            rollout = _rollout(session.rollout_id, session.forest.trajectory(), error=error)
            if store.state(rollout.id) is None:  # else killed between storing it and deleting the log
                sessions.put(rollout)
                found.append(rollout)
            log.unlink()
        summary = summarise(run, store)
        run.write_summary(summary)
        write_text(run.path / REPORT, report(summary))
    return found


def summarise(run: RunDir, store: Store) -> dict[str, Any]:
    """Return what summary.json holds."""
    sessions = store.outcomes(SERVE, 0)
    rewards = [one.reward for one in sessions if one.reward is not None]
    tasks: dict[str, list[float | None]] = {}
    for one in sessions:
        tasks.setdefault(one.task_id, []).append(one.reward)
    ledger = store.ledger()
    return {
        "kind": SERVE,
        "run_dir": str(run.path),
        "sessions": len(sessions),
        "rewarded": len(rewards),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "rewards": tasks,
        "ledger": asdict(ledger),
        "trainable": ledger.excluded.get("unused", 0),
        "cost": spent_in(run.path / SESSIONS).cost,
    }


def report(summary: dict[str, Any]) -> str:
    """Return the report as text."""
    tasks = summary["rewards"]
    mean = "" if summary["reward_mean"] is None else f", {summary['reward_mean']:.3f} on average"
    lines = [
        f"{summary['sessions']} sessions of {len(tasks)} tasks, {summary['rewarded']} with a reward{mean};"
        f" {summary['trainable']:,} of {summary['ledger']['captured']:,} sampled tokens can be trained"
    ]
    for task, rewards in list(tasks.items())[:LISTED_TASKS]:
        lines.append(f"  {task}: {' '.join('-' if r is None else f'{r:g}' for r in rewards)}")
    if len(tasks) > LISTED_TASKS:
        lines.append(f"  and {len(tasks) - LISTED_TASKS} more")
    return "\n".join([*lines, f"written to {summary['run_dir']}"]) + "\n"
