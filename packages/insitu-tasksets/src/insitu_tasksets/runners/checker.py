"""The user's checker of runner `stdio`, called in processes of its own: (stdin, expected, printed) -> bool.

The printed text is the candidate's, and may make a checker raise, hang or return nothing. A call that fails
is repeated; if it fails again, the checker is called on an output that is known to be right. If it answers
there, the candidate's output is wrong; else the checker is broken, which is no fault of the candidate's. A
process can be ended whatever the checker does; a thread that matches a regular expression cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from insitu.errors import ConfigError, FunctionFailed, describe_raised
from insitu.registry import load
from insitu.tasks.user_functions import FAILURES, in_thread

CHECK_S = 10.0
"""Timeout of one call."""
IMPORT_S = 300.0
"""Timeout of the import of the checker's module."""
_CODE = "from insitu_tasksets.runners.checker import serve; serve()"


class CheckerFailed(Exception):
    """A call gave no answer; `str(error)` says what the checker did."""


class Checker:
    """The checker at `module:attribute` or `file.py:attribute`; processes are kept for the next call."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._broken = 0
        """Findings in a row that the checker is broken; FAILURES end the run."""
        self._idle: list[subprocess.Popen[bytes]] = []

    async def judge(
        self, stdin: str, expected: str, printed: str, solved: Callable[[], Awaitable[str | None]]
    ) -> tuple[bool, str]:
        """Return whether an output is right, and how the checker failed on it if that is why it is wrong.

        solved: returns the output of the task's solution, None without one. Raises CheckerFailed for a broken
        checker, FunctionFailed where it was found broken several times in a row.
        """
        problem = ""
        for _ in range(2):
            try:
                right = await self._ask(stdin, expected, printed)
            except CheckerFailed as error:
                problem = str(error)
            else:
                self._broken = 0
                return right, ""
        if not await self._answers(stdin, expected, expected):
            known = await solved()
            if known is None or not await self._answers(stdin, expected, known):
                self._broken += 1
                name = f"tasks.checker {self._path}"
                if self._broken >= FAILURES:
                    raise FunctionFailed(
                        f"{name} failed {self._broken} times in a row; the last time it {problem}"
                    )
                raise CheckerFailed(f"{name} {problem}")
        self._broken = 0
        return False, problem

    def close(self) -> None:
        """End the processes that are idle."""
        while self._idle:
            _end(self._idle.pop())

    async def _answers(self, stdin: str, expected: str, printed: str) -> bool:
        try:
            await self._ask(stdin, expected, printed)
        except CheckerFailed:
            return False
        return True

    async def _ask(self, *arguments: str) -> bool:
        answer, error = await in_thread(lambda: self._call(arguments))
        if error is not None:
            raise error
        return bool(answer)

    def _call(self, arguments: tuple[str, ...]) -> bool:
        process = self._idle.pop() if self._idle else self._start()
        try:
            reply = _exchange(process, json.dumps(arguments), CHECK_S)
        except CheckerFailed:
            _end(process)
            raise
        if isinstance(reply, bool):
            self._idle.append(process)
            return reply
        _end(process)  # what it keeps in memory may make all further calls fail
        raise CheckerFailed(reply)

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(folder for folder in sys.path if folder)
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, self._path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C is for the run
        )
        try:
            problem = _exchange(process, "", IMPORT_S)
            if problem:
                raise CheckerFailed(f"was not imported: {problem}")
        except BaseException:
            _end(process)
            raise
        return process


def _exchange(process: subprocess.Popen[bytes], request: str, timeout_s: float) -> bool | str:
    """Return the next answer of a process; raise CheckerFailed if it ends, as it does after `timeout_s`."""
    to, back = process.stdin, process.stdout
    if to is None or back is None:
        raise CheckerFailed("has no pipes")
    timer = threading.Timer(timeout_s, _kill, [process])
    timer.start()
    try:
        to.write(f"{request}\n".encode() if request else b"")
        to.flush()
        reply = back.readline()
    except OSError:
        reply = b""
    late = not timer.is_alive()
    timer.cancel()
    if not reply.endswith(b"\n"):
        raise CheckerFailed(f"did not return within {timeout_s:g} s" if late else "ended its process")
    answer: bool | str = json.loads(reply)
    return answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # a request that was not read
                pipe.close()


def serve() -> None:
    """Answer calls of the checker named by the first argument until the end of stdin."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the checker prints
    try:
        function = load(sys.argv[1])
    except ConfigError as error:
        print(json.dumps(str(error)), file=out, flush=True)
        return
    print("false", file=out, flush=True)
    for line in sys.stdin.buffer:
        # Ends the process even when the host was killed and the checker holds the interpreter.
        faulthandler.dump_traceback_later(2 * CHECK_S, exit=True)
        answer = _answer(function, json.loads(line))
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=out, flush=True)


def _answer(function: Callable[..., Any], arguments: list[str]) -> bool | str:
    """Return the checker's answer, or how it failed. ValueError, as of `int(printed)`: it is wrong."""
    try:
        result = function(*arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except ValueError:
        return False
    except BaseException as error:  # noqa: BLE001 - sys.exit() is no answer either
        code = getattr(function, "__code__", None)
        return describe_raised(error, code.co_filename if code is not None else "")
    # NumPy's truth values are answers too; the truth of None, a text or nan would be a guess.
    if type(result).__name__ in ("bool", "bool_", "int") and result in (0, 1):
        return bool(result)
    try:
        return f"returned {result!a:.100}, not True or False"
    except Exception:  # noqa: BLE001 - the user's class
        return f"returned a {type(result).__name__}, not True or False"
