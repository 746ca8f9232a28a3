"""Recipe: everything that is specific to one agent, as data.

    Recipe --install--> programs in the cache --bound at `root`--> sandbox
    Recipe + Start --> argv, environment, files and stdin of one process

The agents that ship with insitu are Recipes, and so is the `[harness]` table with a `command`. Texts may
contain placeholders: {prompt_file}, {prompt}, {address}, {api_key}, {model}, {context_tokens},
{compact_tokens}, {compact_percent}, {call_tokens}, {home}, {files}, {root} and {node}. Other text in braces
is left unchanged.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from insitu.agents.artifacts import AGENT_MEMORY_BYTES
from insitu.agents.base import AgentExit
from insitu.config import HarnessTable, load_config
from insitu.errors import ConfigError, boundary
from insitu.registry import BUILT_IN, find
from insitu.sandbox.base import ExecResult
from insitu.types import FileEntry, Tree

if TYPE_CHECKING:
    from insitu.agents.harness import Launch
    from insitu.agents.worker import SandboxTemplate, SandboxWorker

HOME = "/home/agent"
ROOT = "/opt/agent"
NODE_AT = "/opt/node/bin/node"
NODE_MINIMUM = (22, 19)

WireProtocol = Literal["chat", "responses", "anthropic", "gemini"]
_OPENAI_ENV = {
    "OPENAI_BASE_URL": "{address}/v1",
    "OPENAI_API_KEY": "{api_key}",
    "OPENAI_MODEL": "{model}",
}
SDK_ENV: Mapping[WireProtocol, Mapping[str, str]] = {
    "chat": _OPENAI_ENV,
    "responses": _OPENAI_ENV,
    "anthropic": {
        "ANTHROPIC_BASE_URL": "{address}",
        "ANTHROPIC_API_KEY": "{api_key}",
        "ANTHROPIC_MODEL": "{model}",
    },
    "gemini": {
        "GOOGLE_GEMINI_BASE_URL": "{address}",
        "GEMINI_API_KEY": "{api_key}",
        "GEMINI_MODEL": "{model}",
    },
}
"""Variables read by the vendor's SDK, by wire format."""
PROMPT_FILE = "prompt.txt"
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

