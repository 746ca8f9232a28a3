"""Generated Python bug-fix tasks: a module of 3-12 lines, one fault, an issue text, hidden tests.

Each task is a pure function of its seed. The issue names the function and nothing else: what it must return
stands in a comment above the faulty line, in words, so an agent has to look before it can edit. Train
and eval never share a task: the split is decided by content hash. Identifiers come from closed pools, so that
a small tokenizer can give each of them one token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.errors import TaskError
from insitu.tasks.base import Split
from insitu.types import Case, FileEntry, GradingPlan, Limits, Oracle, Task, Tree, task_hash

VARIABLES = (
    "width height depth price count rate weight score limit start stop size speed time cost load "
    "base bonus level offset step total share stock dose mass age rank fee tax"
).split()
FUNCTIONS = (
    "area volume amount margin balance change ratio result budget points charge payment growth "
    "measure estimate quota gap reward output value"
).split()
MODULES = "shop bank game farm lab port mill yard".split()

OPERATORS = {"+": "plus", "-": "minus", "*": "times", "//": "divided by", "%": "modulo"}
COMPARISONS = {"<": "below", ">": "above", "<=": "at most", ">=": "at least"}
EXTREMES = {"min": "smaller", "max": "larger"}

HIDDEN = 10
"""Hidden cases of a task."""
EVAL_SHARE = 4
"""One content hash in EVAL_SHARE belongs to the eval split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """The function of a module: `right` and `now` are the text after the indentation of its last line."""

    name: str
    params: tuple[str, ...]
    meaning: str
    """What it must return, in the comment's words."""
    right: str
    now: str

    def source(self, body: str) -> str:
        head = f"def {self.name}({', '.join(self.params)}):"
        return f"{head}\n    # returns {self.meaning}\n    {body}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """The edit that solves a task: the smallest unique text that is wrong, and what it must become."""

    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyProblem:
    """Everything about one generated task; Task and Oracle are cut from it."""

    seed: int
    category: str
    module: str
    header: tuple[str, ...]
    """Lines before the function."""
    faulty: _Function
    fault: _Fault

    @property
    def path(self) -> str:
        return f"{self.module}.py"

    def text(self, *, solved: bool) -> str:
        body = self.faulty.right if solved else self.faulty.now
        return "\n".join([*self.header, "", "", self.faulty.source(body)])

    @property
    def prompt(self) -> str:
        return f"Fix {self.path}: {self.faulty.name} must return what its comment says."


Maker = Callable[[random.Random, Sequence[str]], tuple[str, str, str]]
"""(random, params) -> (meaning, right expression, wrong expression)."""


def _operator(rng: random.Random, params: Sequence[str]) -> tuple[str, str, str]:
    a, b = params[:2]
    right, wrong = rng.sample(sorted(OPERATORS), 2)
    return f"{a} {OPERATORS[right]} {b}", f"{a} {right} {b}", f"{a} {wrong} {b}"


def _constant(rng: random.Random, params: Sequence[str]) -> tuple[str, str, str]:
    a, number, op = params[0], rng.randint(2, 8), rng.choice(sorted(OPERATORS))
    wrong = number + rng.choice((-1, 1))
    return f"{a} {OPERATORS[op]} {number}", f"{a} {op} {number}", f"{a} {op} {wrong}"


def _swapped(rng: random.Random, params: Sequence[str]) -> tuple[str, str, str]:
    (a, b), op = params[:2], rng.choice(("-", "//", "%"))
    return f"{a} {OPERATORS[op]} {b}", f"{a} {op} {b}", f"{b} {op} {a}"


def _variable(rng: random.Random, params: Sequence[str]) -> tuple[str, str, str]:
    (a, b, c), op = params[:3], rng.choice(sorted(OPERATORS))
    wrong = rng.choice((f"{a} {op} {c}", f"{c} {op} {b}"))
    return f"{a} {OPERATORS[op]} {b}", f"{a} {op} {b}", wrong


def _comparison(rng: random.Random, params: Sequence[str]) -> tuple[str, str, str]:
    (a, b), op = params[:2], rng.choice(sorted(COMPARISONS))
    wrong = rng.choice([other for other in sorted(COMPARISONS) if other != op])
    return f"whether {a} is {COMPARISONS[op]} {b}", f"{a} {op} {b}", f"{a} {wrong} {b}"


def _extreme(rng: random.Random, params: Sequence[str]) -> tuple[str, str, str]:
    a, b = params[:2]
    right, wrong = rng.sample(sorted(EXTREMES), 2)
    faulty = rng.choice((f"{wrong}({a}, {b})", f"{wrong}({b}, {a})", f"{a} + {b}", f"{a} - {b}"))
    return f"the {EXTREMES[right]} of {a} and {b}", f"{right}({a}, {b})", faulty


def _no_return(rng: random.Random, params: Sequence[str]) -> tuple[str, str, str]:
    (a, b), op = params[:2], rng.choice(sorted(OPERATORS))
    return f"{a} {OPERATORS[op]} {b}", f"{a} {op} {b}", f"{a} {op} {b}"


FAMILIES: dict[str, Maker] = {
    "operator": _operator,
    "constant": _constant,
    "swapped": _swapped,
    "variable": _variable,
    "comparison": _comparison,
    "extreme": _extreme,
    "no_return": _no_return,
}


def _function(rng: random.Random, category: str) -> tuple[_Function, _Fault]:
    params = rng.sample(VARIABLES, 3 if category == "variable" else 2)
    meaning, right, wrong = FAMILIES[category](rng, params)
    if category == "no_return":
        now, fault = wrong, _Fault(old=wrong, new=f"return {right}")
    else:
        now, fault = f"return {wrong}", _Fault(old=wrong, new=right)
    rng.shuffle(params)
    made = _Function(
        name=rng.choice(FUNCTIONS), params=tuple(params), meaning=meaning, right=f"return {right}", now=now
    )
    return made, fault


def make_problem(seed: int, kinds: Sequence[str] = ()) -> ToyProblem:
    """Return the problem of a seed; the text to replace occurs exactly once in the module.

    A kind that is in `kinds` twice is twice as likely.
    """
    # The text is part of the seed: with another one the warm start would have been recorded on other tasks.
    rng = random.Random(f"whet-toy-{seed}")
    pool = sorted(kinds or FAMILIES)
    while True:
        category, module = rng.choice(pool), rng.choice(MODULES)
        header = rng.sample([f'NAME = "{module}"', f"LEVEL = {rng.randint(1, 9)}"], rng.choice((1, 1, 2)))
        faulty, fault = _function(rng, category)
        problem = ToyProblem(
            seed=seed, category=category, module=module, header=tuple(header), faulty=faulty, fault=fault
        )
        if problem.text(solved=False).count(problem.fault.old) == 1 and _told_apart(problem):
            return problem


def call_function(text: str, function: str, args: Sequence[object]) -> object:
    """Run generated module text (never an agent's) and call one of its functions."""
    scope: dict[str, object] = {}
    exec(compile(text, "<toy>", "exec"), scope)  # generated arithmetic
    target = scope[function]
    if not callable(target):
        raise TaskError(f"toy module has no function {function}")
    return target(*args)


def _inputs(problem: ToyProblem, count: int) -> list[tuple[int, ...]]:
    rng = random.Random(f"whet-toy-hidden-{problem.seed}")
    chosen = []
    for i in range(count):
        args = [rng.randint(11, 99) for _ in problem.faulty.params]
        # Equal arguments tell `<` from `<=`.
        chosen.append(tuple(args[:1] * len(args) if i == 2 else args))
    return chosen


def visible_inputs(problem: ToyProblem) -> tuple[int, ...]:
    """Return the arguments that check.py shows: small numbers, since hidden cases use 11 and up."""
    rng = random.Random(f"whet-toy-visible-{problem.seed}")
    return tuple(rng.sample(range(2, 10), len(problem.faulty.params)))


def _told_apart(problem: ToyProblem) -> bool:
    """Whether hidden cases show the fault, and the visible case too."""
    wrong, right = problem.text(solved=False), problem.text(solved=True)
    probes = [*_inputs(problem, HIDDEN), visible_inputs(problem)]
    name = problem.faulty.name
    seen = [call_function(wrong, name, args) != call_function(right, name, args) for args in probes]
    return seen[-1] and any(seen[:-1])


def _check_script(problem: ToyProblem) -> str:
    """check.py: one visible example; when it fails, the source of the failing function."""
    args = visible_inputs(problem)
    want = call_function(problem.text(solved=True), problem.faulty.name, args)
    return (
        "import inspect\n"
        f"from {problem.module} import {problem.faulty.name} as target\n"
        f'print("pass" if target{args!r} == {want!r} else "fail\\n" + inspect.getsource(target))\n'
    )


def check_output(problem: ToyProblem, text: str) -> str:
    """Return the output of check.py when the module's text is `text`."""
    args = visible_inputs(problem)
    want = call_function(problem.text(solved=True), problem.faulty.name, args)
    if call_function(text, problem.faulty.name, args) == want:
        return "pass\n"
    return "fail\n" + text[text.index("def ") :] + "\n"


def _to_task(problem: ToyProblem, limits: Limits) -> Task:
    files: Tree = {
        problem.path: FileEntry(content=problem.text(solved=False).encode()),
        "check.py": FileEntry(content=_check_script(problem).encode()),
    }
    grading = GradingPlan(runner="json_io", entry=problem.path, protected=("check.py",), timeout_s=4.0)
    return Task(
        id=f"toy-{problem.seed}",
        prompt=problem.prompt,
        files=files,
        grading=grading,
        limits=limits,
        category=problem.category,
        content_hash=task_hash(problem.prompt, files, grading),
    )


def to_oracle(problem: ToyProblem) -> Oracle:
    solved, name = problem.text(solved=True), problem.faulty.name
    cases = tuple(
        Case(function=name, args=args, expected=call_function(solved, name, args))
        for args in _inputs(problem, HIDDEN)
    )
    return Oracle(
        task_id=f"toy-{problem.seed}",
        cases=cases,
        gold={problem.path: FileEntry(content=solved.encode())},
    )


def split_of(content_hash: str) -> Split:
    """Which split a toy task belongs to, by content alone."""
    return "eval" if int(content_hash[:8], 16) % EVAL_SHARE == 0 else "train"


class ToySource:
    """An endless TaskSource of toy tasks. `seed` picks where in the stream the train split starts."""

    def __init__(self, limits: Limits, *, seed: int = 0, kinds: Sequence[str] = ()) -> None:
        unknown = sorted(set(kinds) - set(FAMILIES))
        if unknown:
            raise TaskError(f"unknown toy family {unknown[0]}; known: {', '.join(sorted(FAMILIES))}")
        self._limits, self._kinds = limits, tuple(kinds)
        self._next: dict[Split, int] = {"train": (seed + 1) * 10_000_000, "eval": 0}
        self._made: dict[Split, list[Task]] = {"train": [], "eval": []}
        self._seen: set[str] = set()

    @property
    def name(self) -> str:
        return "toy"

    def size(self, split: Split) -> int | None:
        return None

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        made = self._made[split]
        while len(made) < start + count:
            task = _to_task(make_problem(self._next[split], self._kinds), self._limits)
            self._next[split] += 1
            if split_of(task.content_hash) == split and task.content_hash not in self._seen:
                self._seen.add(task.content_hash)
                made.append(task)
        return made[start : start + count]

    def oracle(self, task: Task) -> Oracle:
        return to_oracle(self.problem(task))

    def row(self, task: Task) -> Mapping[str, Any]:
        return {}

    def problem(self, task: Task) -> ToyProblem:
        """Return the generated problem of a task, for the oracle and for scripted demonstrators."""
        problem = make_problem(int(task.id.removeprefix("toy-")), self._kinds)
        if _to_task(problem, self._limits).content_hash != task.content_hash:
            raise TaskError(f"{task.id} does not come from this source")
        return problem
