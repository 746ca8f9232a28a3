"""Format and reward `openenv`: the tasks of an OpenEnv server, scored by the rewards of its steps.

`tasks.path` is the URL of a server with the Task API, or a TOML file with `url` and either `split` or
`resets`, the arguments of `reset` of each task. The prompt has the first observation and the schema of an
action. The answer is one action or a list of them; the reward is the sum over the steps. The server makes it
where the action runs, so it is weak.

Of an environment of MCP tools each attempt has its own session: the tools are offered to the model beside
the agent's, each call is a step, and the model reads the observation.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from insitu.errors import ConfigError, GradeError, TaskError, boundary, user_code
from insitu.gateway.host_tools import HostTool, ToolBox
from insitu.grading.reward import EARNED
from insitu.install_hints import install_package
from insitu.tasks.base import UNTESTED, Item
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.objects import location
from insitu.tasks.row_files import RawRow, RowLocation
from insitu.types import FinishedRollout, ToolSpec
from insitu_tasksets.answers import answer_of, answer_task, named_or_file

_TIMEOUT_S = 60.0
_MCP = ("Action", "CallToolAction", "ListToolsAction")
_LIST_TOOLS = {"type": "list_tools"}
_OVER = "The episode is over: no further step is taken."
_INVALID = "VALIDATION_ERROR"


class OpenEnv:
    """Format `openenv`."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        keys = named_or_file(str(path), "url")
        url = str(keys["url"]).rstrip("/")
        resets = keys.get("resets") or _task_resets(url, keys.get("split", "train"))
        schema = _action_schema(url)
        by_tools = schema.get("title") in _MCP
        with _client(url).sync() as client:
            for number, reset in enumerate(resets, 1):
                with user_code(TaskError, f"{url}: reset {reset}"):
                    seen = client.reset(**reset).observation
                    tools = client.step(_LIST_TOOLS).observation["tools"] if by_tools else []
                    _check(tools)
                row = {"url": url, "reset": reset, "observation": seen}
                row |= {"tools": tools} if by_tools else {"action_schema": schema}
                row = {"id": _name(reset, number), **row}
                if "prompt" in keys:
                    row["prompt"] = f"{keys['prompt']}\n\n{_shown(row)}"
                yield location(row, number)

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        prompt = row.get("prompt") or _shown(row)
        return answer_task(str(row["id"]), prompt, UNTESTED, options)


def _shown(row: RawRow) -> str:
    # The id sets apart tasks that look the same, as those of a game do.
    shown = {name: row[name] for name in ("id", "observation", "action_schema") if name in row}
    return json.dumps(shown, ensure_ascii=False)


def _named(tools: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return name, description and parameters of the tools that a server lists."""
    for tool in tools:
        schema = tool.get("input_schema") or {"type": "object"}
        yield {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}


def _check(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise TaskError for tools that cannot be offered to a model."""
    try:
        ToolBox([HostTool(**one) for one in _named(tools)])
    except ConfigError as error:
        raise TaskError(str(error)) from error


class _McpSession:
    """Session of an environment of MCP tools; implements `insitu.grading.reward.ToolEnvironment`."""

    def __init__(self, client: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        self._client, self._rewards, self._steps = client, list[float](), 0
        self._done = False
        self.tools = [
            ToolSpec(**{**one, "parameters": json.dumps(one["parameters"])}) for one in _named(tools)
        ]

    @property
    def earned(self) -> float | None:
        return None if self._steps and not self._rewards else sum(self._rewards)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Take a step; return its observation."""
        if self._done:
            return _OVER
        action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        step = await self._client.step(action)
        self._steps += 1
        self._done = bool(step.done)
        if step.reward is not None:
            self._rewards.append(float(step.reward))
        return _text(step.observation) + (f"\n{_OVER}" if self._done else "")


def _text(observation: Mapping[str, Any]) -> str:
    """Return what the model reads of a tool's observation: its text, its error, else all of it."""
    if error := observation.get("error"):
        return f"Error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = observation.get("result")
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list) and content:
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "\n".join(map(str, parts))
    found = result if result is not None else observation
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


@asynccontextmanager
async def _session(row: Mapping[str, Any]) -> AsyncIterator[_McpSession]:
    """Open a session of the row's environment of tools. Raises GradeError."""
    with user_code(GradeError, f"reset {row['url']}"):
        client = _client(row["url"])
        await client.connect()
        try:
            await client.reset(**row["reset"])
        except BaseException:
            await client.close()
            raise
    try:
        yield _McpSession(client, row["tools"])
    finally:
        await client.close()


def _environment(row: Mapping[str, Any]) -> AbstractAsyncContextManager[_McpSession] | None:
    """Return the session that an agent acts on; None where the answer is the action."""
    return _session(row) if "tools" in row else None


async def reward(rollout: FinishedRollout) -> float | Mapping[str, float] | None:
    """Return the sum of the rewards of the steps; None if the server gave none."""
    row, rewards = rollout.row, list[float | None]()
    if "tools" in row:
        return None if rollout.earned is None else {EARNED: rollout.earned}
    async with _client(row["url"]) as client:
        await client.reset(**row["reset"])
        for action in _actions(answer_of(rollout), row["action_schema"]):
            try:
                result = await client.step(action)
            except RuntimeError as error:
                if _INVALID not in str(error):
                    raise
                break  # not an action: the model's fault
            rewards.append(result.reward)
            if result.done:
                break
    given = [one for one in rewards if one is not None]
    return None if rewards and not given else sum(given)


reward.environment = _environment  # type: ignore[attr-defined]


def _client(url: str) -> Any:
    try:
        return import_module("openenv").GenericEnvClient(base_url=url)
    except ImportError as error:
        raise ConfigError(f"openenv is not installed: {install_package('openenv')}") from error
    except AttributeError as error:
        raise ConfigError(f"openenv: {error}; openenv 0.10 has it") from error


def _actions(answer: str, schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the actions of an answer: JSON, or the value of the one field that an action needs."""
    if answer.startswith("```") and answer.endswith("```"):
        answer = "\n".join(answer.splitlines()[1:-1]).strip()
    try:
        found = json.loads(answer)
    except ValueError:
        found = answer
    if isinstance(found, dict):
        return [found]
    if isinstance(found, list) and found and all(isinstance(one, dict) for one in found):
        return found
    required = schema.get("required", [])
    return [{required[0]: found}] if answer and len(required) == 1 else []


def _name(reset: Mapping[str, Any], number: int) -> str:
    return f"{reset['split']}-{reset['index']}" if {"split", "index"} <= set(reset) else f"reset-{number}"


def _task_resets(url: str, split: str) -> list[dict[str, Any]]:
    """Return the arguments of `reset` of all tasks of a split, by the server's Task API."""
    try:
        [name] = _http(f"{url}/list_environments")
        splits = [one["name"] for one in _http(f"{url}/{name}/splits")]
        count = 0
        if split in splits:
            count = _http(f"{url}/{name}/num_tasks", {"split": split})["num_tasks"]
    except TaskError as error:
        raise TaskError(
            f"{error}; a server without the Task API needs a TOML file with url and resets"
        ) from None
    if not count:
        raise TaskError(
            f"{url} has no task in split {split!r}, of {', '.join(splits)}: set split in a TOML file"
        )
    return [{"split": split, "index": index} for index in range(count)]


@lru_cache(maxsize=4)
def _action_schema(url: str) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = _http(f"{url}/schema")["action"]
    return schema


def _http(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON that a server answers; raise TaskError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with boundary(TaskError, f"read {url}"), urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        return json.load(reply)
