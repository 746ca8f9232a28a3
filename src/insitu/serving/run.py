"""`insitu serve`: the gateway alone, for an agent that somebody runs by hand.

    engine (in a learner, or a server) <- gateway <-HTTP- any agent

Opens sessions, says how an agent gets there, says one line per model call, and at the end seals every session
and writes what was captured to the run directory. Never imports torch. Caller: cli.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from insitu.chat.load import load_renderer
from insitu.config import Config, model_folder
from insitu.errors import ConfigError
from insitu.gateway.admin import Admin
from insitu.gateway.host_tools import HostTool
from insitu.gateway.provider_session import Budgets, ProviderSession
from insitu.gateway.proxy import open_proxy
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.gateway.text_log import TextCall
from insitu.runtime.agents import limits_of
from insitu.runtime.gateway import gateway_config
from insitu.runtime.upstream import upstream_options
from insitu.serving.agent_setup import TASK, Access, names, setup
from insitu.serving.console import Console
from insitu.serving.host_calls import Reports
from insitu.serving.prompt_sizes import PromptFit
from insitu.serving.provider_mode import describe_call, describe_session, records_folder
from insitu.serving.session_export import SEAL_S, SESSIONS, Ledgers, expire, exported, finish
from insitu.storage.host_calls import HostCallLog
from insitu.storage.run_dir import RunDir, write_text
from insitu.storage.session_log import recover
from insitu.training.learner.sampler import open_sampler

ADMIN_SECRET = "INSITU_ADMIN_SECRET"
"""Environment variable with the operator's secret; without it one is made."""

BASE: Mapping[str, Any] = {
    "limits": {
        "wall_s": 86400.0,
        "max_calls": 10_000,
        "max_call_tokens": 512,
        "max_session_tokens": 10_000_000,
        "max_nodes": 20_000,
    },
}
"""Below the user's configuration: an agent by hand is no training rollout."""


LEGEND = (
    "A line per call: session #turn, format, prompt tokens (new ones), sampled tokens, how it goes on, end.",
    "  clean   continues what is held token by token (first: the session's first prompt)",
    "  edited  shows a reply other than it was sampled: rendered as shown, another branch",
    "  fork    begins another branch (new_root: other system prompt or tools; rewind; context: compacted)",
    '  auxiliary tokens are of titles, summaries and the like: gateway.auxiliary = "train" keeps them',
)
"""What the words in the lines of calls mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line adds to the configuration."""

    sessions: int = 1
    agents: Sequence[str] = ()
    """Agents whose set-up is printed; empty = those of all are written to files."""
    admin: bool = False
    json: bool = False
    tools: Sequence[HostTool] = ()
    """Host tools of every session."""


async def serve(config: Config, options: ServeOptions, stream: TextIO) -> None:
    """Until cancelled. Raises InsituError when it cannot begin."""
    voice = Console(stream, json=options.json)
    for agent in options.agents:
        setup(agent, _nowhere())
    if config.engine.kind == "upstream":
        await _serve_upstream(config, options, voice)
        return
    options = replace(options, tools=options.tools or gateway_config(config).tools)
    renderer = load_renderer(model_folder(config), config.model.renderer)
    with RunDir.create(config) as run:
        async with AsyncExitStack() as stack:
            log = run.logs / "learner.log"
            sampler = await stack.enter_async_context(open_sampler(config, renderer, log, voice.wait))
            folder = run.path / SESSIONS
            folder.mkdir(exist_ok=True)
            served = gateway_config(config, folder)
            reports = Reports(HostCallLog(run.host_calls), voice.say)
            gateway = await stack.enter_async_context(
                Gateway(sampler.engine, renderer, served, voice.call, voice.note, reports.heard)
            )
            listener = await stack.enter_async_context(gateway.listen_tcp(port=config.gateway.port))
            sessions = [_open(gateway, config, options, number) for number in range(options.sessions)]
            context = min(config.model.max_context_tokens, sampler.engine.info.max_context_tokens)
            fit = PromptFit(model_folder(config), context)
            _greet(voice, run, config, options, listener.origin, sessions, fit)
            admin = await _admin(stack, voice, gateway, config, sessions) if options.admin else None
            ledgers: Ledgers = {}
            try:
                await expire(voice, folder, sessions, gateway, admin, ledgers)
            finally:
                await finish(voice, run, sessions, gateway, admin, ledgers)
                if reports.trouble is not None:
                    raise reports.trouble


