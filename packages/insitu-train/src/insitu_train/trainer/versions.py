"""Check that every trained token was sampled by a version that the trainer accepts."""

from __future__ import annotations

from insitu.errors import TrainError
from insitu_train.plan.step import StepPlan


def check_versions(plan: StepPlan, version: int, max_staleness: int) -> None:
    """Raise TrainError for a version that cannot occur at `version`: a wrong checkpoint, a missed refresh."""
    oldest = version - max_staleness
    for row in plan.rows:
        wrong = row.mask & ((row.versions < oldest) | (row.versions > version))
        if wrong.any():
            token = int(wrong.argmax())
            raise TrainError(
                f"rollout {row.rollout_id} segment {row.segment} token {token} was sampled by version"
                f" {row.versions[token]}, the trainer is at {version} and accepts none older than"
                f" {oldest}: no update"
            )
