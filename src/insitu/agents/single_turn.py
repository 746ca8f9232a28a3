"""Single-turn harness without an agent: one prompt, one reply, for code tasks of one file.

The task's prompt is sent through the gateway as one chat completion. The code block of the reply, or the
files that the user's function returns for the reply, are written over the task's files. There is no agent
sandbox. Selected by harness.agent = "single_turn".
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Self

import aiohttp
import orjson

from insitu.agents.base import PLAIN, AgentResult, FinishedCheck, ModelAccess, never_finished
from insitu.agents.termination import within
from insitu.backoff import backoff_s
from insitu.errors import HarnessError, TaskError
from insitu.tasks.user_functions import BadResult, UserFunction
from insitu.types import FileEntry, Setup, Task, Tree

BuildAction = Callable[[str, Task], Mapping[str, str | bytes]]
"""(reply, task) -> content by path, written over the task's files. A ValueError means an unusable reply: the
attempt has failed with unchanged files. Any other exception is a bug of the function."""

VERSION = "1"
LOG_BYTES = 64 << 10
MAX_ATTEMPTS = 4
"""Maximum number of requests of one call when the status is retryable."""
RETRY_STATUSES = frozenset({429, 500, 502, 503, 504, 529})
DEFAULT_FILE = "solution.py"
LANGUAGES: Mapping[str, tuple[str, ...]] = {
    ".py": ("python", "py", "python3"),
    ".jl": ("julia", "jl"),
    ".js": ("javascript", "js"),
    ".ts": ("typescript", "ts"),
    ".rs": ("rust", "rs"),
    ".go": ("go", "golang"),
    ".sh": ("bash", "sh", "shell"),
}
"""Language tags of code blocks by file extension."""
_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*")


class _Failed(Exception):
    """The attempt failed because of the model."""


class SingleTurn:
    """Harness without an agent program."""

    name, version = "single_turn", VERSION

    def __init__(self, parse_answer: UserFunction | None = None) -> None:
        """Set up the harness; `parse_answer` is the user's BuildAction, None = `code_to_file`."""
        self._build = parse_answer

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN, gateway_url: str = "") -> _SingleTurnWorker:
        """Return a worker.

        Raises TaskError for tasks with an image or setup commands, since there is no sandbox.
        """
        if setup.image or setup.commands:
            raise TaskError("single_turn has no sandbox: it needs tasks without an image and setup commands")
        return _SingleTurnWorker(gateway_socket, self._build)