async def _serve_upstream(config: Config, options: ServeOptions, voice: Console) -> None:
    """A provider answers; nothing is sampled here. Raises InsituError when it cannot begin."""
    if options.admin:
        raise ConfigError("engine.kind upstream has no tokens to export: there is no admin listener")
    if options.tools:
        raise ConfigError("engine.kind upstream passes bodies on as they are: there are no host tools")

    def on_call(rollout_id: str, call: TextCall) -> None:
        told, line = describe_call(rollout_id, call)
        voice.say("call", told, [line])

    with RunDir.create(config) as run:
        folder = records_folder(run.path)
        async with (
            open_proxy(upstream_options(config), folder, on_call=on_call) as through,
            through.listen_tcp(port=config.gateway.port) as listener,
        ):
            sessions = [
                through.open_session(f"serve-{number}", budgets=Budgets(max_calls=config.limits.max_calls))
                for number in range(options.sessions)
            ]
            _greet(voice, run, config, options, listener.origin, sessions)
            try:
                await asyncio.Event().wait()
            finally:
                await _finish_upstream(voice, run, sessions)


async def _finish_upstream(voice: Console, run: RunDir, sessions: Sequence[ProviderSession]) -> None:
    used: dict[str, Any] = {}
    await asyncio.gather(*(session.seal(SEAL_S) for session in sessions if not session.closed))
    for session in sessions:
        told, line = describe_session(session)
        used[session.rollout_id] = told
        voice.say("sealed", told, [line])
    run.write_summary({"kind": "serve", "sessions": used})
    voice.say("end", {"run_dir": str(run.path), "sessions": used}, [f"written to {run.path}"])


def _nowhere() -> Access:
    return Access(address="", secret="", model="", max_call_tokens=1, context_tokens=3, home="")


def _open(gateway: Gateway, config: Config, options: ServeOptions, number: int) -> Session:
    return gateway.open_session(
        f"serve-{number}",
        seed=config.run.seed,
        limits=limits_of(config),
        temperature=config.engine.temperature,
        tools=options.tools,
    )


def _greet(
    voice: Console,
    run: RunDir,
    config: Config,
    options: ServeOptions,
    origin: str,
    sessions: Sequence[Session] | Sequence[ProviderSession],
    fit: PromptFit | None = None,
) -> None:
    """`fit`: None where nobody knows the model's context."""
    agents = options.agents or names()
    if fit is not None and (line := fit.summary(agents)):
        voice.note(line)
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
        ways = [replace(setup(agent, access), note=notes[agent]) for agent in agents]
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
            lines += ["", *(line for way in ways for line in [*way.lines(), ""])]
        else:
            lines += _written_setups(run.path / "agents" / session.rollout_id, access, notes)
        told = {
            "rollout_id": session.rollout_id,
            "address": address,
            "secret": session.secret,
            "tool_secret": session.tool_secret,
            "agents": {way.agent: asdict(way) for way in ways},
        }
        voice.say("session", told, lines)
    told_ready = {"origin": origin, "run_dir": str(run.path)}
    voice.say("ready", told_ready, [*(LEGEND if fit is not None else ()), "Serving; Ctrl-C seals and ends."])


def _written_setups(folder: Path, access: Access, notes: Mapping[str, str]) -> list[str]:
    """Write each agent's set-up as a script, and say where; those that cannot work are left out."""
    folder.mkdir(parents=True)
    fitting = [agent for agent, note in notes.items() if not note]
    for agent in fitting:
        write_text(folder / f"{agent}.sh", setup(agent, access, TASK).script(), private=True)
    left = [agent for agent, note in notes.items() if note]
    lines = [f"  agents     sh {folder}/NAME.sh 'your task'   NAME: {', '.join(fitting)}"] if fitting else []
    if left:
        lines.append(f"  too long   the first prompts of {', '.join(left)} (--agent NAME prints a set-up)")
    return lines


async def _admin(
    stack: AsyncExitStack, voice: Console, gateway: Gateway, config: Config, sessions: list[Session]
) -> Admin:
    """The operator's listener, on a free port."""
    admin = Admin(gateway, secret=os.environ.get(ADMIN_SECRET), limits=limits_of(config))
    for session in sessions:
        admin.adopt(session)
    listener = await stack.enter_async_context(admin.listen_tcp())
    told = {"origin": listener.origin, "secret": admin.secret}
    voice.say("admin", told, [f"admin: {listener.origin}, key: {admin.secret}"])
    return admin


def recover_run(path: Path, stream: TextIO) -> int:
    """Export every session whose log is left because `insitu serve` was killed; returns how many there were.
    The logs stay. Raises RecordError."""
    found = sorted((path / SESSIONS).glob("*.log"))
    for file in found:
        session = recover(file)
        trajectory = session.forest.trajectory()
        # The log keeps no temperature, and sessions that the operator opened may have one of their own.
        write_text(file.with_suffix(".json"), exported(trajectory, None), private=True)
        ledger = trajectory.ledger
        end = ", torn at its end" if session.torn else ""
        print(
            f"{session.rollout_id}: {len(trajectory.turns)} turns, sampled {ledger.captured}, "
            f"trainable {ledger.trained}{end} -> {file.with_suffix('.json')}",
            file=stream,
        )
    return len(found)
