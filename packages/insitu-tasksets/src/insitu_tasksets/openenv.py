"""Format and reward `openenv`: the tasks of an OpenEnv server, scored by the rewards of its steps.

`tasks.path` is the URL of a server with the Task API, `docker://IMAGE`, or a TOML file with `url` or `image`
(openenv_images.py) and either `split` or `resets`, the arguments of `reset` of each task. The prompt has the
first observation and the schema of an action. The answer is one action or a list of them; the reward is the
sum over the steps. The server makes it where the action runs, so it is weak.

Of an environment of MCP tools each attempt has its own session: the tools are offered to the model beside
the agent's, each call is a step, and the model reads the observation. With `tool` in the TOML file any other
environment has one tool of that name, which takes an action.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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
from insitu_tasksets.openenv_images import close_all, gauges, image_of, pool_of

_TIMEOUT_S = 60.0
_MCP = ("Action", "CallToolAction", "ListToolsAction")
_LIST_TOOLS = {"type": "list_tools"}
_OVER = "The episode is over: no further step is taken."
_INVALID = "VALIDATION_ERROR"
_IMAGE = "docker://"
_OF_TASKS = ("url", "split", "resets", "prompt", "tool")
"""Keys of a task file that are not about its image."""


class OpenEnv:
    """Format `openenv`."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        keys = dict(named_or_file(str(path), "url", "image"))
        name = str(keys.get("url", "")).rstrip("/")
        if name.startswith(_IMAGE):
            keys["image"] = name.removeprefix(_IMAGE)
        server: dict[str, Any] = {}
        if "image" in keys:
            name = f"{_IMAGE}{keys['image']}"
            server = {"server": image_of({k: v for k, v in keys.items() if k not in _OF_TASKS}, path)}
        with contextlib.ExitStack() as stack:
            url = stack.enter_context(pool_of(server["server"]).blocking()).url if server else name
            client = stack.enter_context(_client(url).sync())
            for number, (reset, seen) in enumerate(_seen(client, url, keys), 1):
                row = {"id": _name(reset, number), "url": name, **server, "reset": reset, **seen}
                if "prompt" in keys:
                    row["prompt"] = f"{keys['prompt']}\n\n{_shown(row)}"
                yield location(row, number)

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        prompt = row.get("prompt") or _shown(row)
        return answer_task(str(row["id"]), prompt, UNTESTED, options)


def _seen(client: Any, url: str, keys: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the reset of each task with its observation, and its tools or the schema of an action."""
    schema, tool = _action_schema(url), keys.get("tool", "")
    by_tools = schema.get("title") in _MCP
    for reset in keys.get("resets") or _task_resets(url, keys.get("split", "train")):
        with user_code(TaskError, f"{url}: reset {reset}"):
            row = {"observation": client.reset(**reset).observation}
            tools = client.step(_LIST_TOOLS).observation["tools"] if by_tools else []
        if tool and not by_tools:
            tools, row["tool"] = [_tool_of(str(tool), schema)], tool
        _check(tools)
        yield reset, row | ({"tools": tools} if tools or by_tools else {"action_schema": schema})


def _tool_of(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool that takes a step of an environment without tools."""
    fields = {key: kind for key, kind in schema.get("properties", {}).items() if key != "metadata"}
    what = schema.get("description") or "Take a step in the environment."
    return {
        "name": name,
        "description": what,
        "input_schema": {"type": "object", **schema, "properties": fields},
    }


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


class _Session:
    """Session of an environment that acts by tools; implements `insitu.grading.reward.ToolEnvironment`."""

    def __init__(self, client: Any, row: Mapping[str, Any], failed: Callable[[object], None]) -> None:
        self._client, self._rewards, self._steps = client, list[float](), 0
        self._done, self._failed = False, failed
        self._by_action = "tool" in row
        self.tools = [
            ToolSpec(**{**one, "parameters": json.dumps(one["parameters"])}) for one in _named(row["tools"])
        ]

    @property
    def earned(self) -> float | None:
        return None if self._steps and not self._rewards else sum(self._rewards)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Take a step; return its observation."""
        if self._done:
            return _OVER
        action = dict(arguments)
        if not self._by_action:
            action = {"type": "call_tool", "tool_name": name, "arguments": action}
        try:
            step = await self._client.step(action)
        except Exception as error:
            if _INVALID in str(error):  # not an action: the model's fault
                return f"Error: {error}"
            self._failed(error)
            raise
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
async def _server(row: Mapping[str, Any]) -> AsyncIterator[tuple[str, Callable[[object], None]]]:
    """Hold the server of a row; yield its URL and what counts a failure against its container."""
    if "server" not in row:
        yield row["url"], lambda _: None
        return
    pool = await asyncio.to_thread(pool_of, row["server"])
    async with pool.session() as lease:
        yield lease.url, lease.failed


@asynccontextmanager
async def _session(row: Mapping[str, Any]) -> AsyncIterator[_Session]:
    """Open a session of the row's environment of tools. Raises GradeError."""
    async with _server(row) as (url, failed):
        with user_code(GradeError, f"reset {row['url']}"):
            client = _client(url)
            try:
                await client.connect()
                await client.reset(**row["reset"])
            except BaseException as error:
                failed(error)
                await client.close()
                raise
        try:
            yield _Session(client, row, failed)
        finally:
            await client.close()


def _environment(row: Mapping[str, Any]) -> AbstractAsyncContextManager[_Session] | None:
    """Return the session that an agent acts on; None where the answer is the action."""
    return _session(row) if "tools" in row else None


async def reward(rollout: FinishedRollout) -> float | Mapping[str, float] | None:
    """Return the sum of the rewards of the steps; None if the server gave none."""
    row = rollout.row
    if "tools" in row:
        return None if rollout.earned is None else {EARNED: rollout.earned}
    async with _server(row) as (url, failed):
        try:
            return await _played(url, row, answer_of(rollout))
        except Exception as error:
            failed(error)
            raise


async def _played(url: str, row: Mapping[str, Any], answer: str) -> float | None:
    """Return the sum of the rewards of an answer's actions; None if there was none."""
    rewards = list[float | None]()
    async with _client(url) as client:
        await client.reset(**row["reset"])
        for action in _actions(answer, row["action_schema"]):
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
reward.gauges = gauges  # type: ignore[attr-defined]
reward.close = close_all  # type: ignore[attr-defined]


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
    with boundary(TaskError, f"read {url}"):
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            error.close()
            raise
