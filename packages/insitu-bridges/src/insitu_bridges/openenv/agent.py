"""OpenEnv environment with the tool `run_swe_rollout`: a coding agent solves a task with the caller's model.

    run_swe_rollout -> Gateway (forwards to the model's endpoint) <- agent in its sandbox -> grader -> result

The agent runs unmodified, behind the gateway as in every run of insitu: the key of the endpoint stays on the
host. With `base_url`, `api_key` or `model`, or with commands for `setup` and `verify`, the operator must
trust callers (settings.py); without them the server's [engine] and its task source decide.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self
from uuid import uuid4

from fastmcp import FastMCP
from fastmcp.tools import Tool
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.attempt import AttemptExecutor, AttemptSpec
from insitu.config import Config, load_config
from insitu.errors import ConfigError, InsituError
from insitu.runtime.agents import find_setups
from insitu.runtime.run import open_runtime
from insitu.storage.temp_dirs import scratch_folder
from insitu.types import FailingCheck, Rollout, Status, Task
from insitu_bridges.openenv.environment import TaskEnvironment, commands
from insitu_bridges.openenv.episodes import Graded
from insitu_bridges.openenv.settings import CALLERS, CONFIG
from insitu_bridges.openenv.tasks import verified
from insitu_bridges.provider.backend import check_reachable, open_provider
from insitu_bridges.provider.upstream import upstream_options

MAX_FILES, FILE_CHARS = 100, 20_000
"""Limits of the changed files that a result shows."""
CALLERS_ONLY = (
    "repo", "base_commit", "instruction", "setup", "verify", "base_url", "api_key", "model", "sandbox_image",
)  # fmt: skip
"""Arguments that only trusted callers may give."""


class SweRolloutCall(BaseModel):
    """Arguments of `run_swe_rollout`."""

    model_config = ConfigDict(extra="forbid")

    instance_id: str = ""
    repo: str = ""
    base_commit: str = ""
    instruction: str = ""
    setup: list[str] = Field(default_factory=list)
    verify: list[str] = Field(default_factory=list)
    timeout_s: float = Field(default=1800.0, gt=0)
    agent: str = "pi"
    """Empty = that of the server's [harness]."""
    base_url: str = ""
    api_key: str = Field(default="", repr=False)
    model: str = ""
    agent_timeout_s: float = Field(default=600.0, gt=0)
    sandbox_backend: str = ""
    sandbox_image: str = ""
    task_id: str = ""
    task_json: str = ""

    @property
    def defines_task(self) -> bool:
        return bool(self.verify or self.setup or self.instruction)

    def complete(self) -> Self:
        """Return the call with the fields of `task_json`, which take precedence. Raises ConfigError."""
        if not self.task_json:
            return self
        try:
            given = json.loads(self.task_json)
            known = {key: value for key, value in given.items() if key in type(self).model_fields}
            return type(self).model_validate(self.model_dump() | known | {"task_json": ""})
        except (ValueError, AttributeError, ValidationError) as error:
            raise ConfigError("task_json is not a JSON object of task fields") from error


