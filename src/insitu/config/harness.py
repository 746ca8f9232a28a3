"""The table [harness]: the agent, built in or a command, and how its processes are reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from insitu.config.base import Agent, Count, OwnPath, Table, unless

_Texts = Annotated[tuple[str, ...], Field(strict=False)]
_OWN = unless("command", ())
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class AgentCommand(Table):
    """An agent that is a command; texts may contain placeholders, see docs/agents.md."""

    command: _Texts = ()
    """Own agent: program and arguments, e.g. ["my-agent", "{prompt_file}"]; replaces `agent`. The prompt is
    on stdin unless the arguments contain {prompt_file} or {prompt}. Or more arguments of `agent`, after
    "{agent}": ["{agent}", "--disallowedTools", "WebSearch"]."""
    protocol: Annotated[Literal["chat", "responses", "anthropic", "gemini"], _OWN] = "chat"
    """Wire format that the agent speaks."""
    npm: Annotated[_Texts, _OWN] = ()
    """npm packages to install, as name@version."""
    pip: Annotated[_Texts, _OWN] = ()
    """PyPI packages to install, as name==version."""
    files: Annotated[tuple[OwnPath, ...], Field(strict=False), _OWN] = ()
    """Files and folders that are copied unchanged to {files} in the sandbox."""
    config_files: Mapping[str, str] = {}
    """Text of files by path below the home folder, e.g. { ".my/config.json" = "..." }. Over those of `agent`:
    objects of JSON are merged, other files replaced. "prompt.txt" is what the agent is asked, around
    {prompt}."""
    env: Mapping[_Variable, str] = {}
    """Environment of the agent, over that of `agent`. If nothing in that of a command contains {api_key}, the
    variables that the vendor's SDK for `protocol` reads are set too."""
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
    compact: bool | Annotated[int, Field(gt=1)] = False
    """Tokens of a prompt from which the agent compacts its context; false = three quarters of
    model.max_context_tokens, and never for pi; true = three quarters for pi too."""
    artifacts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files or folders in the work folder or home of a sandbox to copy to artifacts/ of the run directory."""

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if self.is_command and (self.version or self.agent != "pi"):
            raise ValueError('agent and version have no effect with command, unless it begins with "{agent}"')
        if self.command and not self.is_command:
            own = ("protocol", "npm", "pip", "files", "ok_exit_codes")
            if given := [
                name for name in own if getattr(self, name) != type(self).model_fields[name].default
            ]:
                raise ValueError(f'{given[0]} has no effect with "{{agent}}" in command')
        texts = (*self.command, *self.env.values(), *self.config_files.values())
        if "prompt.txt" in self.config_files and not any("{prompt}" in text for text in texts):
            raise ValueError('config_files."prompt.txt" needs {prompt}: the agent would not know its task')
        if self.agent == "single_turn" and (self.command or self.env or self.config_files or self.compact):
            raise ValueError("single_turn has no command, env, config_files and compaction")
        return self

    @property
    def is_command(self) -> bool:
        """Whether the agent is one of the user's own command."""
        return bool(self.command) and self.command[0] != "{agent}"

    @property
    def label(self) -> str:
        """Name of the agent in reports."""
        return self.command[0] if self.is_command else self.agent
