"""The heads that `python -m benchmarks head` compares: insitu's, TRL's, Liger's and whole logits. Callers:
head.

Each takes a Problem and returns the gradients of one clipped policy-gradient loss over its trained positions.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from insitu_train.loss.fused_head import objective

LOW, HIGH = 0.2, 0.28
TRL_COLUMNS = 32768
"""Columns of a tile, as TRL 1.16's trainers choose."""
SEQUENCE = 8192
"""Most positions of one sequence, which Liger takes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """N positions in front of a head, some of them trained."""

    hidden: Tensor
    """[N, d]"""
    weight: Tensor
    """[V, d] in the states' dtype, as peers keep it."""
    master: Tensor
    """[V, d] the same in float32, as insitu's trainer keeps it: the copy that it computes with is its own."""
    targets: Tensor
    """[N] int64"""
    mask: Tensor
    """[N] bool: trained."""
    mu: Tensor
    """[N] float32: log-probabilities of the sampler."""
    advantage: Tensor
    """[N] float32"""

    @property
    def trained(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class Grads:
    """What a side computed, over trained positions in order."""

    logp: Tensor | None
    d_hidden: Tensor
    d_weight: Tensor


Side = Callable[[Problem], Grads]


def clipped(logp: Tensor, mu: Tensor, advantage: Tensor, count: int) -> Tensor:
    ratio = (logp.float() - mu).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage) / count


def insitu_side(p: Problem) -> Grads:
    hidden = p.hidden[p.mask].requires_grad_()
    weight = p.master.detach().requires_grad_()
    mu, advantage, count = p.mu[p.mask], p.advantage[p.mask], p.trained
    # a trainer adds to the gradient that it keeps
    kept = torch.zeros(p.master.shape, dtype=torch.float32, device=p.master.device)
    out = objective(
        hidden,
        weight,
        p.targets[p.mask],
        1.0,
        lambda logp, part: clipped(logp, mu[part], advantage[part], count),
        into=kept,
    )
    out.total.backward()  # type: ignore[no-untyped-call]
    return Grads(out.scores.logp, _grad(hidden), kept)


def naive_side(p: Problem) -> Grads:
    """Whole logits of all positions, as an unmodified causal language model makes them."""
    hidden, weight = p.hidden.detach().requires_grad_(), p.weight.detach().requires_grad_()
    whole = torch.log_softmax((hidden @ weight.T).float(), -1)
    logp = whole.gather(1, p.targets[:, None])[:, 0]
    with torch.no_grad():
        # computed by every trainer that reports it
        _ = -(whole.exp() * whole).sum(-1)
    (clipped(logp, p.mu, p.advantage, p.trained) * p.mask).sum().backward()  # type: ignore[no-untyped-call]
    return Grads(logp.detach()[p.mask], _grad(hidden)[p.mask], _grad(weight))


def trl_side(p: Problem) -> Grads:
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight = p.hidden[p.mask].requires_grad_(), p.weight.detach().requires_grad_()
    found = ChunkedLogProbFunction.apply(
        hidden, weight, None, p.targets[p.mask], 1.0, TRL_COLUMNS, None, 1.0, ("entropy",)
    )
    clipped(found[0], p.mu[p.mask], p.advantage[p.mask], p.trained).sum().backward()  # type: ignore[no-untyped-call]
    return Grads(found[0].detach(), _grad(hidden), _grad(weight))


def liger_side(p: Problem) -> Grads:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, weight = p.hidden.detach().requires_grad_(), p.weight.detach().requires_grad_()
    rows = -(-len(p.targets) // SEQUENCE)
    while len(p.targets) % rows:
        rows += 1
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        epsilon_low=LOW,
        epsilon_high=HIGH,
        use_ref_model=False,
        loss_type="dapo",
        compiled=p.hidden.is_cuda,
    )
    # one advantage for each sequence is all that it takes: times, not gradients, can be compared
    total = loss(
        hidden.view(rows, -1, hidden.shape[1]),
        weight,
        p.targets.view(rows, -1),
        p.mask.view(rows, -1).long(),
        p.advantage[:rows].contiguous(),
        old_per_token_logps=p.mu.view(rows, -1),
    )
    (total[0] if isinstance(total, tuple) else total).backward()
    return Grads(None, _grad(hidden)[p.mask], _grad(weight))


def _grad(leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        raise RuntimeError("a side left no gradient")
    return leaf.grad


def sides(device: torch.device, *, peers: bool) -> tuple[dict[str, Side], dict[str, str]]:
    """Every side that can run here, and why the others cannot; insitu alone without `peers`."""
    absent: dict[str, str] = {}
    if not peers:
        return {"insitu": insitu_side}, absent
    found: dict[str, Side] = {"insitu": insitu_side, "naive": naive_side}
    for name, module, side in (("trl", "trl", trl_side), ("liger", "liger_kernel", liger_side)):
        if importlib.util.find_spec(module) is None:
            absent[name] = f"{module} is not installed"
        elif name == "liger" and device.type != "cuda":
            absent[name] = "needs a GPU"
        else:
            reason = _broken(side, device)
            if reason:
                absent[name] = reason
            else:
                found[name] = side
    return found, absent


def _broken(side: Side, device: torch.device) -> str:
    """Why a peer does not run: its line, or empty. Peers are others' code in versions we do not choose."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            side(problem(positions=8, hidden=16, vocab=64, trained=1.0, device=device))
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def problem(
    *,
    positions: int,
    hidden: int,
    vocab: int,
    trained: float,
    device: torch.device,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Problem:
    """Random states and weights with distributions of some nats of entropy; dtype: bfloat16 on a GPU, float32
    on a CPU unless given."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    count = max(1, round(positions * trained))
    mask = torch.zeros(positions, dtype=torch.bool, device=device)
    # runs of trained tokens, as sampled turns between observations are
    stride = positions / count
    mask[(torch.arange(count, device=device) * stride).long().clamp(max=positions - 1)] = True
    states = normal(positions, hidden).to(dtype)
    weight = (normal(vocab, hidden) * (2.5 / hidden**0.5)).to(dtype)
    return Problem(
        hidden=states,
        weight=weight,
        master=weight.float(),
        targets=torch.randint(0, vocab, (positions,), generator=generator, device=device),
        mask=mask,
        mu=-normal(positions).abs() - 3.0,
        advantage=normal(positions),
    )
