"""The table [harness]: the agent, built in or a command, and how its processes are reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from insitu.config.base import Agent, Count, OwnPath, Table, unless

_Texts = Annotated[tuple[str, ...], Field(strict=False)]
_OWN = unless("command", ())


class AgentCommand(Table):
    """An agent that is a command; texts may contain placeholders, see docs/agents.md."""

    command: _Texts = ()
    """Own agent: program and arguments, e.g. ["my-agent", "{prompt_file}"]; replaces `agent`. The prompt is
    on stdin unless the arguments contain {prompt_file} or {prompt}."""
    protocol: Annotated[Literal["chat", "responses", "anthropic", "gemini"], _OWN] = "chat"
    """Wire format that the agent speaks."""
    npm: Annotated[_Texts, _OWN] = ()
    """npm packages to install, as name@version."""
    pip: Annotated[_Texts, _OWN] = ()
    """PyPI packages to install, as name==version."""
    files: Annotated[tuple[OwnPath, ...], Field(strict=False), _OWN] = ()
    """Files and folders that are copied unchanged to {files} in the sandbox."""
    config_files: Annotated[Mapping[str, str], _OWN] = {}
    """Text of files by path below the home folder, e.g. { ".my/config.json" = "..." }."""
    env: Annotated[Mapping[str, str], _OWN] = {}
    """Environment of the agent. If nothing in it contains {api_key}, the variables that the vendor's SDK for
    `protocol` reads are set too."""
    ok_exit_codes: Annotated[tuple[int, ...], Field(strict=False), _OWN] = (0,)
    """Exit codes of a finished run; others mean that the agent failed."""


class HarnessTable(AgentCommand):
    """The agent, and how its processes are reused."""

    agent: Agent = "pi"
    """Built-in agent, entry point, module:attribute or file.py:attribute; single_turn = no agent: one reply
    to the task's prompt is checked."""
    version: str = ""
    """Version of the agent's package; empty = the one that its recipe pins."""
    mode: Literal["fresh", "warm"] = "fresh"
    """fresh = a new sandbox per rollout; warm = sandboxes that are wiped in between; Pi's process stays."""
    workers: Count = 8
    """Rollouts that run at the same time."""
    compact: bool = False
    """pi only: allow compaction of a full context. Other agents decide for themselves."""
    artifacts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files or folders in the work folder or home of a sandbox to copy to artifacts/ of the run directory."""

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if self.command and (self.version or self.agent != "pi"):
            raise ValueError("agent and version have no effect with command")
        return self

    @property
    def label(self) -> str:
        """Name of the agent in reports."""
        return self.command[0] if self.command else self.agent
