"""The runs of one test file: in each, some required tests are turned, and each test is real in some run.

No run is the real one. Each test that can be turned is real in some runs and turned in the others, in every
form equally often, apart from the other tests. Its forms are members of a family that has no centre, and the
same whenever the file is judged on this machine. So code that forges has to decide for each test and each run
whether it is real, and nothing but the answer tells it: not the order of the runs, not the time, and not what
it remembers of all runs that ever were.

A turned test that fails may disturb those behind it. A test that failed only behind such a one says nothing:
then few tests are turned, in forms that were seen already, in every combination.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from insitu.grading.mutation.assertions import MutableTest, Mutation, mutable_tests
from insitu.grading.mutation.source_edits import Source

RUNS: Mapping[int, int] = {0: 1, 1: 6, 2: 4, 3: 4, 4: 2}
"""Tests of a file that can be turned (4: or more) -> its runs, and the most forms that each of them has. What
forges one test and sees all runs, of this grade and of all others, has to guess which form is real."""
FEW = 3
"""Tests that are turned where those behind them may be disturbed."""
MOST_RUNS: int = 2 * RUNS[1] + 2**FEW + 1
"""Of one file: as drawn at first, without single rows, with few tests, and one for the score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResults:
    """What the runs of a round say, so far."""

    outcomes: Mapping[str, str]
    """Of the required tests that were run as they are."""
    lost: frozenset[str] = frozenset()
    """Those of them that failed where nothing can have disturbed them."""
    wrong: frozenset[str] = frozenset()
    """Tests that passed both as they are and turned."""
    suspects: frozenset[str] = frozenset()
    """Tests that passed turned, where something may have disturbed them or they failed as they are."""
    disturbed: bool = False
    """Something failed that says nothing, since a turned test before it had failed."""
    uneven: frozenset[str] = frozenset()
    """Tests of which one row was turned, with cases that nobody asks for."""
    failed: int = 0
    """Turned cases that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantRound:
    """Runs of one file."""

    path: str
    text: str
    source: Source | None
    required: tuple[str, ...]
    chosen: tuple[MutableTest, ...]
    plan: tuple[Mapping[str, Mutation], ...]
    """Of each run, which tests are turned and how."""
    standard: bool
    """Whether a test that must start to pass looks real when it is turned."""

    @property
    def unseen(self) -> tuple[int, int]:
        """How many of the required tests look real when they are turned, and how many there are."""
        return sum(test.hidden for test in self.chosen), len({self.test(name) for name in self.required})

    def written(self, run: int) -> str:
        """The text of the file for one run."""
        edits = [edit for way in self.plan[run].values() for edit in way.edits]
        return self.source.edited(edits) if self.source is not None else self.text

    def judge(self, runs: Sequence[Mapping[str, str]]) -> MutantResults:
        """What the outcomes of the first runs come to; each in the order in which tests ran."""
        real: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
        passing, unsure, uneven = set[str](), set[str](), set[str]()
        disturbed, failed = False, 0
        wanted = Counter(self.test(name) for name in self.required)
        for turned, outcomes in zip(self.plan, runs, strict=False):
            behind = self._real(turned, outcomes, real)
            by_test: dict[str, list[bool]] = defaultdict(list)
            for name, word in outcomes.items():
                by_test[self.test(name)].append(word in ("passed", "xpassed"))
            for test, way in turned.items():
                cases = by_test[test]
                spared = len(cases) - max(1, len(cases) // way.rows) if cases and way.rows > 1 else 0
                if way.rows > 1 and len(cases) != wanted[test]:
                    uneven.add(test)
                elif sum(cases) > spared:
                    (unsure if test in behind else passing).add(test)
                elif sum(cases) < spared or not cases:
                    disturbed = True
                failed += len(cases) - max(sum(cases), spared)
        outcome = {name: _outcome(seen) for name, seen in real.items()}
        fine = passing & {self.test(name) for name in outcome}
        fine -= {self.test(name) for name, word in outcome.items() if word != "passed"}
        return MutantResults(
            outcomes={name: word or "failed" for name, word in outcome.items()},
            lost=frozenset(name for name, word in outcome.items() if word == "failed"),
            wrong=frozenset(fine),
            suspects=frozenset(unsure | (passing - fine)),
            disturbed=disturbed or bool(unsure) or "" in outcome.values(),
            uneven=frozenset(uneven),
            failed=failed,
        )

    def _real(
        self,
        turned: Mapping[str, Mutation],
        outcomes: Mapping[str, str],
        real: dict[str, list[tuple[bool, bool]]],
    ) -> set[str]:
        """Add to `real`, of each required test that is as it is in this run, whether it passed and whether
        nothing can have disturbed it. Returns the turned tests that something may have."""
        behind, first, required = set[str](), "", frozenset(self.required)
        for name, outcome in outcomes.items():
            test = self.test(name)
            if test in turned:
                if first not in ("", test):
                    behind.add(test)
                if outcome != "passed":
                    first = first or test
            elif name in required:
                real[name].append((outcome == "passed", not first))
        for name in self.required:
            if name not in outcomes and self.test(name) not in turned:
                real[name].append((False, True))
        return behind

    def test(self, name: str) -> str:
        """By what stands before the parameters, of which the name of a case may be made."""
        return _test(self.path, name)

    def few(self, found: MutantResults, rng: random.Random) -> MutantRound:
        """Further runs, in which few tests are real and turned in every combination: so each of them and all
        others are seen behind real ones alone, and none tells of another. Tests that passed turned first."""
        tests = rng.sample(self.chosen, len(self.chosen))
        tests.sort(key=lambda test: (test.name not in found.suspects, not test.hidden))
        chosen = tuple(replace(test, ways=test.ways[:1]) for test in tests[:FEW])
        forms = [[None, *test.ways] for test in chosen]
        plan = [
            {test.name: way for test, way in zip(chosen, drawn, strict=True) if way}
            for drawn in itertools.product(*forms)
        ]
        return replace(self, chosen=chosen, plan=tuple(rng.sample(plan, len(plan))))


def _test(path: str, name: str) -> str:
    return name.removeprefix(path + "::").partition("[")[0]


def _outcome(seen: Sequence[tuple[bool, bool]]) -> str:
    """`passed`, `failed`, or empty where it failed and something may have disturbed it every time."""
    sure = [passed for passed, undisturbed in seen if undisturbed]
    if sure:
        return "passed" if all(sure) else "failed"
    return "passed" if any(passed for passed, _ in seen) else ""


def draw(
    path: str,
    text: str,
    fail_to_pass: Sequence[str],
    required: Sequence[str],
    rng: random.Random,
    *,
    seed: str,
    rows: bool = True,
) -> MutantRound:
    """The runs of a file. What forms its tests have follows from `seed`, and `rng` draws which comes when.
    `rows`: of a test with cases one case may be turned."""
    tests = list(dict.fromkeys(_test(path, name) for name in required))
    new = {_test(path, name) for name in fail_to_pass if name.startswith(path + "::")}
    cases = Counter(_test(path, name) for name in required)
    many = {test for test in tests if cases[test] > 1}
    source, found = mutable_tests(text, tests, seed, by_row=many if rows else (), ways=max(RUNS.values()) - 1)
    runs = _runs(found)
    chosen = tuple(replace(test, ways=test.ways[: runs - 1]) for test in found)
    return MutantRound(
        path=path,
        text=text,
        source=source,
        required=tuple(required),
        chosen=chosen,
        plan=_plan(chosen, rng),
        standard=any(test.hidden and test.name in (new or tests) for test in chosen),
    )


def _runs(chosen: Sequence[MutableTest]) -> int:
    return RUNS[min(len(chosen), max(RUNS))]


def _plan(chosen: Sequence[MutableTest], rng: random.Random) -> tuple[Mapping[str, Mutation], ...]:
    """Each test in every form equally often. Tests are not all real in the same runs: what knows one answer
    and fails all in a run where it is another must not be right with that."""
    runs = _runs(chosen)
    while True:
        forms = {test.name: rng.sample(_forms(test, runs), runs) for test in chosen}
        if len(chosen) < 2 or len({tuple(way is None for way in drawn) for drawn in forms.values()}) > 1:
            break
    return tuple({name: way for name, drawn in forms.items() if (way := drawn[n])} for n in range(runs))


def _forms(test: MutableTest, runs: int) -> list[Mutation | None]:
    """The forms of a test in so many runs, None the real one: as many as come equally often."""
    count = max(n for n in range(1, runs + 1) if runs % n == 0 and n <= 1 + len(test.ways))
    return [None, *test.ways[: count - 1]] * (runs // count)
