"""`insitu serve`: a served gateway on the console, for an agent that the user runs.

Opens sessions, prints how to connect agents and one line per model call. Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from insitu.config import Config
from insitu.errors import ConfigError
from insitu.gateway.admin import Admin
from insitu.gateway.host_tools import HostTool
from insitu.gateway.session import Session
from insitu.runtime.agents import limits_of
from insitu.runtime.gateway import gateway_config
from insitu.serving.agent_setup import TASK, Access, agent_names, setup
from insitu.serving.console import Console
from insitu.serving.served import Served, open_served
from insitu.storage.files import write_text

ADMIN_SECRET = "INSITU_ADMIN_SECRET"
"""Environment variable with the operator's secret (default: a random one)."""

BASE: Mapping[str, Any] = {
    "limits": {
        "wall_s": 86400.0,
        "max_calls": 10_000,
        "max_call_tokens": 512,
        "max_session_tokens": 10_000_000,
    },
}
"""Defaults below the user's configuration: an agent run by hand needs higher limits than a rollout."""


LEGEND = (
    "One line per call: session #turn, format, prompt tokens (new), sampled tokens, drift, outcome.",
    "  clean   continues the stored context token by token (first: the session's first prompt)",
    "  edited  contains a changed reply: rendered as sent, starts a new branch",
    "  fork    starts a new branch (new_root: other system prompt or tools; rewind; context: compacted)",
    '  auxiliary: titles, summaries and the like; gateway.auxiliary = "train" trains on them',
)
"""Explanation of the lines of calls."""


async def serve(
    config: Config,
    stream: TextIO,
    *,
    sessions: int,
    agents: Sequence[str],
    admin: bool,
    json: bool,
    tools: Sequence[HostTool],
) -> None:
    """Serve until cancelled.

    agents: whose setup is printed; none = write the setups of all agents to files. tools: host tools of every
    session. Raises InsituError when the start fails.
    """
    console = Console(stream, json=json)
    for agent in agents:
        setup(agent, _placeholder_access())
    if config.engine.kind == "upstream" and tools:
        raise ConfigError("--tools has no effect when engine.kind = upstream: bodies are forwarded unchanged")
    tools = tools or gateway_config(config).tools
    async with open_served(config, console) as served, AsyncExitStack() as stack:
        opened = [served.open(f"serve-{number}", tools=tools) for number in range(sessions)]
        _print_sessions(console, served, agents, opened)
        if admin:
            await _start_admin(stack, console, served, opened)
        await served.expire()


def _placeholder_access() -> Access:
    return Access(address="", secret="", model="", max_call_tokens=1, context_tokens=3, home="")


def _print_sessions(
    console: Console, served: Served, chosen: Sequence[str], sessions: Sequence[Session]
) -> None:
    """Print how to connect agents to each session; `chosen`: agents whose setup is printed."""
    config, fit, path = served.config, served.fit, served.run.path
    agents = chosen or agent_names()
    if fit is not None and (line := fit.summary(agents)):
        console.note(line)
    for session in sessions:
        address = f"{served.origin}/s/{session.public_id}"
        access = Access(
            address=address,
            secret=session.secret,
            model=config.engine.model or "policy",
            max_call_tokens=config.limits.max_call_tokens,
            context_tokens=config.model.max_context_tokens,
            home=str(path / "home" / session.public_id),
            tools_url=f"{served.origin}/tools/{session.public_id}" if session.tools.tools else "",
            tool_secret=session.tool_secret if session.tools.tools else "",
        )
        notes = {agent: fit.note(agent) if fit is not None else "" for agent in agents}
        setups = [replace(setup(agent, access), note=notes[agent]) for agent in agents]
        lines = [
            f"session {session.rollout_id}",
            f"  OpenAI     {address}/v1",
            f"  Anthropic  {address}",
            f"  Gemini     {address}",
            f"  key        {session.secret}",
        ]
        if session.tools.tools:
            lines.append(f"  host tools: MCP server {address}/mcp, key: {session.tool_secret}")
        if chosen:
            lines += ["", *(line for one in setups for line in [*one.lines(), ""])]
        else:
            lines += _write_setups(path / "agents" / session.rollout_id, access, notes)
        fields = {
            "rollout_id": session.rollout_id,
            "address": address,
            "secret": session.secret,
            "tool_secret": session.tool_secret,
            "agents": {one.agent: asdict(one) for one in setups},
        }
        console.event("session", fields, lines)
    ready = {"origin": served.origin, "run_dir": str(path)}
    console.event("ready", ready, [*(LEGEND if fit is not None else ()), "Serving; Ctrl-C seals and ends."])


def _write_setups(folder: Path, access: Access, notes: Mapping[str, str]) -> list[str]:
    """Write the setups of agents that fit as scripts; return lines about them."""
    folder.mkdir(parents=True)
    fitting = [agent for agent, note in notes.items() if not note]
    for agent in fitting:
        write_text(folder / f"{agent}.sh", setup(agent, access, TASK).script(), private=True)
    too_long = [agent for agent, note in notes.items() if note]
    lines = [f"  agents     sh {folder}/NAME.sh 'your task'   NAME: {', '.join(fitting)}"] if fitting else []
    if too_long:
        lines.append(f"  too long   the first prompts of {', '.join(too_long)} (--agent NAME prints a setup)")
    return lines


async def _start_admin(
    stack: AsyncExitStack, console: Console, served: Served, sessions: Sequence[Session]
) -> None:
    """Start the admin listener on a free port."""
    admin = Admin(
        served.gateway,
        secret=os.environ.get(ADMIN_SECRET),
        limits=limits_of(served.config),
        on_sealed=served.keep,
    )
    for session in sessions:
        admin.adopt(session)
    served.admin = admin
    listener = await stack.enter_async_context(admin.listen_tcp())
    fields = {"origin": listener.origin, "secret": admin.secret}
    console.event("admin", fields, [f"admin: {listener.origin}, key: {admin.secret}"])
