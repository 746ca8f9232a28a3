"""Types of the suite: Move (changes to a folder), Variant (cheat and honest twin), Attack (numbered threat).

A cheat keeps the fault and must earn nothing. Its twin does the same thing honestly, or solves the task with
the same peculiarity, and must keep its reward. `naive` names the mistake of a careless grader that pays the
cheat: an attack that fools no grader proves nothing.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from insitu.types import FileEntry, Outcome, Tree
from insitu_lab.attacks.naive_grader import Trust

if TYPE_CHECKING:
    from insitu_lab.attacks.runner import AttackRunner

Section = Literal["tests", "verdict", "files", "leaks", "lifecycle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Changes to a work folder with the faulty module (a cheat) or the fixed one (a twin)."""

    before: str = ""
    """Python inserted before the module under test."""
    after: str = ""
    """Python appended to it."""
    instead: str = ""
    """Python that replaces it; only for the reference subject."""
    files: Tree = field(default_factory=dict, repr=False)
    without: tuple[str, ...] = ()
    """Files removed."""
    executable: bool = False
    """Whether the module under test becomes executable."""
    script: str = ""
    """Shell commands run in an agent's sandbox before the capture; $FIX holds the fixed module."""

    def apply(self, tree: Tree, target: str) -> dict[str, FileEntry]:
        """Return the folder after the move, without the script."""
        left = {path: entry for path, entry in tree.items() if path not in self.without}
        if target in left and target not in self.without:
            source = self.instead or left[target].content.decode()
            head, body = _after_futures(source) if self.before else ("", source)
            content = (head + self.before + body + self.after).encode()
            left[target] = FileEntry(content=content, executable=self.executable or left[target].executable)
        return left | dict(self.files)

    def inside(self, guard: str) -> Move:
        """Return the move with its code behind a guard that is false while it is graded."""
        return replace(self, before=f"{guard}\n" + textwrap.indent(self.before.lstrip("\n"), "    "))


def _after_futures(source: str) -> tuple[str, str]:
    """Split a module after its `__future__` imports."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return "", source
    futures = (node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__")
    last = max((node.end_lineno or 0 for node in futures), default=0)
    lines = source.splitlines(keepends=True)
    return "".join(lines[:last]), "".join(lines[last:])


Outcomes = tuple[Outcome, ...]
R0: Outcomes = (Outcome.UNRESOLVED,)
TAMPER: Outcomes = (Outcome.TAMPERED,)
REFUSED: Outcomes = (Outcome.REFUSED,)
TIMEOUT: Outcomes = (Outcome.TEST_TIMEOUT,)
BY_SCRIPT: Mapping[str, Outcomes] = {"swebench_log": (*TIMEOUT, *R0), "harbor": (*TIMEOUT, *R0)}
"""A script that continues after its tests were killed may report a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A variant of an attack."""

    name: str
    cheat: Move
    twin: Move | None = None
    """Done to the solved folder; None = the same move as the cheat."""
    stdio_twin: Move | None = None
    """The twin under `stdio`, where a program that prints more than its answer is wrong; None = `twin`."""
    naive: Trust | None = None
    """The mistake that rewards the cheat; None if another variant shows it."""
    must: Outcomes = R0
    """Allowed outcomes of the cheat."""
    per_runner: Mapping[str, Outcomes] = field(default_factory=dict)
    """Other outcomes by runner."""
    timeout_s: float = 10.0
    neighbour: bool = False
    """Grade an honest solution at the same time, which must not be affected."""

    def allowed(self, runner: str) -> Outcomes:
        return self.per_runner.get(runner, self.must)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Result of a play. `got`: `defeated`, or what the cheat got."""

    got: str
    twin: float | None
    naive: bool
    """Whether the careless counterpart was fooled."""


Play = Callable[["AttackRunner"], Awaitable[Played]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A numbered threat with variants, or with a play where no tree can express it."""

    id: int
    title: str
    section: Section
    expect: str
    """Outcome required by the threat model."""
    variants: tuple[Variant, ...] = ()
    play: Play | None = None
    portable: bool = False
    """Whether it runs on any Python task: independent of the reference subject."""
