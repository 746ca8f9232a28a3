"""OpenEnv environments with one tool, `terminal`: the agent works in a sandbox, the host grades a copy of it.

    reset(task | split, index | instruction, setup, verify) -> step(CallToolAction("terminal", ...))* -> done

Who resets and steps (the trainer) gets the reward, in the last observation and in `state`; the tool's text,
which the agent reads, has none. Every step's reward is a finite number. A failure of the host ends the
episode with reward 0.0 and `metadata.infra`: OpenEnv has no "not graded".
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from hmac import compare_digest
from typing import Any, cast
from uuid import uuid4

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    Observation,
    State,
)
from pydantic import BaseModel, Field

from insitu._version import __version__
from insitu.errors import ConfigError, InsituError
from insitu.sandbox.base import ExecResult
from insitu.tasks.base import Split
from insitu.types import Task
from insitu_bridges.openenv.episodes import Episode, Episodes, Graded
from insitu_bridges.openenv.settings import APP, CALLERS, CONFIG, ServerSettings
from insitu_bridges.openenv.tasks import described, verified
from insitu_bridges.versions import check

COMMAND_S = 300.0
"""Longest command of an episode; the task's wall limit may be lower."""
STEP_S = 3600.0
"""OpenEnv's own limit of a tool call, 30 s by default, would cut a grading."""
IDLE_S = 7200.0
"""Sessions without a call for so long are closed: an MCP client may go without a word."""
SHOWN_CHARS = 4000
SPLITS: tuple[Split, ...] = ("train", "eval")
UPSTREAM = {"setup": "setup_scripts", "verify": "verify_scripts", "image": "sandbox_image"}
"""Options of `reset` that OpenEnv's terminus_env names otherwise."""
SERVERS = (
    "sandbox_backend", "sandbox_flavor", "sandbox_root",
    "hf_sandbox_image", "hf_sandbox_flavor", "hf_sandbox_timeout",
)  # fmt: skip
"""Options of it that the server's configuration decides."""
PREVIEW = 100
"""Most tasks that are listed at once."""


class CommandResult(BaseModel):
    """One command of an episode, with at most `SHOWN_CHARS` of its output."""

    command: str
    output: str = ""
    error: str | None = None
    success: bool = True


class TaskState(State):  # type: ignore[misc]
    """State of an episode, for the trainer."""

    task_id: str = ""
    sandbox_id: str | None = None
    """The episode's own id: sandboxes have no names outside the server."""
    setup_results: list[CommandResult] = Field(default_factory=list)
    commands: list[CommandResult] = Field(default_factory=list)
    verify_commands: list[str] = Field(default_factory=list)
    """Of a task that the caller of `reset` defined; those of the server's tasks are hidden."""
    verify_results: list[CommandResult] = Field(default_factory=list)
    submitted_answer: str | None = None
    last_reward: float | None = None
    last_error: str | None = None
    outcome: str = ""
    passed: int = 0
    total: int = 0
    infra: bool = False
    """The host failed: `last_reward` is None and must not be trained as 0."""


