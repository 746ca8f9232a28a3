"""The runs of one test file: in each, some required tests are mutated, and each test is real in some run.

No run is the real one (decision 0060). Each mutable test is real in some runs and mutated in the others, in
every form equally often. Its forms are the same whenever the file is judged on this machine. So forging code
has to decide for each test and each run whether it is real, without help from order, time or memory.

A mutated test that fails may disturb the tests after it. If a test only failed after such a one, few tests
are mutated in further runs, in forms that were used already, in every combination.
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
"""Mutable tests of a file (4: or more) -> its runs, which is also the most forms of each test."""
FEW = 3
"""Most mutated tests of further runs, after a disturbance."""
MOST_RUNS: int = 2 * RUNS[1] + 2**FEW + 1
"""Most runs of a file: the plan, again without single rows, with few tests, and one for the score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResults:
    """Results of the runs of a round so far."""

    outcomes: Mapping[str, str]
    """Outcomes of required tests that were run unmutated."""
    lost: frozenset[str] = frozenset()
    """Those that failed undisturbed."""
    wrong: frozenset[str] = frozenset()
    """Tests that passed both unmutated and mutated."""
    suspects: frozenset[str] = frozenset()
    """Tests that passed mutated, but maybe disturbed, or that failed unmutated."""
    disturbed: bool = False
    """A test failed after a mutated test had failed."""
    uneven: frozenset[str] = frozenset()
    """Tests with one mutated row whose cases are not those required."""
    failed: int = 0
    """Mutated cases that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantRound:
    """A plan of runs of one file."""

    path: str
    text: str
    source: Source | None
    required: tuple[str, ...]
    chosen: tuple[MutableTest, ...]
    plan: tuple[Mapping[str, Mutation], ...]
    """Per run: test name -> mutation."""
    standard: bool
    """Whether a fail_to_pass test has a mutation that looks real."""

    @property
    def unseen(self) -> tuple[int, int]:
        """Required tests with a mutation that looks real, and all required tests."""
        return sum(test.hidden for test in self.chosen), len({self.test(name) for name in self.required})

    def written(self, run: int) -> str:
        """Return the text of the file for one run."""
        edits = [edit for way in self.plan[run].values() for edit in way.edits]
        return self.source.edited(edits) if self.source is not None else self.text

    def judge(self, runs: Sequence[Mapping[str, str]]) -> MutantResults:
        """Judge the outcomes of the first runs; each mapping is in the order of execution."""
        real: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
        passing, uneven = set[str](), set[str]()
        unsure, caught = set[tuple[str, Mutation]](), set[tuple[str, Mutation]]()
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
                    if test in behind:
                        unsure.add((test, way))
                    else:
                        passing.add(test)
                elif sum(cases) < spared or not cases:
                    disturbed = True
                elif test not in behind:
                    caught.add((test, way))
                failed += len(cases) - max(sum(cases), spared)
        outcome = {name: _outcome(seen) for name, seen in real.items()}
        # A mutation that fails undisturbed passed behind a failed test only because of that one.
        doubted = {test for test, _ in unsure - caught}
        fine = passing & {self.test(name) for name in outcome}
        fine -= {self.test(name) for name, word in outcome.items() if word != "passed"}
        return MutantResults(
            outcomes={name: word or "failed" for name, word in outcome.items()},
            lost=frozenset(name for name, word in outcome.items() if word == "failed"),
            wrong=frozenset(fine),
            suspects=frozenset(doubted | (passing - fine)),
            disturbed=disturbed or bool(doubted) or "" in outcome.values(),
            uneven=frozenset(uneven),
            failed=failed,
        )

    def _real(
        self,
        turned: Mapping[str, Mutation],
        outcomes: Mapping[str, str],
        real: dict[str, list[tuple[bool, bool]]],
    ) -> set[str]:
        """Add (passed, undisturbed) of each unmutated required test to `real`.

        Return the mutated tests that may be disturbed.
        """
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
        """Return the name of a test without its parameters."""
        return _test(self.path, name)

    def few(self, found: MutantResults, rng: random.Random) -> MutantRound:
        """Return further runs with few tests mutated in every combination, suspects first.

        So every test is also run after unmutated ones alone.
        """
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
    """Return `passed`, `failed`, or "" where every failure may be a disturbance."""
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
    """Return the runs of a file. `seed` determines the forms of its tests, `rng` their order.

    `rows`: one case of a parametrized test may be mutated.
    """
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
    """Return runs with each test in every form equally often, and not all tests real in the same runs."""
    runs = _runs(chosen)
    while True:
        forms = {test.name: rng.sample(_forms(test, runs), runs) for test in chosen}
        if len(chosen) < 2 or len({tuple(way is None for way in drawn) for drawn in forms.values()}) > 1:
            break
    return tuple({name: way for name, drawn in forms.items() if (way := drawn[n])} for n in range(runs))


def _forms(test: MutableTest, runs: int) -> list[Mutation | None]:
    """Return the form of a test for each run, unshuffled; None is the real one."""
    count = max(n for n in range(1, runs + 1) if runs % n == 0 and n <= 1 + len(test.ways))
    return [None, *test.ways[: count - 1]] * (runs // count)