class AgentEnvironment(TaskEnvironment):
    """One tool call is one rollout of an agent; `reset` only names the episode and its default task."""

    _task: Task | None = None

    def add_tools(self, server: FastMCP) -> None:
        async def run_swe_rollout(
            instance_id: str = "",
            repo: str = "",
            base_commit: str = "",
            instruction: str = "",
            setup: list[str] | None = None,
            verify: list[str] | None = None,
            timeout_s: float = 1800.0,
            agent: str = "pi",
            base_url: str = "",
            api_key: str = "",
            model: str = "",
            agent_timeout_s: float = 600.0,
            sandbox_backend: str = "",
            sandbox_image: str = "",
            task_id: str = "",
            task_json: str = "",
        ) -> str:
            """Run a coding agent on one task and return the graded result as JSON."""
            call = SweRolloutCall(
                instance_id=instance_id, repo=repo, base_commit=base_commit, instruction=instruction,
                setup=setup or [], verify=verify or [], timeout_s=timeout_s, agent=agent, base_url=base_url,
                api_key=api_key, model=model, agent_timeout_s=agent_timeout_s,
                sandbox_backend=sandbox_backend, sandbox_image=sandbox_image, task_id=task_id,
                task_json=task_json,
            )  # fmt: skip
            result = await asyncio.wrap_future(self.episodes.submit(self._rollout(call)))
            return json.dumps(result)

        tool = Tool.from_function(run_swe_rollout)
        # The server's configuration decides on the backend.
        for name in ("sandbox_backend", *(() if self.trusts_callers else CALLERS_ONLY)):
            tool.parameters["properties"].pop(name)  # a call that has one all the same gets a line
        server.add_tool(tool)

    async def enter(self, task: Task) -> None:
        self._task = task

    async def leave(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            self.episodes.tasks.forget(task)

    async def _rollout(self, call: SweRolloutCall) -> dict[str, Any]:
        """Return the fields of a `SWERolloutResult`; `error` says why a rollout is not graded."""
        began = time.monotonic()
        result: dict[str, Any] = {"task_id": call.task_id, "instance_id": call.instance_id}
        try:
            call = call.complete()
            async with asyncio.timeout(call.timeout_s):
                rollout = await self._run(call)
        except (TimeoutError, InsituError) as failed:
            late = f"the rollout was not over within timeout_s = {call.timeout_s:g}"
            error = late if isinstance(failed, TimeoutError) else str(failed)
            self.set_result(Graded(reward=None, reason=error))
            result |= {"reward": None, "resolved": None, "error": error}
        else:
            self.set_result(_graded(rollout))
            result |= result_of(rollout) | command_results(call, _graded(rollout))
        return result | {"wall_s": round(time.monotonic() - began, 3)}

    async def _run(self, call: SweRolloutCall) -> Rollout:
        task = self._chosen(call)
        try:
            task = self.episodes.tasks.limited(task, call.agent_timeout_s)
            async with self._executor(self._config(call), call.api_key) as executor:
                return await executor.run(AttemptSpec(rollout_id=f"env/{uuid4().hex}", task=task, seed=0))
        finally:
            if call.defines_task:
                self.episodes.tasks.forget(task)

    def _chosen(self, call: SweRolloutCall) -> Task:
        """Return the task of a call, else that of the last reset. Raises InsituError."""
        tasks = self.episodes.tasks
        if call.defines_task:
            self.require_trust("a task of the caller's commands")
            if call.repo and not (call.setup or call.sandbox_image):
                raise ConfigError("repo: sandboxes have no network; give setup commands or a sandbox_image")
            name, image = f"caller/{uuid4().hex}", call.sandbox_image
            setup, verify = commands(call.setup), commands(call.verify)
            return tasks.define(name, call.instruction, setup, verify, image=image)
        if wanted := call.task_id or call.instance_id:
            return tasks.find(wanted)
        if self._task is None:
            raise ConfigError("which task? give task_id, or reset first")
        return self._task

    def _config(self, call: SweRolloutCall) -> Config:
        """Return the server's configuration with the agent and model of a call. Raises ConfigError."""
        config = self.episodes.config
        if call.sandbox_backend not in ("", config.sandbox.backend):
            own = config.sandbox.backend
            raise ConfigError(f"sandbox_backend: sandbox.backend of {CONFIG} decides, {own}")
        origin = call.base_url.rstrip("/").removesuffix("/v1")
        changes: dict[str, Any] = {"harness.workers": 1, "harness.mode": "fresh"}
        if call.agent:
            changes |= {"harness.agent": call.agent, "tasks.agents": ()}
        if call.base_url or call.api_key or call.model:
            self.require_trust("a model endpoint of the caller")
            if not (call.base_url and call.model):
                raise ConfigError("base_url and model belong together")
            changes |= {"engine.kind": "upstream", "engine.urls": origin, "engine.model": call.model}
        elif config.engine.kind != "upstream":
            raise ConfigError(f"the server has no model: set [engine] kind = upstream, or {CALLERS}=1")
        tables = config.model_dump(exclude_unset=True)
        return load_config(None, changes, tables)

    @asynccontextmanager
    async def _executor(self, config: Config, api_key: str) -> AsyncIterator[AttemptExecutor]:
        """Open a gateway to the model and a worker with the agent."""
        options = upstream_options(config)
        if api_key:
            options = options.changed(key=api_key)
        await check_reachable(options.url, options.connect_deadline_s)
        # In a thread: it may install the agent.
        setups = await asyncio.to_thread(find_setups, config.arms)
        with scratch_folder() as records:
            async with (
                open_provider(options, records) as provider,
                open_runtime(config, provider, self.episodes.tasks, setups) as runtime,
            ):
                yield AttemptExecutor(runtime.gateway, runtime.workers, runtime.judge, model=options.model)


def _graded(rollout: Rollout) -> Graded:
    verdict = rollout.verdict
    if rollout.status is Status.INFRA_FAILED or verdict is None:
        return Graded(reward=None, reason=rollout.error)
    return Graded(
        reward=rollout.reward,
        outcome=str(verdict.outcome),
        reason=verdict.reason,
        passed=verdict.passed,
        total=verdict.total,
        failing=verdict.evidence or (),
    )


def command_results(call: SweRolloutCall, graded: Graded) -> dict[str, list[dict[str, Any]]]:
    """Return what each command of a graded task of the caller's gave; of those that passed, no output."""
    if not call.defines_task or graded.reward is None:
        return {}
    setup, verify = commands(call.setup), commands(call.verify)
    failed = zip(verify, verified(len(verify), graded.passed, graded.failing), strict=True)
    return {
        "setup_results": [{"cmd": command, "exit_code": 0} for command in setup],
        "verify_results": [{"cmd": command} | _how_it_ended(check) for command, check in failed],
    }


def _how_it_ended(check: FailingCheck | None) -> dict[str, Any]:
    if check is None:
        return {"exit_code": 0}
    code = check.outcome.removeprefix("exit code ")
    # Upstream's result has numbers only; 124 is that of `timeout`.
    return {
        "exit_code": int(code) if code.lstrip("-").isdigit() else 124,
        "stderr": check.tail or check.outcome,
    }


def result_of(rollout: Rollout) -> dict[str, Any]:
    """Return the fields of a `SWERolloutResult` that a rollout has."""
    shown = sorted(rollout.changed)[:MAX_FILES]
    files = {path: rollout.changed[path].content.decode("utf-8", "replace")[:FILE_CHARS] for path in shown}
    graded = _graded(rollout)
    return {
        "reward": graded.reward,
        "resolved": None if graded.reward is None else graded.outcome == "resolved",
        "agent_exit_code": 0 if rollout.status is Status.OK else 1,
        "files": files,
        "files_extra": sorted(set(rollout.changed) - set(shown)),
        "error": rollout.error or None if graded.reward is None else None,
        "agent_log_tail": "" if graded.reward is None else rollout.error,
    }
