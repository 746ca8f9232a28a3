"""Builds the Verdict. The reward is None only when the host failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from insitu._version import __version__
from insitu.grading.diff import PROTECTED_FOLDERS, Diff
from insitu.grading.runners.base import RunReport
from insitu.types import FailingCheck, Outcome, RewardKind, Trust, Verdict

GRADER = 12
"""Version; bump with every change that can change a verdict."""

MAX_REASON_CHARS = 300
NOTHING_CHANGED = "nothing changed"
"""How the reason of a verdict on a tree that equals the task's begins."""
MAX_NAMED = 20
MAX_LISTED = 200


def make_verdict(
    report: RunReport,
    *,
    trust: Trust,
    task_hash: str,
    diff: Diff | None,
    duration_s: float,
    kind: RewardKind = "binary",
    image: str = "",
) -> Verdict:
    """Return the verdict: reward 1.0 when resolved, None when infra, else 0.0.

    With kind `fraction` unresolved and timed-out grades keep their score.
    """
    reward = 1.0 if report.outcome is Outcome.RESOLVED else 0.0
    if kind == "fraction" and report.outcome in (Outcome.UNRESOLVED, Outcome.TEST_TIMEOUT):
        share = report.passed / report.total if report.total else 0.0
        reward = share if report.score is None else report.score
    reason = report.reason
    ran = report.outcome not in (Outcome.INFRA, Outcome.REFUSED) and reason != NOTHING_CHANGED
    if ran and diff is not None and diff.empty:
        reason = f"{NOTHING_CHANGED}: {reason}"
    if diff is not None and diff.suspicious:
        reason += "; shadows the standard library: " + ", ".join(diff.suspicious)
    return Verdict(
        outcome=report.outcome,
        reward=None if report.outcome is Outcome.INFRA else reward,
        trust=trust,
        passed=report.passed,
        total=report.total,
        fail_to_pass=report.fail_to_pass,
        pass_to_pass=report.pass_to_pass,
        controls=report.controls,
        image=image,
        grader=f"insitu {__version__}/{GRADER}",
        dropped_paths=() if diff is None else (*_gathered(diff.dropped), *_gathered(diff.left_out)),
        reason=reason[:MAX_REASON_CHARS],
        task_hash=task_hash,
        diff_hash="" if diff is None else diff.digest,
        duration_s=duration_s,
        evidence=report.failing,
    )


def with_ending(verdict: Verdict, ending: str) -> Verdict:
    """Return a verdict whose reason also says how the rollout ended."""
    reason = f"{verdict.reason}; {ending}" if ending else verdict.reason
    return replace(verdict, reason=reason[:MAX_REASON_CHARS])


def gold_fails(outcome: Outcome, reason: str, failing: Sequence[FailingCheck]) -> str:
    """Return what is wrong with a solution that does not pass, with the end of the tests' output."""
    tail = next((" ".join(one.tail.split())[-160:] for one in failing if one.tail), "")
    return f"the gold fails ({outcome}): {reason}" + (f"; the output ends: {tail}" if tail else "")


def _gathered(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths, with folders of many paths summarised and the list capped."""
    kept: list[str] = []
    inside: dict[str, list[str]] = {}
    for path in paths:
        parts = path.split("/")
        depth = next((n for n, part in enumerate(parts) if part in PROTECTED_FOLDERS), 0)
        if len(parts) == 1:
            kept.append(path)
        else:
            inside.setdefault("/".join(parts[: depth + 1]), []).append(path)
    for folder, among in inside.items():
        kept += among if len(among) <= MAX_NAMED else [f"{folder}/ ({len(among)} files)"]
    kept.sort()
    if len(kept) > MAX_LISTED:
        kept[MAX_LISTED:] = [f"and {len(kept) - MAX_LISTED} more"]
    return tuple(kept)
