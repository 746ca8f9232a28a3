"""Every failure insitu raises on purpose, one class per boundary to the outside.

A `InsituError` is one clear line for a person. Classification: `infra` errors are the host's doing and make
a rollout unscorable (reward None, slot retried); everything else is either a defect (raises to the top)
or the agent's own doing (graded). `boundary` turns foreign exceptions into the class of the edge they
crossed, keeping the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InsituError(Exception):
    """Base. `str(error)` is one line, fit to print."""

    infra = False


class ConfigError(InsituError):
    """The user's configuration or command line is wrong."""


class SetupError(InsituError):
    """The machine lacks something insitu needs (bubblewrap, Node, a port, disk space)."""


class TaskError(InsituError):
    """A task or dataset row cannot be used."""


class CaptureError(InsituError):
    """An invariant of capture is broken. Names rollout, turn and token index; never swallowed."""


class RenderError(InsituError):
    """A tokenizer or chat template cannot serve as a family."""


class GatewayError(InsituError):
    """The gateway cannot do what its operator asked."""


class EngineError(InsituError):
    """The engine failed, answered nonsense or is gone."""

    infra = True


class EngineUnavailable(EngineError):
    """The engine did not answer this request (it was restarted, say): the same one may be answered later."""


class SandboxError(InsituError):
    """The sandbox backend failed."""

    infra = True


class SandboxStartError(SandboxError):
    """A sandbox could not be created."""


class ImageMissing(SandboxStartError):
    """No such image: another try cannot help, and the backend is not to blame."""


class ImageUnavailable(SandboxStartError):
    """An image could not be fetched (its registry is down, slow or wants a login): another try may help, and
    the backend is not to blame."""


class BackendTimeout(SandboxStartError):
    """A backend did not do in time what it was told. It may still do it later."""


class SandboxTransient(SandboxError):
    """The way to a sandbox failed for a moment (a reset connection, say): the same call may succeed if made
    again. Raised only where making it again is harmless."""


class SandboxLost(SandboxError):
    """A live sandbox vanished through no act of what ran in it."""


class PolicyUnsupported(SandboxError):
    """A spec asks for more than the backend offers; refused before start."""

    infra = False


class HarnessError(InsituError):
    """An agent could not be installed, configured or started."""

    infra = True


class GradeError(InsituError):
    """Grading failed for a host-side cause."""

    infra = True


class RecordError(InsituError):
    """The run directory cannot be read or written."""


class TrainError(InsituError):
    """The learner refused or failed a step."""


@contextmanager
def boundary(kind: type[InsituError], doing: str) -> Iterator[None]:
    """Turn OS and protocol errors crossing an edge into `kind`, with what was being done.

    Insitu's own errors pass unchanged. Programming errors (TypeError, KeyError, ...) are not caught.
    """
    try:
        yield
    except InsituError:
        raise
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise kind(f"{doing}: {error or type(error).__name__}") from error


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a task group failed of: its first InsituError, else its first error, without the nesting."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, InsituError)), leaves[0])
