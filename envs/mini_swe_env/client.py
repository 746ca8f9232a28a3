"""Client of mini_swe_env."""

from typing import Any

from openenv.core.env_server.types import State
from openenv.core.mcp_client import MCPToolClient
from pydantic import BaseModel, Field

ROLLOUT_S = 7200.0
"""Longest wait for a reply: a call is a whole rollout."""


class SWECommandResult(BaseModel):
    """One command of setup or verify."""

    cmd: str
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0


class SWERolloutResult(BaseModel):
    """Result of one rollout. `reward` is None exactly when `error` says why it was not graded."""

    task_id: str = ""
    instance_id: str = ""
    sandbox_id: str = ""
    reward: float | None = None
    resolved: bool | None = None
    agent_exit_code: int | None = None
    wall_s: float = 0.0
    setup_results: list[SWECommandResult] = Field(default_factory=list)
    """Of a task of the caller's own commands, without output; a setup that failed is an `error`."""
    verify_results: list[SWECommandResult] = Field(default_factory=list)
    """Of a task of the caller's own commands, with the end of a failed one's output in `stderr`."""
    files: dict[str, str] = Field(default_factory=dict)
    """Changed files by path, shortened."""
    files_extra: list[str] = Field(default_factory=list)
    agent_log_tail: str = ""
    error: str | None = None


class MiniSWEEnv(MCPToolClient):
    """`run_swe_rollout(...)`: a coding agent solves one task. Use `.sync()` without an event loop."""

    def __init__(self, base_url: str, message_timeout_s: float = ROLLOUT_S, **options: Any) -> None:
        """Connect to a server at `base_url`."""
        super().__init__(base_url, message_timeout_s=message_timeout_s, **options)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        # OpenEnv's own keeps only episode_id and step_count.
        return State.model_validate(payload)

    async def run_swe_rollout(
        self,
        *,
        instance_id: str = "",
        repo: str = "",
        base_commit: str = "",
        instruction: str = "",
        setup: list[str] | None = None,
        verify: list[str] | None = None,
        timeout_s: float = 1800,
        agent: str = "pi",
        base_url: str = "",
        api_key: str = "",
        model: str = "",
        agent_timeout_s: float = 600.0,
        sandbox_backend: str = "",
        sandbox_image: str = "",
        task_id: str = "",
        task_json: str = "",
    ) -> SWERolloutResult:
        """Run one rollout and return its result.

        `task_id` or `instance_id` names a task of the server. A task of commands (`instruction`, `setup`,
        `verify`) and a model endpoint (`base_url`, `api_key`, `model`) need a server that trusts callers.
        """
        arguments = dict(
            instance_id=instance_id, repo=repo, base_commit=base_commit, instruction=instruction,
            setup=setup or [], verify=verify or [], timeout_s=timeout_s, agent=agent, base_url=base_url,
            api_key=api_key, model=model, agent_timeout_s=agent_timeout_s, sandbox_backend=sandbox_backend,
            sandbox_image=sandbox_image, task_id=task_id, task_json=task_json,
        )  # fmt: skip
        text = await self.call_tool("run_swe_rollout", **arguments)
        return SWERolloutResult.model_validate_json(text)
