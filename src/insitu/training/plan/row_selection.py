"""Which rows of a rollout are trained: all of them, or its final chain alone, within the caps asked for.

A row left out keeps its name in the account. Nothing here knows of rewards. Called by step.py and
sft/selection.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from insitu.config import Config
from insitu.errors import TrainError
from insitu.training.plan.prefix import common_prefix
from insitu.types import Rollout, Segment

RowMode = Literal["all", "collapse", "final"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """Choices about rows."""

    mode: RowMode = "all"
    """`all`: every segment is a row. `collapse`: a rollout is its final chain and nothing else; sampled
    tokens of that chain that stand in earlier segments are trained in it, others are as if never sampled.
    `final`: only tokens of the final chain get credit, the others count in the means with none."""
    max_rows: int = 0
    """Most rows of one rollout, 0 = no limit: the first ones and the last stay."""
    max_row_tokens: int = 0
    """Most tokens of one row, 0 = no limit: a longer one is not trained, for the reason `overlong`."""

    @classmethod
    def of(cls, config: Config) -> RowRules:
        """Those of a run's configuration."""
        t = config.train
        return cls(mode=t.rows, max_rows=t.max_rows, max_row_tokens=t.max_row_tokens)


ALL_ROWS = RowRules()
"""Nothing is left out."""


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
    if rules == ALL_ROWS:
        return Chosen(rows=tuple(segments), counted=total, excluded={})
    if rules.mode == "all":
        kept, excluded = list(segments), {}
    else:
        kept = [_collapsed(segments)]
        excluded = {"not_final": total - _tokens(kept)}
    counted = total if rules.mode == "final" else _tokens(kept)
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
