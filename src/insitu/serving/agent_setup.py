"""Environment, files and command to connect an agent to a served session, from the agent's recipe."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

import orjson

from insitu.agents.pi import PI_TOOLS
from insitu.agents.recipe import Recipe, Start, named_recipe, shipped_recipes
from insitu.errors import ConfigError

TASK = "INSITU_TASK"
"""Placeholder for the task in a setup script."""

PI_PROVIDER = "insitu"
PI_RESERVE = 16384
"""Tokens that Pi reserves for a summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Address, credentials and limits of a session."""

    address: str
    """http://host:port/s/{public_id}."""
    secret: str
    model: str
    max_call_tokens: int
    context_tokens: int
    home: str
    """Home folder of the agent, separate from the user's so that own settings are neither used nor
    changed."""
    tools_url: str = ""
    """http://host:port/tools/{public_id}; empty when the session has no host tools."""
    tool_secret: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentInstructions:
    """Configuration of one agent for a session."""

    agent: str
    env: Mapping[str, str]
    files: Mapping[str, str]
    """Text by path."""
    home: str
    command: tuple[str, ...]
    note: str = ""
    """Why the agent will not work; empty when it may."""

    def lines(self) -> list[str]:
        """Return shell commands."""
        folders = sorted({self.home, *(path.rpartition("/")[0] for path in self.files)})
        lines = [f"# {self.agent}" + (f": will not work, {self.note}" if self.note else "")]
        lines += [f"mkdir -p {shlex.join(folders)}"]
        for path, text in self.files.items():
            lines += [f"cat > {shlex.quote(path)} <<'END'", *text.rstrip("\n").split("\n"), "END"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return [*lines, f"HOME={shlex.quote(self.home)} {shlex.join(self.command)}"]

    def script(self) -> str:
        """Return a program for `sh` that takes the task; the setup's prompt must be `TASK`."""
        return "\n".join(["set -eu", *self.lines()]).replace(TASK, '"${1:?usage: sh FILE TASK}"') + "\n"


def agent_names() -> list[str]:
    """Return the agents that users install themselves."""
    return [name for name, recipe in shipped_recipes().items() if recipe.npm or recipe.pip]


def setup(agent: str, access: Access, prompt: str = "your task") -> AgentInstructions:
    """Return the configuration of an agent for a session.

    Raises ConfigError for an unknown agent.
    """
    if agent == "pi":
        return _pi(access, prompt)
    if agent not in agent_names():
        raise ConfigError(f"no agent {agent!r}; there are: {', '.join(agent_names())}")
    return _from_recipe(named_recipe(agent), access, prompt)


def _from_recipe(recipe: Recipe, access: Access, prompt: str) -> AgentInstructions:
    start = Start(
        address=access.address,
        api_key=access.secret,
        model=access.model,
        prompt=prompt,
        max_call_tokens=access.max_call_tokens,
        context_tokens=access.context_tokens,
        home=access.home,
    )
    program = PurePath(recipe.command[0]).name
    arguments = [start.fill(word) for word in recipe.command[1:]]
    if recipe.stdin(start) and "-" not in arguments:
        arguments.append(prompt)
    arguments = [prompt if argument == "-" else argument for argument in arguments]
    return AgentInstructions(
        agent=recipe.name,
        env=recipe.environment(start),
        files={path: _readable(raw) for path, raw, _ in recipe.home_files(start)},
        home=access.home,
        command=(program, *arguments),
    )


def _pi(access: Access, prompt: str) -> AgentInstructions:
    model = {
        "id": access.model,
        # Pi compacts when fewer than PI_RESERVE tokens remain, by its own estimate.
        "contextWindow": max(1, access.context_tokens - 2 * access.max_call_tokens) + PI_RESERVE,
        "maxTokens": access.max_call_tokens,
    }
    provider = {
        "baseUrl": f"{access.address}/v1",
        "api": "openai-completions",
        "apiKey": "$INSITU_API_KEY",
        "models": [model],
    }
    config = orjson.dumps({"providers": {PI_PROVIDER: provider}})
    env = {"INSITU_API_KEY": access.secret}
    flags = ["--print", "--provider", PI_PROVIDER, "--model", access.model]
    if access.tools_url:
        env |= {"INSITU_TOOLS_URL": access.tools_url, "INSITU_TOOLS_KEY": access.tool_secret}
        flags += ["--extension", str(PI_TOOLS)]
    return AgentInstructions(
        agent="pi",
        env=env,
        files={f"{access.home}/.pi/agent/models.json": _readable(config)},
        home=access.home,
        command=("pi", *flags, prompt),
    )


def _readable(raw: bytes) -> str:
    """Return JSON indented, any other text unchanged."""
    try:
        return orjson.dumps(orjson.loads(raw), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return raw.decode()
