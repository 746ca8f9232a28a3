"""Log-probability and entropy of chosen tokens, at trained positions only.

`objective` also computes a loss and its gradients in the same pass, where each token's loss depends on its
own log-probability alone; `score` supports any other loss but recomputes logits for the gradients. Logits
exist for a small tile at a time (chunked_logits.py). The distribution is the sampler's: softmax(logits /
temperature) in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from insitu.errors import TrainError
from insitu_train.loss.chunked_logits import ChunkedHead, Kernels, Stats
from insitu_train.model.base import Policy


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of N chosen tokens."""

    logp: Tensor
    """[N] log-probability; carries the gradient."""
    entropy: Tensor
    """[N] entropy in nats; no gradient."""
    best: Tensor
    """[N] bool: the token is the argmax."""


Objective = Callable[[Tensor, slice], Tensor]
"""(logp [n], part) -> weighted losses [n] of the positions `part`, each a function of its own logp."""


class _TokenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        kernels: Kernels,
        soft_cap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = ChunkedHead(
            hidden, weight.detach(), temperature, store=False, kernels=kernels, soft_cap=soft_cap
        )
        found = _ScoreBuffer.empty(targets.shape[0], head)
        for part in head.tiles():
            found.put(part, head.stats(part, targets))
        ctx.save_for_backward(hidden, weight, targets, found.logz)
        ctx.settings = (temperature, kernels, soft_cap)  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(found.entropy, found.best)
        return found.logp, found.entropy, found.best

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_unused):  # type: ignore[no-untyped-def]
        hidden, weight, targets, logz = ctx.saved_tensors
        temperature, kernels, soft_cap = ctx.settings
        head = ChunkedHead(
            hidden, weight.detach(), temperature, store=True, kernels=kernels, soft_cap=soft_cap
        )
        d_hidden = torch.empty_like(hidden)
        d_weight = _zeros(weight, head) if ctx.needs_input_grad[1] else None
        for part in head.tiles():
            stats = head.stats(part, targets, logz[part])
            head.gradients(part, targets, stats, grad[part], d_hidden, d_weight)
        return d_hidden, d_weight, None, None, None, None


@dataclass(frozen=True, slots=True)
class _HeadInputs:
    """Inputs of an objective besides hidden states and the weight."""

    targets: Tensor
    """[N] int64."""
    temperature: float
    loss: Objective
    into: Tensor | None
    """[V, d] float32 to which the weight's gradient is added directly, bypassing autograd."""
    kernels: Kernels
    train: bool
    """Whether to compute gradients."""
    soft_cap: float


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, weight: Tensor, call: _HeadInputs
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head = ChunkedHead(
            hidden,
            weight.detach(),
            call.temperature,
            store=call.train,
            kernels=call.kernels,
            soft_cap=call.soft_cap,
        )
        found = _ScoreBuffer.empty(call.targets.shape[0], head)
        d_hidden = torch.empty_like(hidden) if call.train else None
        d_weight = call.into
        if call.train and d_weight is None and weight.requires_grad:
            d_weight = _zeros(weight, head)
        total = torch.zeros((), dtype=head.dtype, device=hidden.device)
        for part in head.tiles():
            stats = head.stats(part, call.targets)
            found.put(part, stats)
            loss, slope = _slope(call.loss, found.logp[part], part)
            total += loss
            if d_hidden is not None:
                head.gradients(part, call.targets, stats, slope, d_hidden, d_weight)
        if d_hidden is not None:
            ctx.save_for_backward(
                d_hidden, *([d_weight] if d_weight is not None and call.into is None else [])
            )
        ctx.mark_non_differentiable(found.logp, found.entropy, found.best)
        return total, found.logp, found.entropy, found.best

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_unused):  # type: ignore[no-untyped-def]
        d_hidden, *rest = ctx.saved_tensors
        if float(grad) != 1.0:
            if ctx.needs_input_grad[1] and not rest:
                raise TrainError("with `into` the total of a fused head must not be scaled")
            d_hidden, rest = d_hidden * grad, [d * grad for d in rest]
        return d_hidden, rest[0] if rest else None, None


