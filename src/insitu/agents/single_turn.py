"""No agent: one prompt, one reply, and what stands in it is checked. For code tasks of one file.

The task's prompt goes through the gateway as one chat completion, as an agent's would; the code block of the
reply, or what the user's function makes of the reply, is laid over the task's files. There is no sandbox,
since nothing runs: the grader's is the first. Selected by harness.agent = "single_turn".
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

import aiohttp
import orjson

from insitu.agents.base import PLAIN, AgentResult, Left, ModelAccess, never
from insitu.agents.termination import within
from insitu.errors import HarnessError, TaskError
from insitu.tasks.user_functions import BadResult, UserFunction
from insitu.types import FileEntry, Setup, Task, Tree

BuildAction = Callable[[str, Task], Mapping[str, str | bytes]]
"""(reply, task) -> content by path, laid over the task's files. Raises ValueError for a reply that cannot be
used: the model's fault, the agent has failed and its tree is the task's own. Any other exception is a bug of
the function."""

VERSION = "1"
LOG_BYTES = 64 << 10
TRIES = 4
"""Of one call, where the gateway says that a later one may be answered."""
AGAIN = frozenset({429, 500, 502, 503, 504, 529})
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
"""What a code block for a file is called, by the file's ending."""
_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*")


class _Failed(Exception):
    """The attempt ends here, by the model's doing."""


class SingleTurn:
    """Implements insitu.agents.base.Harness."""

    name, version = "single_turn", VERSION

    def __init__(self, parse_answer: UserFunction | None = None) -> None:
        """`parse_answer`: the user's BuildAction; None = code_to_file."""
        self._build = parse_answer

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN) -> SingleTurnWorker:
        """Raises TaskError for a task whose files lie in an image: there is no sandbox to take them from."""
        if setup.image or setup.commands:
            raise TaskError(
                "single_turn has no sandbox: it takes tasks that are their files, without an image"
            )
        return SingleTurnWorker(gateway_socket, self._build)


class SingleTurnWorker:
    """Implements insitu.agents.base.Worker."""

    healthy = True

    def __init__(self, gateway_socket: Path, build: UserFunction | None) -> None:
        self.gateway_socket, self._build = gateway_socket, build

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """There is nothing to end."""

    async def run(self, task: Task, access: ModelAccess, left: Left = never) -> AgentResult:
        begun = time.monotonic()
        tree, said, exit_, detail = task.files, "", "finished", ""
        try:
            said = await within(self._ask(task, access), task.limits.wall_s, access.away_s)
            tree = {**task.files, **await self._files(said, task)}
        except TimeoutError:
            exit_, detail = "timeout", f"stopped after {task.limits.wall_s:g} s"
        except _Failed as failed:
            exit_, detail = "failed", str(failed)
        return AgentResult(
            exit=exit_,  # type: ignore[arg-type]
            tree=tree,
            detail=detail.replace(access.secret, "***").encode("utf-8", "backslashreplace").decode(),
            log=said.encode()[:LOG_BYTES].replace(access.secret.encode(), b"***"),
            duration_s=time.monotonic() - begun,
        )

    async def _ask(self, task: Task, access: ModelAccess) -> str:
        """The reply's text. Raises _Failed when the gateway refuses, HarnessError when there is none."""
        url = f"http://gateway/s/{access.public_id}/v1/chat/completions"
        body = {
            "model": access.model,
            "messages": [{"role": "user", "content": task.prompt}],
            "max_tokens": access.max_call_tokens,
        }
        head = {"Authorization": f"Bearer {access.secret}"}
        connector = aiohttp.UnixConnector(str(self.gateway_socket))
        try:
            # The rollout's own limit is the deadline.
            no_limit = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(connector=connector, headers=head, timeout=no_limit) as http:
                for tried in range(1, TRIES + 1):
                    async with http.post(url, json=body) as answer:
                        raw = await answer.read()
                    if answer.status == 200:
                        return _text(raw)
                    if answer.status not in AGAIN or tried == TRIES:
                        break
                    await asyncio.sleep(0.5 * 2**tried)
        except aiohttp.ClientError as error:
            raise HarnessError(f"the gateway is gone: {error or type(error).__name__}") from error
        raise _Failed(f"the model answered HTTP {answer.status}: {raw[:300].decode('utf-8', 'replace')}")

    async def _files(self, said: str, task: Task) -> Tree:
        """Raises _Failed for a reply that cannot be used, GradeError when the user's function is broken."""
        if self._build is None:
            made = files_of(code_to_file, said, task)
        else:
            made = await self._build.call(lambda build: files_of(build, said, task))
        if isinstance(made, str):
            raise _Failed(f"the reply cannot be used: {made}")
        return made


def files_of(build: BuildAction, said: str, task: Task) -> Tree | str:
    """The files that `build` makes of a reply, or why it makes none. Raises BadResult for other results."""
    try:
        made = build(said, task)
        if not isinstance(made, Mapping):
            raise BadResult(f"returned a {type(made).__name__}, not a dict of files")
        return {_path(path): FileEntry(content=_bytes(content)) for path, content in made.items()}
    except ValueError as error:
        return str(error) or type(error).__name__


def _text(raw: bytes) -> str:
    try:
        content = orjson.loads(raw)["choices"][0]["message"]["content"]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise _Failed(f"not an answer to a chat completion: {raw[:200]!a}") from error
    if not isinstance(content, str) or not content.strip():
        raise _Failed("the reply holds no text")
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
    """The file that a reply is meant for: the one under test, else the only Python file there is."""
    if task.grading.entry:
        return task.grading.entry
    python = [path for path in task.files if path.endswith(".py")]
    return python[0] if len(python) == 1 else DEFAULT_FILE


def code_to_file(reply: str, task: Task) -> Mapping[str, str]:
    """The default: the reply's code becomes the file under test."""
    path = target(task)
    code = code_of(reply, LANGUAGES.get(PurePosixPath(path).suffix, ()))
    if not code.strip():
        raise ValueError("its code block is empty")
    return {path: code}


def code_of(reply: str, languages: tuple[str, ...] = ()) -> str:
    """The last code block of one of `languages`, else the last one of any, else the whole reply: later blocks
    correct earlier ones. A block that is not closed goes to the end."""
    blocks = list(_blocks(reply))
    named = [code for language, code in blocks if language in languages]
    if named:
        return named[-1]
    return blocks[-1][1] if blocks else reply


def _blocks(reply: str) -> list[tuple[str, str]]:
    """(language, code) of every fenced block, in order."""
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
