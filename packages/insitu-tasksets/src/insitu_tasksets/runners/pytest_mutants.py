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

from insitu_tasksets.mutation.assertions import MutableTest, Mutation, mutable_tests
from insitu_tasksets.mutation.source_edits import Source

RUNS: Mapping[int, int] = {0: 1, 1: 6, 2: 4}
"""Mutable tests of a file (2: or more) -> its runs, which is also the most forms of each test."""
MOST_RUNS: int = max(RUNS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResults:
    """Results of the runs of a round so far."""

    outcomes: Mapping[str, str]
    """Required test -> `passed` where it passed in every run in which it was real, else `failed`."""
    keys: Mapping[str, str]
    """Required test -> its mutable test."""
    lost: frozenset[str] = frozenset()
    """Required tests that failed while real, behind no mutated test that failed."""
    guessed: frozenset[str] = frozenset()
    """Mutable tests, as all below, that passed while mutated."""
    wrong: frozenset[str] = frozenset()
    """Those of `guessed` that no mutated test that failed before them may explain."""
    forged: frozenset[str] = frozenset()
    """Those of `wrong` that also passed wherever they were real."""
    disturbed: frozenset[str] = frozenset()
    """Tests whose outcome a mutated test that failed before them, or no outcome at all, may explain."""
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
    """Per run: key of a mutable test -> mutation."""
    weak: str
    """Why a resolved file proves less than `standard` promises; empty where it does not."""

    @property
    def unseen(self) -> tuple[int, int]:
        """Required tests with a mutation that looks real, and all required tests."""
        return sum(test.hidden for test in self.chosen), len(self.required)

    def written(self, run: int) -> str:
        """Return the text of the file for one run."""
        edits = [edit for way in self.plan[run].values() for edit in way.edits]
        return self.source.edited(edits) if self.source is not None else self.text

    def judge(self, runs: Sequence[Mapping[str, str]]) -> MutantResults:
        """Judge the outcomes of the first runs; each mapping is in the order of execution."""
        real: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
        keys = {name: self.test(name) for name in self.required}
        guessed, wrong, disturbed = set[str](), set[str](), set[str]()
        failed, rows = 0, self._row_keys
        for turned, outcomes in zip(self.plan, runs, strict=False):
            met, first = set[str](), ""
            for name, key in self._keys(outcomes).items():
                word = outcomes[name]
                if key in turned:
                    met.add(key)
                    if word in ("passed", "xpassed"):
                        guessed.add(key)
                        (wrong if first in ("", key) else disturbed).add(key)
                    else:
                        failed += 1
                    first = first or ("" if word == "passed" else key)
                elif name in keys and key:
                    keys[name] = key
                    real[name].append((word == "passed", not first))
                else:
                    disturbed |= set(rows.get(self.test(name), ()))
            disturbed |= turned.keys() - met
            for name in self.required:
                test = self.test(name)
                if name not in outcomes and test not in turned and test not in rows:
                    real[name].append((False, True))
        disturbed |= {keys[name] for name, seen in real.items() if (False, False) in seen}
        outcome = {
            name: "passed" if all(passed for passed, _ in seen) else "failed" for name, seen in real.items()
        }
        missed = {keys[name] for name, word in outcome.items() if word != "passed"}
        return MutantResults(
            outcomes=outcome,
            keys=keys,
            lost=frozenset(name for name, seen in real.items() if (False, True) in seen),
            guessed=frozenset(guessed),
            wrong=frozenset(wrong),
            forged=frozenset(wrong & {keys[name] for name in outcome} - missed),
            disturbed=frozenset(disturbed),
            proven=frozenset({test.key for test in self.chosen} - missed - wrong - disturbed),
            failed=failed,
        )

    def _keys(self, outcomes: Mapping[str, str]) -> Mapping[str, str]:
        """Return the mutable test of each case: of a row by its place, as its id may hold the mutated value.

        Empty where the cases are not the rows.
        """
        cases: dict[str, list[str]] = defaultdict(list)
        for name in outcomes:
            cases[self.test(name)].append(name)
        keys = {name: test for test, names in cases.items() for name in names}
        for test, rows in self._row_keys.items():
            names = cases[test]
            keys |= zip(names, rows if len(names) == len(rows) else [""] * len(names), strict=True)
        return {name: keys[name] for name in outcomes}

    @property
    def _row_keys(self) -> Mapping[str, list[str]]:
        """Return the rows of each test of which each row is mutated by itself."""
        found: dict[str, list[str]] = defaultdict(list)
        for test in self.chosen:
            if test.row is not None:
                found[test.name].append(test.key)
        return found

    def test(self, name: str) -> str:
        """Return the name of a test without its parameters."""
        return _test(self.path, name)

    def credited(self, found: MutantResults, fail_to_pass: Sequence[str]) -> Mapping[str, str]:
        """Return the outcomes that the reward `fraction` counts.

        A fail_to_pass test that is never mutated, or openly, could be forged: it counts once all others of
        the file are proven.
        """
        new = {self.test(name) for name in fail_to_pass}
        hidden = {test.key for test in self.chosen if test.hidden}
        mutated = {test.key for test in self.chosen}
        sure = {test.key for test in self.chosen if test.hidden and test.name in new} <= found.proven

        def counts(name: str) -> bool:
            key = found.keys[name]
            if found.outcomes[name] != "passed" or (key in mutated and key not in found.proven):
                return False
            return key in hidden or self.test(name) not in new or sure

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
) -> MutantRound:
    """Return the runs of a file. `seed` determines the forms of its tests, `rng` their order."""
    tests = list(dict.fromkeys(_test(path, name) for name in required))
    new = {_test(path, name) for name in fail_to_pass if name.startswith(path + "::")}
    cases = Counter(_test(path, name) for name in required if name.endswith("]"))
    source, found = mutable_tests(text, tests, seed, cases=cases, ways=max(RUNS.values()) - 1)
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
    hidden = any(test.hidden for test in chosen)
    known = {test.name for test in chosen}
    open_ = {test.name for test in chosen if not (test.hidden or test.nothing)}
    missing = [test for test in tests if test in new and (test not in known or test in open_)]
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
    forms = {test.key: rng.sample(_forms(test, runs), runs) for test in chosen}
    return tuple({name: way for name, drawn in forms.items() if (way := drawn[n])} for n in range(runs))


def _forms(test: MutableTest, runs: int) -> list[Mutation | None]:
    """Return the form of a test for each run, unshuffled; None is the real one."""
    count = max(n for n in range(1, runs + 1) if runs % n == 0 and n <= 1 + len(test.ways))
    return [None, *test.ways[: count - 1]] * (runs // count)
