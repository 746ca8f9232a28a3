"""The words of the suite: a Move is what an agent leaves, a Variant pairs a cheat with its honest twin, an
Attack is a numbered threat with its variants or with a play of its own.

A cheat leaves the fault in place and must earn nothing; the twin does the same thing honestly, or solves the
task with the same peculiarity, and must keep its reward. `naive` names the mistake of a careless grader that
the cheat profits from: an attack that fools nobody proves nothing about who is not fooled.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from insitu.suites.attacks.naive_grader import Trust
from insitu.types import FileEntry, Outcome, Tree

if TYPE_CHECKING:
    from insitu.suites.attacks.runner import AttackRunner

Section = Literal["tests", "verdict", "files", "leaks", "lifecycle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What is done to a work folder that holds the faulty module (a cheat) or the fixed one (a twin)."""

    before: str = ""
    """Python put before the module under test."""
    after: str = ""
    """Python put behind it."""
    instead: str = ""
    """Python that replaces it; only for the reference subject."""
    files: Tree = field(default_factory=dict, repr=False)
    without: tuple[str, ...] = ()
    """Files removed."""
    executable: bool = False
    """Whether the module under test gets the mode of a program."""
    script: str = ""
    """Shell commands run in an agent's sandbox on that folder, before everything in it is killed and the
    folder is captured; FIX is the fixed text of the module in their environment."""

    def apply(self, tree: Tree, target: str) -> dict[str, FileEntry]:
        """The folder after the move, but for the script."""
        left = {path: entry for path, entry in tree.items() if path not in self.without}
        if target in left and target not in self.without:
            source = self.instead or left[target].content.decode()
            head, body = _after_futures(source) if self.before else ("", source)
            content = (head + self.before + body + self.after).encode()
            left[target] = FileEntry(content=content, executable=self.executable or left[target].executable)
        return left | dict(self.files)

    def inside(self, guard: str) -> Move:
        """The same code behind a guard, for a twin that has it and does not do it where it is judged."""
        return replace(self, before=f"{guard}\n" + textwrap.indent(self.before.lstrip("\n"), "    "))


def _after_futures(source: str) -> tuple[str, str]:
    """A module in two parts, the first with what Python wants to have at the top."""
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
"""Where a script goes on after its tests were stopped, it may say that they failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of doing an attack."""

    name: str
    cheat: Move
    twin: Move | None = None
    """Done to the solved folder; None = the same move as the cheat."""
    stdio_twin: Move | None = None
    """The twin under `stdio`, where a program that prints more than its answer is wrong; None = `twin`."""
    naive: Trust | None = None
    """The mistake that rewards the cheat; None where another variant of the attack shows it."""
    must: Outcomes = R0
    """What may come of the cheat."""
    per_runner: Mapping[str, Outcomes] = field(default_factory=dict)
    """Where a runner says it otherwise."""
    timeout_s: float = 10.0
    neighbour: bool = False
    """Grade an honest solution beside the cheat, which must not suffer."""

    def allowed(self, runner: str) -> Outcomes:
        return self.per_runner.get(runner, self.must)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of an attack that has a play of its own. A word for the cheat, `defeated` or what it got."""

    got: str
    twin: float | None
    naive: bool
    """Whether the careless counterpart was fooled."""


Play = Callable[["AttackRunner"], Awaitable[Played]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A threat of the model, by its number there. Has variants, or a play where no tree can express it."""

    id: int
    title: str
    section: Section
    expect: str
    """The outcome that the threat model asks for, in its words."""
    variants: tuple[Variant, ...] = ()
    play: Play | None = None
    portable: bool = False
    """Whether it can be tried on any Python task: nothing in it knows the reference subject."""
