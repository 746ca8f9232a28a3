"""Checks of generations, and the ledger: why a turn is not trained.

Every sampled token is captured; it is trained, or excluded for exactly one reason. `exclusion_reasons`
decides per turn, from the forest alone; an excluded turn is never included later.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import pairwise

import numpy as np

from insitu.capture.nodes import ContextNode, Nodes, SampledNode
from insitu.errors import CaptureError
from insitu.types import EXCLUSIONS, FloatArray, Generation, Ledger, VersionRuns


def check_generation(where: str, generation: Generation, *, synthetic: bool) -> None:
    """Check invariants 1 and 2; `where` names rollout and turn. Raises CaptureError with the token index."""
    ids = generation.ids
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise CaptureError(f"{where}: sampled ids are {ids.dtype}{list(ids.shape)}, not a row of int32")
    if ids.size and np.minimum.reduce(ids) < 0:
        raise CaptureError(f"{where} token {int(np.argmax(ids < 0))}: a sampled id is negative")
    if not ids.size and generation.finish != "abort" and not synthetic:
        raise CaptureError(f"{where}: no id was sampled, yet the finish is {generation.finish!r}")
    if synthetic and generation.logprobs is not None:
        raise CaptureError(f"{where}: a synthetic reply was not sampled and can have no logprobs")
    if generation.logprobs is not None:
        _check_logprobs(where, generation.logprobs, len(ids))
    if (experts := generation.experts) is not None and (experts.dtype != np.int16 or experts.ndim != 3):
        raise CaptureError(f"{where}: experts are {experts.dtype}{list(experts.shape)}, not rows of int16")
    _check_runs(where, generation.version_runs, len(ids), synthetic=synthetic)


def _check_logprobs(where: str, logprobs: FloatArray, count: int) -> None:
    if logprobs.dtype != np.float32 or logprobs.ndim != 1:
        shape = list(logprobs.shape)
        raise CaptureError(f"{where}: logprobs are {logprobs.dtype}{shape}, not a row of float32")
    if len(logprobs) != count:
        token = min(len(logprobs), count)
        raise CaptureError(f"{where} token {token}: {len(logprobs)} logprobs for {count} sampled ids")
    # Two passes decide: neither comparison holds where there is a NaN.
    if not count or (np.maximum.reduce(logprobs) <= 0 and np.minimum.reduce(logprobs) > -np.inf):
        return
    token = int(np.argmax(~(np.isfinite(logprobs) & (logprobs <= 0))))
    raise CaptureError(f"{where} token {token}: logprob {logprobs[token]} is not finite and <= 0")


def _check_runs(where: str, runs: VersionRuns, count: int, *, synthetic: bool) -> None:
    if not runs and (synthetic or not count):
        return
    if not runs or runs[0][0] != 0:
        raise CaptureError(f"{where} token 0: no policy version is known for the first sampled id")
    starts = [start for start, _ in runs]
    for before, start in pairwise(starts):
        if start <= before:
            raise CaptureError(f"{where} token {start}: version runs are not in order")
    if starts[-1] >= max(count, 1):
        raise CaptureError(f"{where} token {starts[-1]}: a version run starts after the last sampled id")
    if any(version < 0 for _, version in runs):
        raise CaptureError(f"{where}: a policy version is negative")


def exclusion_reasons(nodes: Nodes, auxiliary: Set[int]) -> dict[int, str]:
    """Return the reason why each sampled node is not trained, or empty.

    `auxiliary` are tops of auxiliary trees. A demonstrated turn is eligible here: the ledger and
    `Turn.excluded` name it later.
    """
    reasons: dict[int, str] = {}
    for context in nodes.contexts():
        reasons.update(_sibling_reasons(nodes, context))
    for node in nodes.turns():
        if not reasons[node.id] and node.top in auxiliary:
            reasons[node.id] = "auxiliary"
    return reasons


def _sibling_reasons(nodes: Nodes, context: ContextNode) -> dict[int, str]:
    """Return the reasons of the turns sampled from one prompt.

    Only turns that the client received count. As many are kept as there were `pending_samples`: first those
    seen in a later request, then those delivered last. A retry of a lost sample adds none, a parallel twin
    adds one: both twins are kept when the agent continues one of them, and one of a retry and what it
    replaced.
    """
    turns = [nodes.sampled(child) for child in context.children]
    reasons = {turn.id: _own_reason(turn) for turn in turns}
    left = [turn for turn in turns if not reasons[turn.id]]
    left.sort(key=lambda turn: (turn.seen_by_client, turn.delivered), reverse=True)
    losers = [turn for turn in left[context.pending_samples :] if not turn.seen_by_client]
    reasons.update((turn.id, "retry_sibling") for turn in losers)
    return reasons


def _own_reason(turn: SampledNode) -> str:
    if turn.synthetic:
        return "synthetic"
    if turn.excluded:
        return turn.excluded
    return "" if turn.delivered or turn.seen_by_client else "undelivered"


def final_reason(turn: SampledNode, reason: str) -> str:
    """Return why no token of this turn may be trained by RL, or empty."""
    return reason or ("demonstrated" if turn.kind == "demonstrated" else "")


def account(nodes: Nodes, reasons: Mapping[int, str], trained: int) -> Ledger:
    """Return the ledger of a session. Raises CaptureError when it does not balance or a reason is unknown."""
    excluded: dict[str, int] = {}
    captured = 0
    for turn in nodes.turns():
        captured += len(turn.generation.ids) + turn.discarded
        reason = final_reason(turn, reasons[turn.id])
        if reason and len(turn.generation.ids):
            excluded[reason] = excluded.get(reason, 0) + len(turn.generation.ids)
        if turn.discarded:
            excluded["after_stop"] = excluded.get("after_stop", 0) + turn.discarded
    ledger = Ledger(captured=captured, trained=trained, excluded=excluded)
    if not ledger.balanced or not EXCLUSIONS.issuperset(excluded):
        raise CaptureError(
            f"rollout {nodes.rollout_id}: the ledger does not balance: captured {captured}, "
            f"trained {trained}, excluded {excluded}"
        )
    return ledger


def reassign(ledger: Ledger, reason: str, tokens: int | None = None) -> Ledger:
    """Return the ledger with `tokens` of the trained ones (default: all) excluded for `reason`.

    For rollouts that are stale, degenerate, an evaluation, ... Tokens already excluded keep their reason.
    Raises CaptureError for a reason outside EXCLUSIONS and for more tokens than there are.
    """
    if reason not in EXCLUSIONS:
        raise CaptureError(f"no such reason to exclude: {reason!r}")
    moved = ledger.trained if tokens is None else tokens
    if not 0 <= moved <= ledger.trained:
        raise CaptureError(f"{moved} tokens cannot be excluded as {reason}: {ledger.trained} are trained")
    excluded = dict(ledger.excluded)
    if moved:
        excluded[reason] = excluded.get(reason, 0) + moved
    return Ledger(captured=ledger.captured, trained=ledger.trained - moved, excluded=excluded)
