"""Which tests of a file are turned in its further runs, and what those runs prove.

Code that sees in the file that something was turned (a value that it knows from the task, two answers to one
question) must not win by failing everything from then on. So never more than half of the tests are turned at
once, and the others must pass again, or the run does not count. After such a run one test is turned at a
time, and only those before it are asked for: a test that a failed one disturbs stands behind it. For the same
reason a turned test that passes behind one that failed is no finding yet: it is turned again, alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from whet.grade.controls import Controlled, with_turned
from whet.grade.runners.pytest_records import Tampered
from whet.grade.turning import MAX_TURNED

TURNS = 3
"""Most further runs of a file, and the number of turned tests that they should come to: an object that equals
whatever it likes must be lucky in each of them."""


class Turns:
    """The further runs of one file. `first`: outcomes of its first run, in the order in which tests ran."""

    def __init__(
        self,
        path: str,
        fail_to_pass: Sequence[str],
        required: Sequence[str],
        first: Mapping[str, str],
        rng: random.Random,
    ) -> None:
        self._path, self._rng = path, rng
        self._first = first
        self._passed = [name for name in first if name in set(required)]
        self._tests = list(dict.fromkeys(self._test(name) for name in self._passed))
        self._new = {self._test(name) for name in fail_to_pass}
        cases = Counter(self._test(name) for name in first)
        failed = {self._test(name) for name, outcome in first.items() if outcome != "passed"}
        self._by_row = frozenset(test for test in self._tests if cases[test] > 1 and test not in failed)
        self._turned: Counter[str] = Counter()
        self._suspects: set[str] = set()
        self._singly = False
        self.proofs = 0
        """Turned tests that failed in runs that count."""

    def turn(self, source: bytes) -> Controlled:
        """The file for the next run. The first is about tests that the task must make pass; then come those
        turned least. Nothing is turned where nothing can be."""
        tests = self._rng.sample(self._tests, len(self._tests))
        tests.sort(key=lambda test: (test not in self._suspects, self._turned[test], test not in self._new))
        if not self._turned:
            made = self._made(source, [test for test in tests if test in self._new])
            if made.turned:
                return made
        return self._made(source, tests)

    def _made(self, source: bytes, tests: Sequence[str]) -> Controlled:
        most = 1 if self._singly else min(MAX_TURNED, (len(self._tests) + 1) // 2)
        return with_turned(source, tests, self._rng, most=most, by_row=self._by_row)

    def count(self, rows: Mapping[str, int], outcomes: Mapping[str, str]) -> int:
        """How many turned ones failed in a run; `rows` as in Turned. Raises Tampered when a test passed that
        must not, and none before it had failed that could have changed what it finds."""
        failed, good = 0, True
        disturbed = self._disturbed(rows, outcomes)
        for test, parts in rows.items():
            cases = [outcome for name, outcome in outcomes.items() if self._test(name) == test]
            passed = sum(outcome in ("passed", "xpassed") for outcome in cases)
            spared = len(cases) - max(1, len(cases) // parts) if cases and parts > 1 else 0
            if passed > spared:
                if test not in disturbed:
                    raise Tampered("a test passes whichever way it is turned")
                self._suspects.add(test)
            failed += len(cases) - max(passed, spared)
            good = good and bool(cases) and passed == spared
        self._turned.update(rows)
        asked = [name for name in self._passed if self._test(name) not in rows]
        if self._singly:
            at = min((n for n, name in enumerate(self._passed) if self._test(name) in rows), default=0)
            asked = [name for name in self._passed[:at] if self._test(name) not in rows]
        if good and all(outcomes.get(name) == "passed" for name in asked):
            self.proofs += len(rows)
            self._suspects -= set(rows)
        else:
            self._singly = True
        return failed

    def _disturbed(self, rows: Mapping[str, int], outcomes: Mapping[str, str]) -> set[str]:
        """Turned tests with a test before them that passed in the first run and failed in this one."""
        found: set[str] = set()
        failed = ""
        for name, outcome in outcomes.items():
            test = self._test(name)
            if failed and failed != test and test in rows:
                found.add(test)
            if outcome != "passed" and (test in rows or self._first.get(name) == "passed"):
                failed = failed or test
        return found

    def _test(self, name: str) -> str:
        """By what stands before the parameters, of which the name of a case may be made."""
        return name.removeprefix(self._path + "::").partition("[")[0]
