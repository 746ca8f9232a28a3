"""Which rows of a rollout are trained: all of them, or its final chain alone, within the caps asked for.

A row left out keeps its name in the account. Nothing here knows of rewards. Called by step.py and
sft/selection.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from insitu.config.training import RowRules
from insitu.errors import TrainError
from insitu.training.plan.prefix import common_prefix
from insitu.types import Rollout, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The rows of one rollout."""

    rows: tuple[Segment, ...] = field(repr=False)
    """In order of index."""
    counted: int
    """Tokens over which a mean of this rollout runs."""
    excluded: Mapping[str, int]
    """Tokens that are left out, by reason."""


def choose_rows(rollout: Rollout, rules: RowRules) -> Chosen:
    """The rows to train. Raises TrainError when the segments do not match capture's own account."""
    segments, total = _trained(rollout)
    return cut_rows(segments, total, rules)


def cut_rows(segments: Sequence[Segment], total: int, rules: RowRules) -> Chosen:
    """The rows among segments of one rollout, in order of index, each with something to train: `total` tokens
    together."""
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
        counted=counted - excluded["row_cap"] - excluded["overlong"],
        excluded={reason: tokens for reason, tokens in excluded.items() if tokens},
    )


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(int(np.count_nonzero(s.mask)) for s in segments)


def _trained(rollout: Rollout) -> tuple[list[Segment], int]:
    """Segments that reinforcement learning may train, checked against capture's own account; their tokens."""
    segments = [s for s in rollout.trajectory.segments if s.kind == "sampled" and s.mask.any()]
    tokens, ledger = _tokens(segments), rollout.trajectory.ledger
    if tokens != ledger.trained or not ledger.balanced:
        raise TrainError(
            f"rollout {rollout.id}: segments hold {tokens} trained tokens, the account is {ledger}"
        )
    return sorted(segments, key=lambda s: s.index), tokens


def _few(segments: Sequence[Segment], most: int) -> list[Segment]:
    if not most or len(segments) <= most:
        return list(segments)
    return [*segments[: most - 1], segments[-1]]


def _collapsed(segments: Sequence[Segment]) -> Segment:
    """The final chain with all sampled tokens on it. A turn that several chains share is masked in only in
    the first of them, so what those have in common with the final chain is taken over from them."""
    named = [s for s in segments if s.label == "final"]
    final = (named or segments)[-1]
    mask, logprobs, versions = final.mask.copy(), final.logprobs.copy(), final.versions.copy()
    for other in segments:
        if other is not final:
            same = common_prefix(other.ids, final.ids)
            take = np.flatnonzero(other.mask[:same] & ~mask[:same])
            mask[take] = True
            logprobs[take], versions[take] = other.logprobs[take], other.versions[take]
    return replace(final, mask=mask, logprobs=logprobs, versions=versions)
