"""`insitu serve`: the gateway alone, for an agent that the user runs.

    engine (in a learner, or a server) or provider <- gateway <-HTTP- any agent

Opens sessions, prints how to connect agents and one line per model call, and at the end seals every session
and exports it to the run directory. Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, model_folder
from insitu.errors import ConfigError
from insitu.gateway.admin import Admin
from insitu.gateway.backend import SessionBackend
from insitu.gateway.host_tools import HostTool
from insitu.gateway.provider_backend import open_provider
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.runtime.agents import limits_of
from insitu.runtime.gateway import gateway_config
from insitu.runtime.run import open_backend
from insitu.runtime.upstream import upstream_options
from insitu.serving.agent_setup import TASK, Access, agent_names, setup
from insitu.serving.console import Console
from insitu.serving.host_calls import HostCallReporter
from insitu.serving.prompt_sizes import PromptFit
from insitu.serving.session_export import Ledgers, expire, exported, finish
from insitu.storage.host_calls import HostCallLog
from insitu.storage.run_dir import SESSIONS, RunDir, write_text
from insitu.storage.session_log import recover

ADMIN_SECRET = "INSITU_ADMIN_SECRET"
"""Environment variable with the operator's secret (default: a random one)."""

BASE: Mapping[str, Any] = {
    "limits": {
        "wall_s": 86400.0,
        "max_calls": 10_000,
        "max_call_tokens": 512,
        "max_session_tokens": 10_000_000,
        "max_nodes": 20_000,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of one invocation that are not part of the configuration."""

    sessions: int = 1
    agents: Sequence[str] = ()
    """Agents whose setup is printed; empty = write the setups of all agents to files."""
    admin: bool = False
    json: bool = False
    tools: Sequence[HostTool] = ()
    """Host tools of every session."""


async def serve(config: Config, options: ServeOptions, stream: TextIO) -> None:
    """Serve until cancelled.

    Raises InsituError when the start fails.
    """
    console = Console(stream, json=options.json)
    for agent in options.agents:
        setup(agent, _placeholder_access())
    if config.engine.kind == "upstream" and options.tools:
        raise ConfigError("--tools has no effect when engine.kind = upstream: bodies are forwarded unchanged")
    options = replace(options, tools=options.tools or gateway_config(config).tools)
    with RunDir.create(config) as run:
        async with AsyncExitStack() as stack:
            served = await stack.enter_async_context(open_served(run, console))
            gateway, numbers = served.gateway, range(options.sessions)
            sessions = [open_session(served, f"serve-{number}", options.tools) for number in numbers]
            _print_sessions(console, run, config, options, served.origin, sessions, served.fit)
            admin = await _admin(stack, console, gateway, config, sessions) if options.admin else None
            ledgers: Ledgers = {}
            try:
                await expire(console, run.path / SESSIONS, sessions, gateway, admin, ledgers)
            finally:
                await finish(console, run, sessions, gateway, admin, ledgers)
                if served.reporter.error is not None:
                    raise served.reporter.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A gateway that listens for agents."""

    config: Config
    gateway: Gateway
    origin: str
    """http://127.0.0.1:PORT."""
    fit: PromptFit | None
    reporter: HostCallReporter


@asynccontextmanager
async def open_served(run: RunDir, console: Console) -> AsyncIterator[Served]:
    """Open engine or provider and a gateway on a loopback port.

    Raises InsituError when the start fails.
    """
    config = run.config
    upstream = config.engine.kind == "upstream"
    renderer = None if upstream else load_renderer(model_folder(config), config.model.renderer)
    async with AsyncExitStack() as stack:
        folder = run.path / SESSIONS
        folder.mkdir(exist_ok=True)
        backend, fit = await _open_backend(stack, console, run, renderer)
        reporter = HostCallReporter(HostCallLog(run.host_calls), console.event)
        options = gateway_config(config, folder)
        gateway = await stack.enter_async_context(
            Gateway(backend, options, console.call, console.note, reporter.on_call)
        )
        listener = await stack.enter_async_context(gateway.listen_tcp(port=config.gateway.port))
        yield Served(config=config, gateway=gateway, origin=listener.origin, fit=fit, reporter=reporter)


async def _open_backend(
    stack: AsyncExitStack, console: Console, run: RunDir, renderer: ChatRenderer | None
) -> tuple[SessionBackend, PromptFit | None]:
    """Return the engine or provider, and a check of the agents' prompts if the model's context is known."""
    config = run.config
    if renderer is None:
        records = run.path / SESSIONS
        return await stack.enter_async_context(open_provider(upstream_options(config), records)), None
    opened = await stack.enter_async_context(open_backend(run, renderer, console.wait))
    context = config.model.max_context_tokens
    if opened.engine is not None:
        context = min(context, opened.engine.info.max_context_tokens)
    return opened.backend, PromptFit(model_folder(config), context)


def _placeholder_access() -> Access:
    return Access(address="", secret="", model="", max_call_tokens=1, context_tokens=3, home="")


def open_session(served: Served, rollout_id: str, tools: Sequence[HostTool] = ()) -> Session:
    """Open a session with the configured limits and temperature."""
    config = served.config
    return served.gateway.open_session(
        rollout_id,
        seed=config.run.seed,
        limits=limits_of(config),
        temperature=config.engine.temperature,
        tools=tools,
    )


def _print_sessions(
    console: Console,
    run: RunDir,
    config: Config,
    options: ServeOptions,
    origin: str,
    sessions: Sequence[Session],
    fit: PromptFit | None = None,
) -> None:
    """Print how to connect agents to each session; `fit` is None if the model's context is unknown."""
    agents = options.agents or agent_names()
    if fit is not None and (line := fit.summary(agents)):
        console.note(line)
    for session in sessions:
        address = f"{origin}/s/{session.public_id}"
        access = Access(
            address=address,
            secret=session.secret,
            model=config.engine.model or "policy",
            max_call_tokens=config.limits.max_call_tokens,
            context_tokens=config.model.max_context_tokens,
            home=str(run.path / "home" / session.public_id),
            tools_url=f"{origin}/tools/{session.public_id}" if options.tools else "",
            tool_secret=session.tool_secret if options.tools else "",
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
        if options.tools:
            lines.append(f"  host tools: MCP server {address}/mcp, key: {session.tool_secret}")
        if options.agents:
            lines += ["", *(line for one in setups for line in [*one.lines(), ""])]
        else:
            lines += _write_setups(run.path / "agents" / session.rollout_id, access, notes)
        fields = {
            "rollout_id": session.rollout_id,
            "address": address,
            "secret": session.secret,
            "tool_secret": session.tool_secret,
            "agents": {one.agent: asdict(one) for one in setups},
        }
        console.event("session", fields, lines)
    ready = {"origin": origin, "run_dir": str(run.path)}
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


async def _admin(
    stack: AsyncExitStack, console: Console, gateway: Gateway, config: Config, sessions: list[Session]
) -> Admin:
    """Start the admin listener on a free port."""
    admin = Admin(gateway, secret=os.environ.get(ADMIN_SECRET), limits=limits_of(config))
    for session in sessions:
        admin.adopt(session)
    listener = await stack.enter_async_context(admin.listen_tcp())
    fields = {"origin": listener.origin, "secret": admin.secret}
    console.event("admin", fields, [f"admin: {listener.origin}, key: {admin.secret}"])
    return admin


def recover_run(path: Path, stream: TextIO) -> int:
    """Export the sessions of a killed `insitu serve` from their logs; return their number.

    The logs are kept. Raises RecordError.
    """
    found = sorted((path / SESSIONS).glob("*.log"))
    for file in found:
        session = recover(file)
        trajectory = session.forest.trajectory()
        # The log does not contain the temperature, which the operator may have set per session.
        write_text(file.with_suffix(".json"), exported(trajectory, None), private=True)
        ledger = trajectory.ledger
        end = ", torn at its end" if session.torn else ""
        print(
            f"{session.rollout_id}: {len(trajectory.turns)} turns, sampled {ledger.captured}, "
            f"trainable {ledger.trained}{end} -> {file.with_suffix('.json')}",
            file=stream,
        )
    return len(found)