Rule = Callable[[ExecResult], tuple[AgentExit, str]]
"""Maps the result of an agent that exited by itself to (exit, one line of detail)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Inputs of one start of an agent."""

    address: str
    """Base URL of all wire formats: http://127.0.0.1:{port}/s/{public_id}, without trailing slash."""
    api_key: str = field(repr=False)
    model: str
    prompt: str
    max_call_tokens: int
    context_tokens: int
    """Context window: prompt plus sampled tokens of one call, counted by the policy's tokenizer."""
    compact: bool | int = False
    """`harness.compact`."""
    home: str = HOME
    root: str = ROOT

    @property
    def compact_tokens(self) -> int:
        """Prompt length from which the agent should compact."""
        if self.compact > 1:
            return min(self.compact, self.context_tokens)
        # The next tool outputs and the summary itself must still fit into the context.
        return max(1, min(3 * self.context_tokens // 4, self.context_tokens - 2 * self.max_call_tokens))

    def values(self) -> dict[str, str]:
        """Return the placeholders' values by name."""
        return {
            "prompt_file": f"{self.home}/{PROMPT_FILE}",
            "prompt": self.prompt,
            "address": self.address,
            "api_key": self.api_key,
            "model": self.model,
            "context_tokens": str(self.context_tokens),
            "compact_tokens": str(self.compact_tokens),
            "compact_percent": str(100 * self.compact_tokens // self.context_tokens),
            "call_tokens": str(self.max_call_tokens),
            "home": self.home,
            "files": f"{self.home}/agent",
            "root": self.root,
            "node": NODE_AT,
        }

    def fill(self, template: str) -> str:
        """Replace the known placeholders of a text."""
        values = self.values()
        return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


_ANY = Start(address="", api_key="", model="", prompt="", max_call_tokens=1, context_tokens=1)
PLACEHOLDERS = tuple(_ANY.values())


def _exit_codes(*accepted: int) -> Rule:
    """Return a rule: these exit codes mean finished, others failed with the last line of the output."""

    def rule(result: ExecResult) -> tuple[AgentExit, str]:
        if result.exit_code in accepted:
            return "finished", ""
        output = (result.stderr.strip() or result.stdout.strip()).decode("utf-8", "replace")
        lines = _COLOURS.sub("", output).splitlines() or [""]
        return "failed", f"exit code {result.exit_code}: {lines[-1][:300]}"

    return rule


exit_code_rule = _exit_codes(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One agent: what to install and how to start it."""

    name: str
    command: Sequence[str]
    """Program and arguments. The program is one that `npm` or `pip` installs, a glob below the installed
    folder if it contains a slash, or a program of the sandbox. The prompt is written to stdin unless the
    arguments contain {prompt} or {prompt_file}."""
    protocol: WireProtocol = "chat"
    npm: Sequence[str] = ()
    """Packages of npm as `name@version`."""
    pip: Sequence[str] = ()
    """Packages of PyPI as `name==version`, for the sandbox's Python; not visible to other programs."""
    node: tuple[int, int] = NODE_MINIMUM
    """Minimum Node version; for an older one npm silently picks an older agent."""
    files: Tree = field(default_factory=dict, repr=False)
    """Files that are copied unchanged below {files}."""
    config_files: Mapping[str, str | Callable[[Start], str]] = field(default_factory=dict)
    """Text with placeholders, or a function that returns the text, by path below the home folder. The text
    of PROMPT_FILE is what the agent is asked."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the process. If nothing in it contains {api_key}, the variables of SDK_ENV are added."""
    rule: Rule = exit_code_rule
    """Interprets the exit of the process; not called after a timeout."""
    check: Sequence[str] = ()
    """Arguments with which the program exits with 0 and calls no model, to check that it starts in an
    image."""
    process_memory_bytes: int = AGENT_MEMORY_BYTES
    """Memory limit of one process of the sandbox."""
    root: str = ROOT
    """Path of the installed packages in the sandbox."""
    worker: Callable[[SandboxTemplate, Launch], SandboxWorker] | None = None
    """Creates workers that drive the agent otherwise than by one process per rollout."""
    without_pipes: Sequence[str] = ()
    """For a recipe with `worker`: the command of one process per rollout, for sandboxes in which no process
    with pipes can be started."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(f"agent {self.name}: command is empty")
        for text in (*self.npm, *self.pip):
            if not re.fullmatch(r"@?[^@=\s]+@[^@\s]+" if text in self.npm else r"[^=\s]+==[^=\s]+", text):
                form = "name@version" if text in self.npm else "name==version"
                raise ConfigError(f"agent {self.name}: {text!r} is not pinned as {form}")
        for text in (*self.command, *self.env.values()):
            for name in _PLACEHOLDER.findall(text):
                close = difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.8)
                if name not in PLACEHOLDERS and close:
                    raise ConfigError(
                        f"agent {self.name}: unknown placeholder {{{name}}}; did you mean {{{close[0]}}}?"
                    )
        if any("{api_key}" in word for word in self.command):
            # Every process of a machine can read the command lines of others.
            raise ConfigError(
                f"agent {self.name}: {{api_key}} belongs in env or config_files, not in command"
            )

    @property
    def version(self) -> str:
        """Version of the first package, else a digest of the files."""
        if self.npm or self.pip:
            return re.split("@|==", (*self.npm, *self.pip)[0])[-1]
        content = repr((tuple(self.command), sorted(self.files.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def compacts(self) -> bool:
        """Whether something of it may say where it compacts its context."""
        texts = (*self.command, *self.env.values(), *self.config_files.values())
        return any(not isinstance(text, str) or "{compact_" in text for text in texts)

    def at_version(self, version: str) -> Recipe:
        """Return the recipe with another version of its first package; "" = unchanged.

        Raises ConfigError.
        """
        if not version:
            return self
        if self.npm:
            return replace(self, npm=(self.npm[0].removesuffix(self.version) + version, *self.npm[1:]))
        if self.pip:
            return replace(self, pip=(self.pip[0].removesuffix(self.version) + version, *self.pip[1:]))
        raise ConfigError(f"agent {self.name} has no version to choose: it installs no package")

    def extended(self, table: HarnessTable) -> Recipe:
        """Return the recipe with the arguments, environment and files of [harness] over its own."""
        if not (table.command or table.env or table.config_files):
            return self
        files, more = dict(self.config_files), table.command[1:]
        for path, text in table.config_files.items():
            files[path] = self._over_own(path, text) if path in files else text
        without_pipes = (*self.without_pipes, *more) if self.without_pipes else ()
        keyed = any("{api_key}" in text for text in table.env.values()) and not self._has_key
        return replace(
            self,
            command=(*self.command, *more),
            without_pipes=without_pipes,
            env={**(SDK_ENV[self.protocol] if keyed else {}), **self.env, **table.env},
            config_files=files,
        )

    def _over_own(self, path: str, text: str) -> str | Callable[[Start], str]:
        """Return a file of the user's over that of the recipe; raise ConfigError if JSON would be lost."""
        own = self.config_files[path]
        if not _is_object(_filled(own, _ANY)):
            return text
        if not _is_object(_ANY.fill(text)):
            raise ConfigError(
                f"agent {self.name}: config_files.{path!r} is no JSON object, as the agent's own is"
            )
        return _merged(own, text)

    def asked(self, start: Start) -> str:
        """Return what the agent is asked, with the task in place of {prompt}."""
        return _filled(self.config_files.get(PROMPT_FILE, "{prompt}"), start)

    def environment(self, start: Start) -> dict[str, str]:
        templates = {**({} if self._has_key else SDK_ENV[self.protocol]), **self.env}
        return {name: start.fill(text) for name, text in templates.items()}

    def stdin(self, start: Start) -> bytes:
        return b"" if self._prompt_as_argument else start.prompt.encode()

    def home_files(self, start: Start) -> Iterator[tuple[str, bytes, bool]]:
        """Yield (path, content, executable) of every file to write before the start."""
        for path, entry in self.files.items():
            yield start.fill(f"{{files}}/{path}"), entry.content, entry.executable
        for path, text in self.config_files.items():
            if path == PROMPT_FILE:
                continue
            yield f"{start.home}/{path}", _filled(text, start).encode(), False
        if any("{prompt_file}" in text for text in (*self.command, *self.env.values())):
            yield start.fill("{prompt_file}"), start.prompt.encode(), False

    @property
    def _has_key(self) -> bool:
        return any("{api_key}" in text for text in self.env.values())

    @property
    def _prompt_as_argument(self) -> bool:
        return any("{prompt}" in word or "{prompt_file}" in word for word in self.command)


def _filled(text: str | Callable[[Start], str], start: Start) -> str:
    return start.fill(text) if isinstance(text, str) else text(start)


def _merged(below: str | Callable[[Start], str], text: str) -> Callable[[Start], str]:
    """Return a file of the user's merged into the recipe's: both are JSON objects."""

    def merge(start: Start) -> str:
        return json.dumps(_over(json.loads(_filled(below, start)), json.loads(start.fill(text))))

    return merge


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _over(under: object, own: object) -> object:
    if not (isinstance(under, dict) and isinstance(own, dict)):
        return own
    return {**under, **{key: _over(under.get(key), value) for key, value in own.items()}}


def read_files(paths: Iterable[Path]) -> dict[str, FileEntry]:
    """Return files by name, and the files of folders by folder name and path below it.

    Raises ConfigError.
    """
    found: dict[str, FileEntry] = {}
    for path in paths:
        with boundary(ConfigError, "files of the agent"):
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            for file in files:
                if file.is_dir() or "__pycache__" in file.parts:
                    continue
                executable = bool(file.stat().st_mode & 0o100)
                inside = str(file.relative_to(path.parent))
                found[inside] = FileEntry(content=file.read_bytes(), executable=executable)
    return found


def resolve_agent(agent: HarnessTable | Recipe) -> Recipe:
    """Return the recipe of the [harness] table, or of `agent` itself.

    Raises ConfigError.
    """
    if isinstance(agent, Recipe):
        return agent
    if agent.is_command:
        return _from_table(agent)
    return named_recipe(agent.agent).at_version(agent.version).extended(agent)


def named_recipe(name: str) -> Recipe:
    """Return a built-in recipe, or that of an entry point or path; a function is called for it.

    Raises ConfigError.
    """
    found = find("agents", name)
    if not isinstance(found, Recipe) and callable(found) and not isinstance(found, type):
        with boundary(ConfigError, f"agent {name}"):
            found = found()
    if not isinstance(found, Recipe):
        raise ConfigError(
            f"agent {name} is a {type(found).__name__}, not a Recipe or a function returning one"
        )
    return found


def parse_agent(text: str) -> Recipe:
    """Return the recipe of `NAME`, `NAME@VERSION`, `module:attribute` or a TOML file with a [harness] table.

    Raises ConfigError.
    """
    if text.endswith(".toml"):
        return resolve_agent(load_config(Path(text)).harness)
    name, _, version = text.partition("@")
    return named_recipe(name if ":" in name else name.replace("-", "_")).at_version(version)


def shipped_recipes() -> dict[str, Recipe]:
    """Return the built-in agents that are recipes, by name."""
    return {name: named_recipe(name) for name in BUILT_IN["agents"] if name != "single_turn"}


def _from_table(table: HarnessTable) -> Recipe:
    return Recipe(
        name=Path((*table.files, *table.command)[0]).stem,
        command=table.command,
        protocol=table.protocol,
        npm=table.npm,
        pip=table.pip,
        files=read_files(Path(path) for path in table.files),
        config_files=table.config_files,
        env=table.env,
        rule=_exit_codes(*table.ok_exit_codes),
    )
