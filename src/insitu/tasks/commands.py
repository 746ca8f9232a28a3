"""Which program a shell command needs, as far as its text shows beyond doubt."""

from __future__ import annotations

import re

from insitu.types import Oracle

_OPTIONAL = re.compile(r"[;|\n]|(?<![&>])&(?!&)")
"""What lets a command succeed although its first program is missing; also within quotes."""
_FIRST = re.compile(
    r"\s*(?:cd [\w./-]+ && )?(?:(?!PATH=)\w+=[\w./:-]* )*([A-Za-z0-9_][\w.+-]*)(?=\s|$)", re.ASCII
)
FIND = 'for name do command -v "$name" >/dev/null || echo "$name"; done'
"""Shell code: print those of its arguments that are neither a program on PATH nor a word of the shell."""


def program(command: str) -> str:
    """Return the name that the command needs as a program on PATH; empty if its text leaves doubt."""
    found = None if _OPTIONAL.search(command.strip()) else _FIRST.match(command)
    return found[1] if found else ""


def programs_of(oracle: Oracle) -> tuple[str, ...]:
    """Return the names of programs that the checks of a task need."""
    names = (program(check.command) for check in oracle.tests.checks)
    return tuple(dict.fromkeys(filter(None, names)))
