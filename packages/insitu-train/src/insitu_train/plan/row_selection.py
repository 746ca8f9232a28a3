"""Which segments of a rollout are trained: all, or its final chain, within the configured caps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from insitu.config.training import RowRules
from insitu.errors import TrainError
from insitu.types import Ledger, Rollout, Segment
from insitu_train.plan.prefix import common_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The rows of one rollout, in order of index."""

    rows: tuple[Segment, ...] = field(repr=False)
    counted: int
    """Tokens that the rollout's mean runs over; 0 without rows."""
    excluded: Mapping[str, int]
    """Excluded tokens by reason."""


def choose_rows(rollout: Rollout, rules: RowRules) -> Chosen:
    """Return the rows to train. Raises TrainError when the segments contradict capture's ledger."""
    segments, total = _trained(rollout)
    return cut_rows(segments, total, rules)


def cut_rows(segments: Sequence[Segment], total: int, rules: RowRules) -> Chosen:
    """Select among segments of one rollout, in order of index, which have `total` trained tokens."""
    if not segments:
        return Chosen(rows=(), counted=0, excluded={})
    if rules.rows == "all" and not rules.max_rows and not rules.max_row_tokens:
        return Chosen(rows=tuple(segments), counted=total, excluded={})
    if rules.rows == "all":
        kept, excluded = list(segments), {}
    else:
        kept = [_collapsed(segments)]
        excluded = {"not_final": total - _tokens(kept)}
    counted = total if rules.rows == "final" else _tokens(kept)
    capped = _few(kept, rules.max_rows)
    rows = [s for s in capped if not rules.max_row_tokens or len(s.ids) <= rules.max_row_tokens]
    excluded["row_cap"] = _tokens(kept) - _tokens(capped)
    excluded["overlong"] = _tokens(capped) - _tokens(rows)
    return Chosen(
        rows=tuple(rows),
        counted=counted - excluded["row_cap"] - excluded["overlong"] if rows else 0,
        excluded={reason: tokens for reason, tokens in excluded.items() if tokens},
    )


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(int(np.count_nonzero(s.mask)) for s in segments)


def _trained(rollout: Rollout) -> tuple[list[Segment], int]:
    """Return the trainable segments, checked against capture's ledger, and their tokens."""
    segments = [s for s in rollout.trajectory.segments if s.kind == "sampled" and s.mask.any()]
    tokens, ledger = _tokens(segments), rollout.trajectory.ledger
    # Tokens of infrastructure failures and evaluations are excluded before the rollout is stored.
    if ledger.balanced and not ledger.trained and tokens <= _excluded_whole(ledger):
        return [], 0
    if tokens != ledger.trained or not ledger.balanced:
        raise TrainError(
            f"rollout {rollout.id}: segments hold {tokens} trained tokens, the account is {ledger}"
        )
    return sorted(segments, key=lambda s: s.index), tokens


def _excluded_whole(ledger: Ledger) -> int:
    return max(ledger.excluded.get(reason, 0) for reason in ("infra", "evaluation"))


def _few(segments: Sequence[Segment], most: int) -> list[Segment]:
    if not most or len(segments) <= most:
        return list(segments)
    return [*segments[: most - 1], segments[-1]]


def _collapsed(segments: Sequence[Segment]) -> Segment:
    """Return the final chain with all its sampled tokens trained."""
    labelled = [s for s in segments if s.label == "final"]
    final = (labelled or segments)[-1]
    # a turn that several chains share is masked in only in the first of them
    mask, logprobs, versions = final.mask.copy(), final.logprobs.copy(), final.versions.copy()
    for other in segments:
        if other is not final:
            same = common_prefix(other.ids, final.ids)
            take = np.flatnonzero(other.mask[:same] & ~mask[:same])
            mask[take] = True
            logprobs[take], versions[take] = other.logprobs[take], other.versions[take]
    return replace(final, mask=mask, logprobs=logprobs, versions=versions)
