"""How far the collector may run ahead of the trainer, and what is too old to be trained. Pure arithmetic.

A group takes a place from its draw until the version that it was trained for is live, or until it is
dropped; with (S + 1) * P places and P groups per step, none can be more than S versions behind by admission
alone. Overtaking is bounded by a window anchored at the oldest group. Called by collector.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from insitu.types import Rollout


def places(groups: int, staleness: int) -> int:
    """Groups that may be running, ready or taken for the current version: strict."""
    return (staleness + 1) * groups


def window(share: float, groups: int, staleness: int) -> int:
    """Draws, counted from the oldest active one on, of which a batch may take what is ready."""
    return max(1, int(share * places(groups, staleness)))


def oldest_version(rollout: Rollout) -> int | None:
    """The oldest version among a rollout's trained tokens; None when it has none."""
    found = [
        int(segment.versions[segment.mask].min())
        for segment in rollout.trajectory.segments
        if segment.kind == "sampled" and segment.mask.any()
    ]
    return min(found, default=None)


def too_old(oldest: int | None, version: int, staleness: int) -> bool:
    """Whether tokens of version `oldest` can no longer be trained by a trainer that is at `version`."""
    return oldest is not None and version - oldest > staleness


def slack(oldest: int | None, version: int, staleness: int) -> int:
    """Batches after the next one that could still train tokens of version `oldest`; what nobody has sampled
    yet will not be older than `version`."""
    return staleness if oldest is None else staleness - (version - oldest)


def leaves_room(own: int, slacks: Sequence[int], missing: int, groups: int) -> bool:
    """Whether a group with slack `own` may take one of the `missing` places of the next batch and every group
    with less slack still finds one in time. `slacks`: of all active groups; `groups`: places of a batch."""
    return all(sum(s <= later for s in slacks) < missing + later * groups for later in range(own))
