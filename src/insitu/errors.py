"""Exceptions that insitu raises deliberately, one class per boundary to the outside.

The message of an `InsituError` is one line for the user. `infra` errors are failures of the host: they make a
rollout unscorable (reward None, slot retried). Everything else is either a defect (raised to the top) or
caused by the agent (graded). `boundary` converts foreign exceptions at an edge and keeps the cause.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_RAISED_CHARS = 300
"""Largest length of a user's exception text in a message."""
_NOT_THE_USERS = (str(Path(__file__).parent), str(Path(os.__file__).parent), "<frozen")
"""Begins of the names of insitu's and Python's own files."""


class InsituError(Exception):
    """Base class; `str(error)` is one line for the user."""

    infra = False

    def _render_traceback_(self, *_: object) -> list[str]:
        """Return what a notebook shows of it: one line, with INSITU_DEBUG=1 the traceback."""
        if os.environ.get("INSITU_DEBUG"):
            return traceback.format_exception(self)
        return [f"{type(self).__name__}: {self}"]


class ConfigError(InsituError):
    """The user's configuration or command line is wrong."""


class SetupError(InsituError):
    """The machine lacks something insitu needs (bubblewrap, Node, a port, disk space)."""


class TaskError(InsituError):
    """A task or dataset row cannot be used."""


class FunctionFailed(TaskError):
    """A function of the user's failed several times in a row: the run ends."""


class CaptureError(InsituError):
    """A capture invariant is broken; names rollout, turn and token index and is never swallowed."""


class RenderError(InsituError):
    """A tokenizer or chat template cannot be used as a renderer."""


class GatewayError(InsituError):
    """The gateway cannot do what its operator requested."""


class EngineError(InsituError):
    """The engine failed, returned an invalid answer or is gone."""

    infra = True


class EngineUnavailable(EngineError):
    """The engine did not answer, e.g. because it restarted: the same request may succeed later."""


class SandboxError(InsituError):
    """The sandbox backend failed."""

    infra = True


class SandboxStartError(SandboxError):
    """A sandbox could not be created."""


class ImageMissing(SandboxStartError):
    """The image does not exist: a retry cannot help, and the backend is healthy."""


class ImageUnavailable(SandboxStartError):
    """An image could not be fetched: a retry may help, and the backend is healthy.

    Causes: the registry is down, slow or requires a login.
    """


class BackendTimeout(SandboxStartError):
    """A backend did not complete a request in time; it may still complete it later."""


class SandboxTransient(SandboxError):
    """A temporary failure on the way to a sandbox, e.g. a reset connection: a retry may succeed.

    Raised only where a retry is harmless.
    """


class SandboxLost(SandboxError):
    """A live sandbox vanished, and nothing that ran in it caused that."""


class PolicyUnsupported(SandboxError):
    """A spec asks for more than the backend offers; raised before start."""

    infra = False


class HarnessError(InsituError):
    """An agent could not be installed, configured or started."""

    infra = True


class GradeError(InsituError):
    """Grading failed because of the host."""

    infra = True


class RecordError(InsituError):
    """The run directory cannot be read or written."""


class TrainError(InsituError):
    """The learner rejected or failed a step."""


class BadStepError(TrainError):
    """A training step was refused for what it computed; the weights are unchanged."""


@contextmanager
def boundary(kind: type[InsituError], doing: str) -> Iterator[None]:
    """Convert OS and protocol errors that cross an edge into `kind`; the message says what was being done.

    Insitu's own errors pass unchanged. Programming errors (TypeError, KeyError, ...) are not caught.
    """
    try:
        yield
    except InsituError:
        raise
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise kind(f"{doing}: {error or type(error).__name__}") from error


@contextmanager
def user_code(kind: type[InsituError], name: str, passing: type[Exception] = InsituError) -> Iterator[None]:
    """Convert every error of a user's code into `kind`, one line with its place: in the file that is called.

    Insitu's own errors and those of type `passing` are raised unchanged.
    """
    try:
        yield
    except (InsituError, passing):
        raise
    except (Exception, SystemExit) as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]
        own = (file for file in files if file != files[0] and not file.startswith(_NOT_THE_USERS))
        raise kind(f"{name} {describe_raised(error, next(own, ''))}") from error


def describe_raised(error: BaseException, file: str = "") -> str:
    """Return what was raised and where: the last line in `file`, if there is one, else the last line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    place = [f" ({Path(frame.filename).name} line {frame.lineno})" for frame in own or frames][-1:]
    return f"raised {ascii(error)[:MAX_RAISED_CHARS]}{''.join(place)}"


def describe_invalid(error: ValidationError, *within: str) -> str:
    """Return one line for the first thing wrong with a value: its place, inside `within`, and the message."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join([*within, *map(str, first["loc"])])
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first InsituError of a task group, else its first error, without the nesting."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, InsituError)), leaves[0])
