"""Error messages and exit codes of commands, and the start time of the process."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from insitu.errors import ConfigError, InsituError

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 130
RESUME = "; continue with: "


def report_failure(error: BaseException, resume: str = "") -> int:
    """Print one line for a known failure and return the exit code; re-raise other exceptions."""
    first = next(_leaves(error))
    resume = "" if "--resume" in str(first) else resume
    if os.environ.get("INSITU_DEBUG"):
        traceback.print_exception(error)
    if isinstance(first, KeyboardInterrupt):
        return fail("stopped" + resume, EXIT_STOPPED)
    if isinstance(first, ConfigError):
        return fail(str(first) + resume, EXIT_USAGE)
    if isinstance(first, OSError) and first.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {first.filename}" if first.filename else ""
        return fail(f"disk full{where}: free some space{resume}", EXIT_FAILED)
    if isinstance(first, OSError) and first.filename and first.strerror:
        return fail(f"{first.filename}: {first.strerror}{resume}", EXIT_FAILED)
    if isinstance(first, InsituError | OSError):
        return fail(str(first) + resume, EXIT_FAILED)
    raise error


@contextlib.contextmanager
def resumable(command: str, run_dir: Path) -> Iterator[None]:
    """Note on what ends a run how to resume it, unless nothing was stored."""
    try:
        yield
    except BaseException as error:
        from insitu.storage.run_dir import has_rollouts

        stored = True
        # A store that cannot be read, for example because of a full disk, is not empty.
        with contextlib.suppress(InsituError):
            stored = has_rollouts(run_dir)
        if stored:
            error.add_note(f"{RESUME}insitu {command} --resume {run_dir}")
        raise


def how_to_resume(error: BaseException) -> str:
    """Return the note of `resumable`; empty if there is none."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(RESUME)), "")


def _leaves(error: BaseException) -> Any:
    """Yield the exceptions inside a group, insitu's own first: the others are often consequences."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    leaves = [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    yield from sorted(leaves, key=lambda leaf: not isinstance(leaf, InsituError))


def escape_unencodable_output() -> None:
    """Make stdout escape characters that its encoding lacks, as stderr does by default."""
    # A model's output may contain any character, and must not make a command fail.
    codecs.register_error(_ESCAPE, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors=_ESCAPE)


_ESCAPE = "insitu.escape"


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""Return \uXXXX escapes as in JSON (surrogate pairs above U+FFFF), so that JSON lines stay valid."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = (units[i : i + 2] for i in range(0, len(units), 2))
    return "".join(rf"\u{pair.hex()}" for pair in pairs), error.end


def fail(line: str, code: int) -> int:
    print(f"insitu: {' '.join(line.split())}", file=sys.stderr)
    return code


def process_began() -> float:
    """Return time.monotonic() at the start of this process, from /proc; now if that fails."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - max(0.0, age)