class TaskEnvironment(MCPEnvironment):  # type: ignore[misc]
    """Resets to a task and lists tasks; subclasses add tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, name: str, episodes: Episodes, settings: ServerSettings) -> None:
        """Serve `episodes`, which all environments of a server share."""
        self._name, self.episodes, self.trusts_callers = name, episodes, settings.trust_callers
        self._state = TaskState(episode_id=str(uuid4()), step_count=0)
        server = FastMCP(name)
        self.add_tools(server)
        super().__init__(server)

    def add_tools(self, server: FastMCP) -> None:
        """Register the tools of the environment."""
        raise NotImplementedError

    # ------------------------------------------------------------------ OpenEnv's calls

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        return self.episodes.call(self._reset(seed, episode_id, options))

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> Observation:
        return await asyncio.wrap_future(self.episodes.submit(self._reset(seed, episode_id, options)))

    def step(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        self._state.step_count += 1
        return self._finish(super().step(action, timeout_s=timeout_s or STEP_S, **more))

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        self._state.step_count += 1
        return self._finish(await super().step_async(action, timeout_s=timeout_s or STEP_S, **more))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        return Observation(done=False, reward=0.0, metadata={"error": "use list_tools and call_tool"})

    @property
    def state(self) -> TaskState:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        tasks = f"Tasks of {self.episodes.tasks.name} in sandboxes, graded by insitu on the host."
        return EnvironmentMetadata(name=self._name, description=tasks, version=__version__)

    # ------------------------------------------------------------------ OpenEnv's task routes

    def list_splits(self) -> list[str]:
        return list(SPLITS)

    def num_tasks(self, split: str) -> int:
        return self.episodes.tasks.size(_split(split))

    def get_task(self, split: str, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(f"split {split} has no task {index}")
        return described(_split(split), index, self.episodes.tasks.at(_split(split), index))

    def list_tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        return self.get_task_range(split, 0, PREVIEW)

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> Sequence[Mapping[str, Any]]:
        chosen = range(*slice(start, stop).indices(self.num_tasks(split)))
        return [self.get_task(split, index) for index in chosen]

    # ------------------------------------------------------------------ inside

    def choose(self, seed: int | None, options: Mapping[str, Any]) -> Task:
        """Return the task that `reset` names; raise InsituError."""
        known = {"task", "split", "index", "instruction", "setup", "verify", "image", *UPSTREAM.values()}
        known |= {*SERVERS, "sandbox_timeout", "forward_hf_token"}
        if unknown := sorted(options.keys() - known):
            raise ConfigError(f"reset has no option {unknown[0]!a} (known: {', '.join(sorted(known))})")
        tasks, config = self.episodes.tasks, self.episodes.config
        options = {
            **options,
            **{own: options.get(own) or options.get(name) for own, name in UPSTREAM.items()},
        }
        for name in SERVERS:
            if options.get(name) not in (None, "", config.sandbox.backend):
                raise ConfigError(f"{name}: [sandbox] of {CONFIG} decides, backend {config.sandbox.backend}")
        if options.get("forward_hf_token"):
            raise ConfigError("forward_hf_token: a sandbox has no network and gets no secret")
        try:
            limit = float(options.get("sandbox_timeout") or math.inf)
        except (TypeError, ValueError):
            limit = 0.0
        if not limit > 0:
            raise ConfigError(f"sandbox_timeout = {options['sandbox_timeout']!a} is no number of seconds")
        return tasks.limited(self._asked(seed, options), limit)

    def _asked(self, seed: int | None, options: Mapping[str, Any]) -> Task:
        tasks = self.episodes.tasks
        if options.get("verify") or options.get("setup"):
            self.require_trust("reset with setup and verify commands")
            instruction, image = str(options.get("instruction") or ""), str(options["image"] or "")
            setup, verify = commands(options.get("setup")), commands(options.get("verify"))
            return tasks.define(f"caller/{uuid4().hex}", instruction, setup, verify, image=image)
        if options.get("image"):
            raise ConfigError("an image needs a task of the caller's, with verify")
        if options.get("task"):
            return tasks.find(str(options["task"]))
        split = _split(options.get("split") or "train")
        index = options.get("index")
        return tasks.at(split, (seed or 0) % max(1, tasks.size(split)) if index is None else int(index))

    def require_trust(self, what: str) -> None:
        """Raise ConfigError unless the operator trusts callers."""
        if not self.trusts_callers:
            raise ConfigError(f"{what} needs {CALLERS}=1 at the server")

    async def _reset(
        self, seed: int | None, episode_id: str | None, options: Mapping[str, Any]
    ) -> Observation:
        await self.leave()
        self._state = TaskState(episode_id=episode_id or str(uuid4()), step_count=0)
        try:
            task = self.choose(seed, options)
            self._state.task_id = task.id
            await self.enter(task)
        except InsituError as error:
            self._state.infra, self._state.last_error = error.infra, str(error)
            failed = {"status": "error", "error": str(error), "infra": error.infra}
            return Observation(done=True, reward=0.0, metadata=failed)
        ready = {
            "status": "ready",
            "task_id": task.id,
            "instruction": task.prompt,
            "workdir": task.setup.workdir,
            "limits": task.limits.model_dump(),
        }
        return Observation(done=False, reward=0.0, metadata=ready)

    async def enter(self, task: Task) -> None:
        """Start the episode of a task."""

    async def leave(self) -> None:
        """End the episode, if any."""

    def set_result(self, graded: Graded) -> None:
        """Store the result of the episode."""
        state = self._state
        state.last_reward, state.outcome = graded.reward, graded.outcome
        state.passed, state.total, state.infra = graded.passed, graded.total, graded.reward is None
        state.last_error = graded.reason if state.infra else None

    def _finish(self, observation: Observation) -> Observation:
        """Give an observation its reward: that of the episode at its end, else 0."""
        state = self._state
        observation.done = state.infra or state.last_reward is not None
        observation.reward = state.last_reward or 0.0
        if observation.done:
            observation.metadata |= {
                "outcome": state.outcome,
                "passed": state.passed,
                "total": state.total,
                "infra": state.infra,
                "env_reward": state.last_reward,
            }
        return observation

    def close(self) -> None:
        self.episodes.call(self.leave())
        super().close()


class TerminalEnvironment(TaskEnvironment):
    """A sandbox per episode, with the tool `terminal`."""

    _episode: Episode | None = None

    def add_tools(self, server: FastMCP) -> None:
        async def terminal(command: str = "", final_answer: str = "") -> str:
            """Run a shell command in the task's work folder, or submit the final answer.

            Args:
                command: Shell command; each starts in the work folder.
                final_answer: Without a command, ends the episode; the files of the work folder count.
            """
            work = self._submit(final_answer) if final_answer and not command else self._run(command)
            return await asyncio.wrap_future(self.episodes.submit(work))

        server.tool(terminal)

    async def enter(self, task: Task) -> None:
        state, done = self._state, list[ExecResult]()
        state.sandbox_id, state.verify_commands = state.episode_id, list(self.episodes.tasks.checks(task))
        try:
            self._episode = await self.episodes.open(task, done.append)
        finally:
            if state.verify_commands:  # what another task's image does is its server's
                state.setup_results = [
                    CommandResult(
                        command=command,
                        output=(one.stdout + one.stderr).decode("utf-8", "replace")[-SHOWN_CHARS:],
                        error=None if one.exit_code == 0 else f"exit code {one.exit_code}",
                        success=one.exit_code == 0,
                    )
                    for command, one in zip(task.setup.commands, done, strict=False)
                ]

    async def leave(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            self.episodes.tasks.forget(episode.task)
            await episode.close()

    async def _run(self, command: str) -> str:
        if self._episode is None:
            return "Error: no episode is running; reset first."
        if not command.strip():
            return "Error: command or final_answer is required."
        limit = min(COMMAND_S, self._episode.task.limits.wall_s)
        try:
            done = await self._episode.run(command, limit)
        except InsituError as error:
            self.set_result(Graded(reward=None, reason=str(error)))
            await self.leave()
            return "Error: the sandbox failed."
        ended = None if done.exit_code == 0 else f"exit code {done.exit_code}"
        shown = CommandResult(
            command=command, output=done.text[-SHOWN_CHARS:], error=ended, success=ended is None
        )
        self._state.commands.append(shown)
        return (done.text + (f"\n({ended})" if ended else "")) or "(no output)"

    async def _submit(self, answer: str) -> str:
        if self._episode is None:
            return "Error: no episode is running; reset first."
        self._state.submitted_answer = answer
        graded = await self._episode.grade()
        self.set_result(graded)
        commands = self._state.verify_commands
        self._state.verify_results = [
            CommandResult(command=command)
            if failed is None
            else CommandResult(command=command, output=failed.tail, error=failed.outcome, success=False)
            for command, failed in zip(
                commands, verified(len(commands), graded.passed, graded.failing), strict=True
            )
            if graded.reward is not None
        ]
        await self.leave()
        return "Answer submitted."


def commands(value: object) -> tuple[str, ...]:
    """Return shell commands from one or a list of them."""
    listed = [value] if isinstance(value, str) else cast("Sequence[object]", value or ())
    return tuple(str(item) for item in listed if str(item).strip())


def _split(name: object) -> Split:
    found = next((split for split in SPLITS if split == name), None)
    if found is None:
        raise ConfigError(f"there is no split {name!a} (known: {', '.join(SPLITS)})")
    return found


def make_app(name: str, kind: type[TaskEnvironment] = TerminalEnvironment) -> Any:
    """Return the FastAPI application of a server, configured by environment variables (settings.py).

    Raises InsituError.
    """
    settings = ServerSettings.read()
    os.environ.setdefault("ENABLE_WEB_INTERFACE", "true")  # OpenEnv's page at /web, by gradio
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    episodes = Episodes(settings.config)
    check("openenv", APP)
    app = create_app(
        lambda: kind(name, episodes, settings),
        CallToolAction,
        CallToolObservation,
        env_name=name,
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=settings.max_episodes, session_timeout=IDLE_S
        ),
        state_cls=TaskState,
        reset_observation_cls=Observation,
    )
    app.router.add_event_handler("shutdown", episodes.close)
    if settings.token:
        app.add_middleware(_RequireToken, token=settings.token)
    return app


class _RequireToken:
    """ASGI middleware: a request or WebSocket without the token is refused, except of /health."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._wanted = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope["path"] == "/health" or compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: status 403
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"INSITU_ENV_TOKEN is missing or wrong\n"})
