"""The runs of one test file: in each, some required tests are mutated, and each test is real in some run.

No run is the real one (decision 0060). Each mutable test is real in some runs and mutated in the others, in
every form equally often, independently of the other tests. Its forms are the same whenever the file is judged
on this machine. So forging code has to decide for each test and each run whether it is real, without help
from order, time, memory or the tests that it solves. The plan is drawn before the first run, and nothing that
a candidate reports changes it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from insitu.grading.mutation.assertions import MutableTest, Mutation, mutable_tests
from insitu.grading.mutation.source_edits import Source

RUNS: Mapping[int, int] = {0: 1, 1: 6, 2: 4}
"""Mutable tests of a file (2: or more) -> its runs, which is also the most forms of each test."""
MOST_RUNS: int = 2 * max(RUNS.values())
"""Most runs of a file: the plan, and again without single rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResults:
    """Results of the runs of a round so far."""

    outcomes: Mapping[str, str]
    """Required test -> `passed` where it passed in every run in which it was real, else `failed`."""
    lost: frozenset[str] = frozenset()
    """Required tests that failed while real, behind no mutated test that failed."""
    guessed: frozenset[str] = frozenset()
    """Tests that passed while mutated."""
    wrong: frozenset[str] = frozenset()
    """Those of `guessed` that no mutated test that failed before them may explain."""
    forged: frozenset[str] = frozenset()
    """Those of `wrong` that also passed wherever they were real."""
    disturbed: frozenset[str] = frozenset()
    """Tests whose outcome a mutated test that failed before them, or no outcome at all, may explain."""
    uneven: frozenset[str] = frozenset()
    """Tests with one mutated row whose cases are not those required."""
    proven: frozenset[str] = frozenset()
    """Mutable tests that passed wherever real and failed wherever mutated."""
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
    weak: str
    """Why a resolved file proves less than `standard` promises; empty where it does not."""

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
        guessed, wrong, disturbed, uneven = set[str](), set[str](), set[str](), set[str]()
        failed = 0
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
                    guessed.add(test)
                    (disturbed if test in behind else wrong).add(test)
                elif sum(cases) < spared or not cases:
                    disturbed.add(test)
                failed += len(cases) - max(sum(cases), spared)
        disturbed |= {self.test(name) for name, seen in real.items() if (False, False) in seen}
        outcome = {
            name: "passed" if all(passed for passed, _ in seen) else "failed" for name, seen in real.items()
        }
        missed = {self.test(name) for name, word in outcome.items() if word != "passed"}
        return MutantResults(
            outcomes=outcome,
            lost=frozenset(name for name, seen in real.items() if (False, True) in seen),
            guessed=frozenset(guessed),
            wrong=frozenset(wrong),
            forged=frozenset(wrong & {self.test(name) for name in outcome} - missed),
            disturbed=frozenset(disturbed),
            uneven=frozenset(uneven),
            proven=frozenset({test.name for test in self.chosen} - missed - wrong - disturbed - uneven),
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

    def credited(self, found: MutantResults, fail_to_pass: Sequence[str]) -> Mapping[str, str]:
        """Return the outcomes that the reward `fraction` counts.

        A fail_to_pass test that is never mutated, or openly, could be forged: it counts once all others of
        the file are proven.
        """
        new = {self.test(name) for name in fail_to_pass}
        hidden = {test.name for test in self.chosen if test.hidden}
        mutated = {test.name for test in self.chosen}
        sure = new & hidden <= found.proven

        def counts(name: str) -> bool:
            test = self.test(name)
            if found.outcomes.get(name) != "passed" or (test in mutated and test not in found.proven):
                return False
            return test in hidden or test not in new or sure

        return {name: "passed" if counts(name) else "failed" for name in found.outcomes}

    def as_it_is(self) -> MutantRound:
        """Return one run without mutations: the tests of this file disturb each other."""
        return replace(self, chosen=(), plan=({},))


def _test(path: str, name: str) -> str:
    return name.removeprefix(path + "::").partition("[")[0]


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
        weak=_weakness(tests, new, chosen),
    )


def _weakness(tests: Sequence[str], new: Collection[str], chosen: Sequence[MutableTest]) -> str:
    """Return why the file is weak: some test that must start to pass could be forged by reading the file."""
    hidden = {test.name for test in chosen if test.hidden}
    fine = hidden | {test.name for test in chosen if test.nothing}
    missing = [test for test in tests if test in new and test not in fine]
    if hidden and not missing:
        return ""
    if not chosen:
        return "no assertion could be turned round"
    if not hidden:
        return "no assertion could be turned unseen"
    return f"{len(missing)} that must start to pass were not, such as {missing[0]}"


def _runs(chosen: Sequence[MutableTest]) -> int:
    return RUNS[min(len(chosen), max(RUNS))]


def _plan(chosen: Sequence[MutableTest], rng: random.Random) -> tuple[Mapping[str, Mutation], ...]:
    """Return runs with each test in every form equally often, drawn for each test by itself."""
    runs = _runs(chosen)
    forms = {test.name: rng.sample(_forms(test, runs), runs) for test in chosen}
    return tuple({name: way for name, drawn in forms.items() if (way := drawn[n])} for n in range(runs))


def _forms(test: MutableTest, runs: int) -> list[Mutation | None]:
    """Return the form of a test for each run, unshuffled; None is the real one."""
    count = max(n for n in range(1, runs + 1) if runs % n == 0 and n <= 1 + len(test.ways))
    return [None, *test.ways[: count - 1]] * (runs // count)
