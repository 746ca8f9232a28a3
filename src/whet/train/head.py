"""The head of the trainer: log-probability and entropy of chosen tokens, for trained positions only.

Logits exist for one tile of positions at a time, in the forward and again in the backward pass, so memory
does not grow with positions x vocabulary. The distribution is softmax(logits / temperature) in float32: the
one the sampler draws from. Called by trainer.py and sft.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet.train.policy import Policy

TILE = 2048
"""Positions whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model thinks of N chosen tokens."""

    logp: Tensor
    """[N] log-probability; carries the gradient."""
    entropy: Tensor
    """[N] entropy of the distribution, in nats; no gradient."""
    best: Tensor
    """[N] bool: the token is the most likely one."""


class _TokenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        logp = hidden.new_empty(targets.shape[0], dtype=torch.float32)
        entropy = torch.empty_like(logp)
        best = torch.empty(targets.shape[0], dtype=torch.bool, device=hidden.device)
        for at in range(0, targets.shape[0], TILE):
            part = slice(at, at + TILE)
            lp = torch.log_softmax((hidden[part] @ weight.T).float() / temperature, dim=-1)
            logp[part] = lp.gather(1, targets[part, None])[:, 0]
            entropy[part] = -(lp.exp() * lp).sum(-1)
            best[part] = lp.argmax(-1) == targets[part]
        ctx.mark_non_differentiable(entropy, best)
        return logp, entropy, best

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_unused):  # type: ignore[no-untyped-def]
        hidden, weight, targets = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for at in range(0, targets.shape[0], TILE):
            part = slice(at, at + TILE)
            d = -torch.softmax((hidden[part] @ weight.T).float() / ctx.temperature, dim=-1)
            d[torch.arange(d.shape[0]), targets[part]] += 1.0
            d *= (grad[part] / ctx.temperature)[:, None]
            d = d.to(weight.dtype)
            d_hidden[part] = d @ weight
            d_weight.addmm_(d.T, hidden[part])
        return d_hidden, d_weight, None, None


def score(model: Policy, hidden: Tensor, targets: Tensor, temperature: float) -> Scores:
    """hidden [N, d] at the positions that predict `targets` [N] (int64) -> scores under the model."""
    weight = model.head_weight.to(hidden.dtype)
    return Scores(*_TokenHead.apply(hidden, weight, targets, temperature))  # type: ignore[no-untyped-call]


def predictors(prefix: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shift a batch so that position t of the new rows predicts token t of the new targets.

    prefix [P], rows [B, T], mask [B, T] -> (prefix, inputs [B, T'], targets [B, T'], mask [B, T']).
    The last prefix token becomes column 0 of the inputs, because it predicts the rows' first token; without
    a prefix the first token has no predictor and its mask is ignored by construction (callers refuse it).
    Columns after the last masked one are cut: nothing depends on them.
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
    """Scores of the masked tokens of a batch in row-major order, and the row index of each, [N].

    prefix [P] int64, rows [B, T] int64 right-padded, mask [B, T] bool; at least one token is masked in.
    """
    prefix, inputs, targets, mask = predictors(prefix, rows, mask)
    targets, mask = targets.to(model.device), mask.to(model.device)
    hidden = model.hidden(prefix, inputs)
    row = mask.nonzero()[:, 0]
    return score(model, hidden[mask], targets[mask], temperature), row
