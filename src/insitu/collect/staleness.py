"""Staleness arithmetic: how far the collector may run ahead of the trainer, and what is too old to train.

A group occupies a place from its draw until the version that it was trained for is live, or until it is
dropped. With (S + 1) * P places and P groups per step, admission alone keeps every group within S versions.
Overtaking is bounded by a window that starts at the oldest group.
"""

from __future__ import annotations

from collections.abc import Sequence

from insitu.types import Rollout


def places(groups: int, staleness: int) -> int:
    """Return how many groups may be running, ready or taken for the current version."""
    return (staleness + 1) * groups


def window(share: float, groups: int, staleness: int) -> int:
    """Return how many draws, counted from the oldest active one, a batch may choose from."""
    return max(1, int(share * places(groups, staleness)))


def oldest_version(rollout: Rollout) -> int | None:
    """Return the oldest version among a rollout's trained tokens; None if it has none."""
    found = [
        int(segment.versions[segment.mask].min())
        for segment in rollout.trajectory.segments
        if segment.kind == "sampled" and segment.mask.any()
    ]
    return min(found, default=None)


def too_old(oldest: int | None, version: int, staleness: int) -> bool:
    """Return whether tokens of version `oldest` can no longer be trained at `version`."""
    return oldest is not None and version - oldest > staleness


def slack(oldest: int | None, version: int, staleness: int) -> int:
    """Return how many batches after the next one could still train tokens of version `oldest`.

    Tokens not yet sampled (None) will not be older than `version`.
    """
    return staleness if oldest is None else staleness - (version - oldest)


def leaves_room(own: int, slacks: Sequence[int], missing: int, groups: int) -> bool:
    """Return whether a group with slack `own` may take a place and all groups with less slack still fit.

    `slacks`: of all active groups; `missing`: free places of the next batch; `groups`: places of a batch.
    """
    return all(sum(s <= later for s in slacks) < missing + later * groups for later in range(own))
