"""Which tests of a file are turned in its further runs, and what those runs prove.

Code that sees in the file that something was turned (a value that it knows from the task, two answers to one
question) must not win by failing everything from then on. So never more than half of the tests are turned at
once, and the others must pass again, or the run does not count. After such a run one test is turned at a
time, and only those before it are asked for: a test that a failed one disturbs stands behind it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

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
        self._first = [name for name in first if name in set(required)]
        self._tests = list(dict.fromkeys(self._test(name) for name in self._first))
        self._new = {self._test(name) for name in fail_to_pass}
        self._ids = Counter(self._test(name) for name in first)
        failed = {self._test(name) for name, outcome in first.items() if outcome != "passed"}
        self.by_row = frozenset(test for test in self._tests if self._ids[test] > 1 and test not in failed)
        self._turned: Counter[str] = Counter()
        self._singly = False
        self.proofs = 0
        """Turned tests that failed in runs that count."""

    def order(self) -> list[str]:
        """Tests by how well they serve: those turned least, then those that the task is about."""
        tests = self._rng.sample(self._tests, len(self._tests))
        return sorted(tests, key=lambda test: (self._turned[test], test not in self._new))

    def most(self) -> int:
        return 1 if self._singly else min(MAX_TURNED, (len(self._tests) + 1) // 2)

    def count(self, rows: Mapping[str, int], outcomes: Mapping[str, str]) -> int:
        """How many turned ones failed in a run; `rows` as in Turned. Raises Tampered when a test passed that
        must not."""
        failed, good = 0, True
        for test, parts in rows.items():
            cases = [outcome for name, outcome in outcomes.items() if self._test(name) == test]
            passed = sum(outcome in ("passed", "xpassed") for outcome in cases)
            spared = len(cases) - max(1, len(cases) // parts) if cases and parts > 1 else 0
            if passed > spared:
                raise Tampered("a test passes whichever way it is turned")
            failed += len(cases) - spared
            good = good and bool(cases) and (passed == spared or self._singly)
        self._turned.update(rows)
        asked = [name for name in self._first if self._test(name) not in rows]
        if self._singly:
            at = min((n for n, name in enumerate(self._first) if self._test(name) in rows), default=0)
            asked = [name for name in self._first[:at] if self._test(name) not in rows]
        if good and all(outcomes.get(name) == "passed" for name in asked):
            self.proofs += len(rows)
        else:
            self._singly = True
        return failed

    def _test(self, name: str) -> str:
        """By what stands before the parameters, of which the name of a case may be made."""
        return name.removeprefix(self._path + "::").partition("[")[0]
