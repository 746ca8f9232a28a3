"""Processes that end with their parent (Linux)."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Sequence

from insitu.errors import InsituError, TrainError

_PR_SET_PDEATHSIG = 1
DUMP = signal.SIGUSR1


def follow_parent(parent: int) -> None:
    """Get killed when the parent dies. Raises TrainError if it is already dead."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise TrainError(f"the parent (process {parent}) is dead")


def child_parser(
    module: str, what: str | None, **arguments: Callable[[str], object]
) -> argparse.ArgumentParser:
    """Return the parser of such a process, whose `arguments` must all be given as --NAME."""
    parser = argparse.ArgumentParser(prog=module, description=what)
    for name, kind in arguments.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    return parser


def main_of_child(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: Sequence[str]
) -> int:
    """Run such a process; return 0, or 1 with one line on standard error.

    Ctrl-C goes to the whole process group and is ignored: the parent decides when it ends. DUMP writes the
    stacks of all threads to standard error, also of a thread that never returns to Python.
    """
    faulthandler.register(DUMP, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(parser.parse_args(argv))
    except InsituError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