def _slope(loss: Objective, logp: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Return the sum of the part's losses and its derivative by each log-probability."""
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        total = loss(leaf, part).sum()
        # without trained tokens the loss has no gradient
        slope = torch.autograd.grad(total, [leaf])[0] if total.requires_grad else torch.zeros_like(leaf)
    return total.detach(), slope


@dataclass(frozen=True, slots=True)
class _ScoreBuffer:
    """Scores of all positions, filled tile by tile."""

    logp: Tensor
    entropy: Tensor
    best: Tensor
    logz: Tensor

    @classmethod
    def empty(cls, positions: int, head: ChunkedHead) -> _ScoreBuffer:
        make = head.hidden.new_empty
        numbers = [make(positions, dtype=head.dtype) for _ in range(3)]
        return cls(numbers[0], numbers[1], make(positions, dtype=torch.bool), numbers[2])

    def put(self, part: slice, stats: Stats) -> None:
        self.logz[part] = stats.logz
        self.logp[part] = stats.chosen - self.logz[part]
        self.entropy[part] = stats.entropy
        self.best[part] = stats.chosen >= stats.top


def _zeros(weight: Tensor, head: ChunkedHead) -> Tensor:
    return torch.zeros(weight.shape, dtype=head.dtype, device=weight.device)


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """An objective of N chosen tokens with computed gradients."""

    total: Tensor
    """Scalar sum of the losses; carries the gradient."""
    scores: Scores
    """Without gradient."""


def objective(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    loss: Objective,
    *,
    into: Tensor | None = None,
    kernels: Kernels = "auto",
    soft_cap: float = 0.0,
) -> FusedLoss:
    """Return the sum of `loss` over the positions, with gradients, in one pass of three matrix products.

    hidden [N, d], weight [V, d] of any dtype (its gradient is float32), targets [N] int64. Computes in
    hidden's dtype. into: [V, d] float32 to which the weight's gradient is added during the pass instead of by
    autograd; `total` must then enter the loss unscaled. soft_cap: of the logits, 0 = none.
    """
    if not len(targets):
        return FusedLoss(hidden.sum(), _no_scores(hidden))
    train = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    given = into if weight.requires_grad else None
    call = _HeadInputs(targets, temperature, loss, given, kernels, train, soft_cap)
    total, *scores = _Fused.apply(hidden, weight, call)  # type: ignore[no-untyped-call]
    return FusedLoss(total, Scores(*scores))


def kept_gradient(weight: Tensor) -> Tensor | None:
    """Return the head weight's gradient buffer for `into`, zeros if there is none yet.

    None where autograd must handle it: the weight is frozen, not float32, or not a leaf.
    """
    if not (weight.requires_grad and weight.is_leaf and weight.dtype == torch.float32):
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    kernels: Kernels = "auto",
    soft_cap: float = 0.0,
) -> Scores:
    """Return scores for hidden [N, d], weight [V, d] and targets [N] int64.

    logp carries the gradient, in float32. soft_cap: of the logits, 0 = none.
    """
    if not len(targets):
        return _no_scores(hidden)
    return Scores(*_TokenHead.apply(hidden, weight, targets, temperature, kernels, soft_cap))  # type: ignore[no-untyped-call]


def _no_scores(hidden: Tensor) -> Scores:
    """Return the scores of no tokens: those of a row may all be other ranks'."""
    none = hidden.new_zeros(0, dtype=torch.float32)
    return Scores(none, none, none.bool())


def score(model: Policy, hidden: Tensor, targets: Tensor, temperature: float) -> Scores:
    """Return scores under the model for hidden [N, d] at the positions that predict `targets` [N]."""
    return scores(hidden, model.head_weight, targets, temperature, soft_cap=model.soft_cap)


def _predictors(prefix: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shift a batch so that position t of the inputs predicts token t of the targets.

    prefix [P], rows [B, T], mask [B, T] -> (prefix, inputs [B, T'], targets [B, T'], mask [B, T']). The last
    prefix token becomes column 0 of the inputs. Without a prefix the first token has no predictor and its
    mask is ignored. Columns after the last masked one are cut.
    """
    if prefix.shape[0]:
        last = prefix[-1:].expand(rows.shape[0], 1)
        prefix, inputs, targets = prefix[:-1], torch.cat([last, rows[:, :-1]], dim=1), rows
    else:
        inputs, targets, mask = rows[:, :-1], rows[:, 1:], mask[:, 1:]
    used = mask.any(0).nonzero()
    width = int(used[-1]) + 1 if used.numel() else 0
    return prefix, inputs[:, :width], targets[:, :width], mask[:, :width]


def score_masked(
    model: Policy, prefix: Tensor, rows: Tensor, mask: Tensor, temperature: float
) -> tuple[Scores, Tensor]:
    """Return scores of the masked tokens of a batch in row-major order, and their row indices [N].

    prefix [P] int64, rows [B, T] int64 right-padded, mask [B, T] bool with at least one True.
    """
    hidden, targets, row = chosen(model, prefix, rows, mask)
    return score(model, hidden, targets, temperature), row


def chosen(model: Policy, prefix: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [N, d] that predict the masked tokens, those tokens [N] and their rows [N]."""
    prefix, inputs, targets, mask = _predictors(prefix, rows, mask)
    targets, mask = targets.to(model.device), mask.to(model.device)
    hidden = model.hidden(prefix, inputs)
    return hidden[mask], targets[mask], mask.nonzero()[:, 0]
