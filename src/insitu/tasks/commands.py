"""Which programs a shell command calls, as far as its text shows."""

from __future__ import annotations

import re
import shlex

from insitu.types import Oracle

_SEPARATORS = {"&&", ";", "|", "&", "(", ")"}
_UNCLEAR = {"||", ";;", "<<"}
_UNCLEAR_FIRST = {"case", "for", "while", "until", "function", ".", "source", "eval", "alias", "export"}
"""What makes a program optional, hides it or changes where it is searched."""
_ASSIGNMENT = re.compile(r"\w+=")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
FIND = 'for name do command -v "$name" >/dev/null || echo "$name"; done'
"""Shell code: print those of its arguments that are neither a program on PATH nor a word of the shell."""


def programs(command: str) -> tuple[str, ...]:
    """Return names of programs that the command needs on PATH; none where its text is unclear."""
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    try:
        found = list(words)
    except ValueError:
        return ()
    if _UNCLEAR & {*found} or any(word.startswith("PATH=") for word in found):
        return ()
    names, begins = list[str](), True
    for word in found:
        if begins and word in _UNCLEAR_FIRST:
            return ()
        if begins and not _ASSIGNMENT.match(word):
            names += [word] if _NAME.fullmatch(word) else []
            begins = False
        begins = begins or word in _SEPARATORS
    return tuple(dict.fromkeys(names))


def programs_of(oracle: Oracle) -> tuple[str, ...]:
    """Return names of programs that the checks of a task call."""
    return tuple(dict.fromkeys(name for check in oracle.tests.checks for name in programs(check.command)))
