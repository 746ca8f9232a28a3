"""Calls of the user's functions: off the event loop, with a timeout and a limit of concurrent calls.

    transform(row: dict) -> dict | None                       None leaves the row out
    parse_answer(reply: str, task: Task) -> {path: text}      single_turn: a reply becomes files
    checker(stdin: str, expected: str, printed: str) -> bool  see insitu_tasksets/runners/checker.py
    reward(rollout: FinishedRollout) -> float | dict | None   see grading/reward.py
    hook(event: ToolEvent) -> dict | None                     see insitu_tasksets/tool_hooks.py

A plain function runs in a thread per call, a coroutine function on an event loop of its own thread. An
exception is an infrastructure failure of the attempt; several in a row end the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from insitu import registry
from insitu.errors import (
    MAX_RAISED_CHARS,
    ConfigError,
    FunctionFailed,
    GradeError,
    describe_raised,
)

FAILURES = 5
"""Consecutive failures of one function that end the run."""
CALL_S = 300.0
"""Default timeout of one call in seconds."""

USER_FUNCTIONS = ("reward.function ", "tasks.checker ", "tasks.parse_answer ", "gateway.tools ")
"""How the error of an attempt begins that failed because of a user's function."""
CHECKER_FAILED = "the checker failed"
"""How `controls` of a verdict begins where the checker failed on an output and works on a right one."""

Result = TypeVar("Result")


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at `module:attribute` or `file.py:attribute`; raise ConfigError."""
    found = registry.load(path)
    if not callable(found):
        raise ConfigError(f"{path} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


class BadResult(Exception):
    """A function returned an invalid result; `str(error)` describes it."""


class _CallTimeout(Exception):
    """A call did not return in time, or got no slot; `str(error)` says which."""


class UserFunction:
    """A user's function with its limits; `close` ends the event loop of a coroutine function.

    A thread cannot be killed: a call that hangs keeps its slot until it returns, so at most `max_concurrent`
    calls run, and further calls fail while all slots hang.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        max_concurrent: int = 1,
        timeout_s: float = CALL_S,
    ) -> None:
        """Wrap `function`; `name` is used in messages, `timeout_s` limits a call and the wait for a slot."""
        self.name, self._function, self._timeout_s = name, function, timeout_s
        self._loop = _LoopThread(timeout_s) if _is_coroutine_function(function) else None
        self._max_concurrent, self._slots = max_concurrent, asyncio.Semaphore(max_concurrent)
        self._hanging = 0
        """Calls that timed out and have not returned yet."""
        self._failures = 0

    async def call(self, work: Callable[[Callable[..., Any]], Result]) -> Result:
        """Run `work`, which gets the function as a plain callable, in a thread.

        Raises GradeError when the function raised, returned no valid result (BadResult) or timed out, and
        FunctionFailed for the last of FAILURES consecutive failures.
        """
        function = self._function if self._loop is None else self._loop.blocking(self._function)
        try:
            await self._acquire()
            result = await self._run(lambda: work(function))
        except Exception as error:  # the boundary: it is the user's code
            self._failures += 1
            problem = self._describe(error)
            if self._failures < FAILURES:
                raise GradeError(f"{self.name} {problem}") from error
            raise FunctionFailed(
                f"{self.name} failed {self._failures} times in a row; the last time it {problem}"
            ) from error
        self._failures = 0
        return result

    def close(self) -> None:
        """Cancel running coroutines and stop their event loop."""
        if self._loop is not None:
            self._loop.close()

    async def _acquire(self) -> None:
        """Take a slot; raise _CallTimeout when all of them hang."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._slots.acquire()
                    return
            except TimeoutError:
                if self._hanging == self._max_concurrent:
                    raise _CallTimeout(
                        f"got no free slot for {self._timeout_s:g} s: {self._hanging} earlier calls hang"
                    ) from None

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work` from a thread that releases the slot when it ends."""
        done = in_thread(work)
        done.add_done_callback(lambda _: self._slots.release())
        try:
            # Shielded: a cancelled caller must not release the slot of a thread that is still running.
            async with asyncio.timeout(self._timeout_s):
                result, error = await asyncio.shield(done)
        except TimeoutError:
            self._hanging += 1
            done.add_done_callback(self._returned)
            raise _CallTimeout(f"did not return within {self._timeout_s:g} s") from None
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(repr(error)) from error
        return result  # type: ignore[return-value]

    def _returned(self, _: object) -> None:
        self._hanging -= 1

    def _describe(self, error: Exception) -> str:
        """Return what failed, with the line in the function's own file where it raised."""
        if isinstance(error, BadResult | _CallTimeout):
            return str(error)[:MAX_RAISED_CHARS]
        code = getattr(self._function, "__code__", None)
        return describe_raised(error, code.co_filename if code is not None else "")


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


class _LoopThread:
    """An event loop in a daemon thread, started at the first call.

    All calls share it, so that clients, rate limits and caches of the user's code belong to one loop.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def blocking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a plain callable that runs the coroutine function on the loop and waits for its result."""

        def call(*args: object) -> object:
            future = asyncio.run_coroutine_threadsafe(function(*args), self._started())
            try:
                return future.result(self._timeout_s)
            except concurrent.futures.CancelledError:
                raise _CallTimeout("was cancelled") from None
            except TimeoutError:
                if future.done():  # raised by the function itself
                    raise
                future.cancel()
                raise _CallTimeout(f"did not return within {self._timeout_s:g} s") from None

        return call

    def close(self) -> None:
        with self._lock:
            loop, stop, self._loop = self._loop, self._stop, None
        if loop is not None and stop is not None:
            loop.call_soon_threadsafe(stop.set)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                ready = threading.Event()
                threading.Thread(
                    target=lambda: asyncio.run(self._serve(ready)), name="insitu-user-loop", daemon=True
                ).start()
                ready.wait()
            if self._loop is None:
                raise RuntimeError("the event loop of a user function did not start")
            return self._loop

    async def _serve(self, ready: threading.Event) -> None:
        stop = self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        ready.set()
        await stop.wait()  # asyncio.run cancels what is still running


def in_thread(work: Callable[[], Result]) -> asyncio.Future[tuple[Result | None, BaseException | None]]:
    """Return a future of (result, error) of `work` in a daemon thread."""
    # asyncio.to_thread would keep the process alive while a call hangs.
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Result | None, BaseException | None]] = loop.create_future()

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a thread must not be lost either
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set_result, (result, failed))

    threading.Thread(target=run, name="insitu-user-function", daemon=True).start()
    return done