class _SingleTurnWorker:
    """Worker that sends one request."""

    healthy = True

    def __init__(self, gateway_socket: Path, build: UserFunction | None) -> None:
        self.gateway_socket, self._build = gateway_socket, build

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: there are no resources."""

    async def run(
        self,
        task: Task,
        access: ModelAccess,
        finished: FinishedCheck = never_finished,
        live: object = None,
        graded: object = None,
    ) -> AgentResult:
        started = time.monotonic()
        tree, reply, exit_, detail = task.files, "", "finished", ""
        try:
            reply = await within(self._request(task, access), task.limits.wall_s, access.clock)
            tree = {**task.files, **await self._files(reply, task)}
        except TimeoutError:
            exit_, detail = "timeout", f"stopped after {task.limits.wall_s:g} s"
        except _Failed as failed:
            exit_, detail = "failed", str(failed)
        return AgentResult(
            exit=exit_,  # type: ignore[arg-type]
            tree=tree,
            detail=detail.replace(access.secret, "***").encode("utf-8", "backslashreplace").decode(),
            log=reply.encode()[:LOG_BYTES].replace(access.secret.encode(), b"***"),
            duration_s=time.monotonic() - started,
        )

    async def _request(self, task: Task, access: ModelAccess) -> str:
        """Return the reply's text.

        Raises _Failed for an HTTP error, HarnessError when the gateway cannot be reached.
        """
        url = f"http://gateway/s/{access.public_id}/v1/chat/completions"
        body = {
            "model": access.model,
            "messages": [{"role": "user", "content": task.prompt}],
            "max_tokens": access.max_call_tokens,
        }
        head = {"Authorization": f"Bearer {access.secret}"}
        connector = aiohttp.UnixConnector(str(self.gateway_socket))
        try:
            # The caller enforces the timeout.
            no_limit = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(connector=connector, headers=head, timeout=no_limit) as http:
                for attempt in range(1, MAX_ATTEMPTS + 1):
                    async with http.post(url, json=body) as answer:
                        raw = await answer.read()
                    if answer.status == 200:
                        return _text(raw)
                    if answer.status not in RETRY_STATUSES or attempt == MAX_ATTEMPTS:
                        break
                    await asyncio.sleep(backoff_s(attempt, 1.0))
        except aiohttp.ClientError as error:
            raise HarnessError(f"the gateway cannot be reached: {error or type(error).__name__}") from error
        raise _Failed(f"the model answered HTTP {answer.status}: {raw[:300].decode('utf-8', 'replace')}")

    async def _files(self, reply: str, task: Task) -> Tree:
        """Return the files built from a reply.

        Raises _Failed for an unusable reply, GradeError when the user's function is broken.
        """
        if self._build is None:
            files = _build_files(code_to_file, reply, task)
        else:
            files = await self._build.call(lambda build: _build_files(build, reply, task))
        if isinstance(files, str):
            raise _Failed(f"the reply cannot be used: {files}")
        return files


def _build_files(build: BuildAction, reply: str, task: Task) -> Tree | str:
    """Return the files that `build` makes of a reply, or why the reply is unusable.

    Raises BadResult for invalid return values.
    """
    try:
        files = build(reply, task)
        if not isinstance(files, Mapping):
            raise BadResult(f"returned a {type(files).__name__}, not a dict of files")
        return {_path(path): FileEntry(content=_bytes(content)) for path, content in files.items()}
    except ValueError as error:
        return str(error) or type(error).__name__


def _text(raw: bytes) -> str:
    try:
        reply = orjson.loads(raw)
        content = reply["choices"][0]["message"]["content"]
        sampled = reply["usage"]["completion_tokens"] if reply.get("usage") else None
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise _Failed(f"not a chat completion response: {raw[:200]!a}") from error
    if sampled == 0:  # the gateway's own reply, which is not an answer to the task
        raise _Failed("the session's budget was used up before the model answered")
    if not isinstance(content, str) or not content.strip():
        raise _Failed("the reply contains no text")
    return content


def _bytes(content: str | bytes) -> bytes:
    if not isinstance(content, str | bytes):
        raise BadResult(f"returned content of type {type(content).__name__}, not str or bytes")
    return content.encode() if isinstance(content, str) else content


def _path(path: str) -> str:
    if not isinstance(path, str):
        raise BadResult(f"returned a path of type {type(path).__name__}, not str")
    return path


def target(task: Task) -> str:
    """Return the file that a reply replaces: the one under test, else the only Python file."""
    if task.grading.entry:
        return task.grading.entry
    python = [path for path in task.files if path.endswith(".py")]
    return python[0] if len(python) == 1 else DEFAULT_FILE


def code_to_file(reply: str, task: Task) -> Mapping[str, str]:
    """Return the reply's code, for a .txt file the reply, as the file under test; the default BuildAction."""
    path = target(task)
    if path.endswith(".txt"):
        return {path: reply}
    code = code_of(reply, LANGUAGES.get(PurePosixPath(path).suffix, ()))
    if not code.strip():
        raise ValueError("its code block is empty")
    return {path: code}


def code_of(reply: str, languages: tuple[str, ...] = ()) -> str:
    """Return the last code block of one of `languages`, else the last of any language, else the whole reply.

    An unclosed block extends to the end.
    """
    # The last block is used because later blocks correct earlier ones.
    return next(reversed(code_blocks(reply, languages)), reply)


def code_blocks(reply: str, languages: tuple[str, ...] = ()) -> Sequence[str]:
    """Return the code blocks of one of `languages` in order, all blocks where there is none of these."""
    blocks = list(_blocks(reply))
    return [code for language, code in blocks if language in languages] or [code for _, code in blocks]


def _blocks(reply: str) -> list[tuple[str, str]]:
    """Return (language, code) of every fenced block, in order."""
    found: list[tuple[str, list[str]]] = []
    fence = ""
    for line in reply.splitlines(keepends=True):
        match = _FENCE.fullmatch(line.rstrip())
        if fence:
            if match and match[1].startswith(fence) and not match[2]:
                fence = ""
            else:
                found[-1][1].append(line)
        elif match:
            fence = match[1]
            found.append((match[2].lower(), []))
    return [(language, "".join(lines)) for language, lines in found]
