"""What runners say of required tests: how many pass, which fail, what share earns a part of the reward."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from insitu.grading.runners.common import failing_checks
from insitu.types import FailingCheck, HiddenTests


def share(tests: HiddenTests, fixed: int, kept: int) -> float:
    """Return the reward `fraction`: share of tests fixed times share of tests not broken."""
    score = fixed / max(1, len(tests.fail_to_pass))
    return score * kept / len(tests.pass_to_pass) if tests.pass_to_pass else score


def failing_tests(
    tests: HiddenTests, outcomes: Mapping[str, str], fixed: Collection[str], kept: Collection[str]
) -> tuple[FailingCheck, ...]:
    """Return the required tests whose outcome is not among `fixed` (fail_to_pass) or `kept` (the others)."""
    required = [(name, fixed) for name in tests.fail_to_pass] + [(name, kept) for name in tests.pass_to_pass]
    return failing_checks(
        FailingCheck(name=name, outcome=outcomes.get(name, "missing"))
        for name, good in required
        if outcomes.get(name) not in good
    )


def passing(tests: HiddenTests, passed: int, known: Mapping[str, str]) -> str:
    """Return the reason: how many required tests pass, and whether they ran."""
    required = (*tests.fail_to_pass, *tests.pass_to_pass)
    missing = sum(name not in known for name in required)
    skipped = sum(known.get(name, "").lower() == "skipped" for name in required)
    text = f"{passed} of {len(required)} tests pass"
    if missing + skipped == len(required):
        return f"{text}: none of them ran, {missing} are missing and {skipped} were skipped"
    return text + (f", {missing} are missing" if missing else "")
