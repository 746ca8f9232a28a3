"""Phases of a run, as its rollouts are stored by them.

`train`; `eval_before`, `eval_during`, `eval_after` for the run's held-out score, which is its first
evaluation; the same and .NAME for every other evaluation; `rollout` and `serve` in runs without training.
"""

from __future__ import annotations

from typing import Literal

When = Literal["before", "during", "after"]
_OTHER = "."


def eval_phase(when: When, name: str = "") -> str:
    """Return the phase of an evaluation; `name`: of one that is not the first."""
    return f"eval_{when}{_OTHER}{name}" if name else f"eval_{when}"


def is_heldout(phase: str) -> bool:
    """Return whether the phase is of the run's held-out score."""
    return phase.startswith("eval") and _OTHER not in phase


def eval_name(phase: str) -> str:
    """Return the name of another evaluation than the first; empty for any other phase."""
    return phase.partition(_OTHER)[2] if phase.startswith("eval") else ""
