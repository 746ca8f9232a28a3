"""Keys of [harness] that describe a user's own agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from insitu.config.base import Count, OwnPath, Table, unless

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
    process_memory_mb: Annotated[Count, _OWN] = 1024
    """Memory limit of one process in the agent's sandbox."""
