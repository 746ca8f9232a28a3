"""The user's own functions, named by dotted path in [tasks]: they run on the host, in the controller.

transform(row: dict) -> dict | None                  before the schema; None leaves the row out
parse_answer(response: str, task: Task) -> {path: text}     a reply without an agent becomes files
reward(row: dict, answer: dict, verdict) -> float  the reward, 0 to 1, of a graded answer
checker(stdin: str, expected: str, printed: str) -> bool    whether the output of a program is right

A function that raises is broken, and says nothing about the model: its attempt has failed of the
infrastructure, and several failures in a row end the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from insitu.errors import ConfigError, GradeError, TaskError
from insitu.tasks.row_files import RawRow
from insitu.types import Outcome, Task, Tree, Verdict

FINAL = (Outcome.INFRA, Outcome.TAMPERED, Outcome.REFUSED)
"""Outcomes that no function of the user's may turn into a reward."""
FAILURES = 5
"""Failures of one function in a row that end the run."""
CALL_S = 300.0
"""Seconds that one call may take."""
MAX_SAID_CHARS = 300

Result = TypeVar("Result")


def load_function(dotted: str) -> Callable[..., Any]:
    """The function at `package.module:name` or `package.module.name`, in an installed package or in the
    current folder. Raises ConfigError."""
    module, colon, name = dotted.partition(":")
    if not colon:
        module, _, name = dotted.rpartition(".")
    if not module or not name:
        raise ConfigError(f"{dotted!r} is no dotted path like package.module:function")
    _look_in_current_folder()
    try:
        found = importlib.import_module(module)
    except Exception as error:  # the boundary: it runs the user's module
        where = f" (looked in {Path.cwd()} and in the installed packages)"
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        raise ConfigError(
            f"cannot import {module} for {dotted}: {error!a}{where if missing else ''}"
        ) from error
    value = vars(found).get(name)
    if not callable(value):
        raise ConfigError(f"{dotted}: {module} ({getattr(found, '__file__', None)}) has no function {name}")
    if inspect.iscoroutinefunction(value):
        raise ConfigError(f"{dotted} is an async function: give a plain one, it is called in a thread")
    return value  # type: ignore[no-any-return]


def _look_in_current_folder() -> None:
    """After everything installed: a file of the user's must not replace a module that insitu imports
    later."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)


class BadResult(Exception):
    """A function returned something that is not a result. `str(error)` says what."""


class FunctionFailed(TaskError):
    """A function has failed several times in a row: the run ends."""


class _Late(Exception):
    """A call did not return in time, or found no place. `str(error)` says which."""


class UserFunction:
    """One of the user's functions, called in threads: it may take its time, and may hang.

    A thread cannot be killed, so a call that hangs keeps its place until it returns: never more than
    `at_once` calls run, and once all places hang, further calls fail.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], *, at_once: int = 1, timeout_s: float = CALL_S
    ) -> None:
        """`name`: for messages. `at_once`: calls that may run at the same time. `timeout_s`: of one call,
        and of the wait for a place while all hang."""
        self.name, self._function, self._timeout_s = name, function, timeout_s
        self._at_once, self._places = at_once, asyncio.Semaphore(at_once)
        self._hanging = 0
        """Calls that have not returned in time, nor since."""
        self._failures = 0

    async def call(self, work: Callable[[Callable[..., Any]], Result]) -> Result:
        """Run `work`, which gets the function, in a thread.

        Raises GradeError when the function raised, returned no result (BadResult), did not return in time or
        left no place free, and FunctionFailed for the last of FAILURES failures in a row.
        """
        try:
            await self._place()
            result = await self._result(lambda: work(self._function))
        except Exception as error:  # the boundary: it is the user's code
            self._failures += 1
            problem = self._problem(error)
            if self._failures < FAILURES:
                raise GradeError(f"{self.name} {problem}") from error
            raise FunctionFailed(
                f"{self.name} failed {self._failures} times in a row; the last time it {problem}"
            ) from error
        self._failures = 0
        return result

    async def _place(self) -> None:
        """Take a place. Raises _Late when all of them hang; else one becomes free in time, if not at once for
        this call."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._places.acquire()
                    return
            except TimeoutError:
                if self._hanging == self._at_once:
                    raise _Late(
                        f"left no place free for {self._timeout_s:g} s: {self._hanging} earlier calls hang"
                    ) from None

    async def _result(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, from a thread that gives the place back when it ends. Raises _Late."""
        done = _in_thread(work)
        done.add_done_callback(lambda _: self._places.release())
        try:
            # Shielded: whoever gives up waiting does not free the place of a thread that runs on.
            async with asyncio.timeout(self._timeout_s):
                result, error = await asyncio.shield(done)
        except TimeoutError:
            self._hanging += 1
            done.add_done_callback(self._returned)
            raise _Late(f"did not return within {self._timeout_s:g} s") from None
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(repr(error)) from error
        return result  # type: ignore[return-value]

    def _returned(self, _: object) -> None:
        self._hanging -= 1

    def _problem(self, error: Exception) -> str:
        """What it did, and where in the function's own file it raised."""
        if isinstance(error, BadResult | _Late):
            return str(error)[:MAX_SAID_CHARS]
        code = getattr(self._function, "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        place = [f" ({Path(frame.filename).name} line {frame.lineno})" for frame in own or frames][-1:]
        return f"raised {ascii(error)[:MAX_SAID_CHARS]}{''.join(place)}"


def _in_thread(work: Callable[[], Result]) -> asyncio.Future[tuple[Result | None, BaseException | None]]:
    """What becomes of `work` in a daemon thread: one that never returns does not keep the process alive, as
    a thread of asyncio.to_thread would."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Result | None, BaseException | None]] = loop.create_future()

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a thread must not be lost either
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done.set_result, (result, failed))

    threading.Thread(target=run, name="insitu-user-function", daemon=True).start()
    return done


async def reward_of(
    function: UserFunction, row: RawRow, task: Task, after: Tree, verdict: Verdict
) -> Verdict:
    """`verdict` with the reward of the user's function, which gets the row, the text of each file that the
    answer changed, and the verdict. Raises GradeError, FunctionFailed as UserFunction.call."""
    if verdict.outcome in FINAL:
        return verdict
    changed = {
        path: entry.content.decode("utf-8", "replace")
        for path, entry in after.items()
        if task.files.get(path) != entry
    }
    reward = await function.call(lambda evaluate: _number(evaluate(dict(row), changed, verdict)))
    return replace(verdict, reward=reward)


def _number(reward: object) -> float:
    # NumPy's numbers and 0-d tensors are numbers too; float() of a text would be a guess.
    if isinstance(reward, bool | str | bytes) or not hasattr(reward, "__float__"):
        raise BadResult(f"returned {reward!a}, not a number from 0 to 1")
    number = float(reward)
    if not 0 <= number <= 1:
        raise BadResult(f"returned {reward!a}, not a number from 0 to 1")
    return number
