"""The tiled head against whole logits and autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_lab import VOCAB, small_model

from insitu.errors import TrainError
from insitu_train.embedded.weights import BFLOAT16
from insitu_train.loss import chunked_logits as tiles
from insitu_train.loss import fused_head as objective
from insitu_train.loss.chunked_logits import BUDGET, SLACK, tiling
from insitu_train.loss.mixed_matmul import product
from insitu_train.memory.meta_run import MemoryMeter

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

Case = tuple[Tensor, Tensor, Tensor, Tensor]
EXACT = 2**-7 if BFLOAT16 else 1e-5
"""Of gradients of a bfloat16 model by its float32 head: a CPU that multiplies bfloat16 rounds operands."""


def case(positions: int = 7, width: int = 32, vocab: int = VOCAB, scale: float = 1.0) -> Case:
    """hidden, weight, targets and a factor per position."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, width, generator=generator) * scale
    weight = torch.randn(vocab, width, generator=generator) * 0.3
    targets = torch.randint(0, vocab, (positions,), generator=generator)
    return hidden, weight, targets, torch.randn(positions, generator=generator)


def token_loss(logp: Tensor, factor: Tensor) -> Tensor:
    """Not linear in logp, so that a wrong slope shows."""
    return factor * logp + 0.1 * logp.square()


def reference(given: Case, temperature: float, cap: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy and both gradients from whole float64 logits."""
    hidden, weight = (t.double().requires_grad_() for t in given[:2])
    logits = hidden @ weight.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    logp = torch.log_softmax(logits / temperature, -1)
    chosen = logp[torch.arange(len(given[2])), given[2]]
    loss = token_loss(chosen, given[3].double()).sum()
    grads = torch.autograd.grad(loss, [hidden, weight])
    return chosen.detach(), -(logp.exp() * logp).sum(-1).detach(), *grads


def far(found: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def fused(given: Case, temperature: float, cap: float = 0.0) -> tuple[objective.FusedLoss, Tensor, Tensor]:
    hidden, weight = (t.clone().requires_grad_() for t in given[:2])
    out = objective.objective(
        hidden,
        weight,
        given[2],
        temperature,
        lambda logp, part: token_loss(logp, given[3][part]),
        soft_cap=cap,
    )
    return out, *torch.autograd.grad(out.total, [hidden, weight])


def scored(given: Case, temperature: float, cap: float = 0.0) -> tuple[objective.Scores, Tensor, Tensor]:
    hidden, weight = (t.clone().requires_grad_() for t in given[:2])
    out = objective.scores(hidden, weight, given[2], temperature, soft_cap=cap)
    return out, *torch.autograd.grad(token_loss(out.logp, given[3]).sum(), [hidden, weight])


@pytest.mark.parametrize("cut", [(3, 16), (2, VOCAB), (512, 512)])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, 0.0), (0.7, 0.0), (0.7, 1.5)])
@pytest.mark.parametrize("way", [fused, scored])
def test_scores_and_gradients_equal_whole_logits(
    cut: tuple[int, int], temperature: float, cap: float, way: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "CPU_TILE", cut)
    given = case()
    logp, entropy, d_hidden, d_weight = reference(given, temperature, cap)
    out, found_hidden, found_weight = way(given, temperature, cap)
    scores = out if isinstance(out, objective.Scores) else out.scores
    assert far(scores.logp.detach(), logp) < 1e-6
    assert far(scores.entropy, entropy) < 1e-6
    assert torch.equal(scores.best, (given[0] @ given[1].T).argmax(-1) == given[2])
    assert not scores.entropy.requires_grad
    assert min(d_hidden.abs().max(), d_weight.abs().max()) > 0.1
    assert far(found_hidden, d_hidden) < 1e-5
    assert far(found_weight, d_weight) < 1e-5


def test_total_is_the_sum_of_losses_and_scales_its_gradients() -> None:
    given = case()
    hidden, weight = (t.clone().requires_grad_() for t in given[:2])
    out = objective.objective(
        hidden, weight, given[2], 1.0, lambda logp, part: token_loss(logp, given[3][part])
    )
    assert float(out.total.detach()) == pytest.approx(
        float(token_loss(out.scores.logp, given[3]).sum()), abs=1e-5
    )
    (out.total * 3.0).backward()
    _, _, d_hidden, d_weight = reference(given, 1.0)
    assert far(hidden.grad, 3 * d_hidden) < 1e-5
    assert far(weight.grad, 3 * d_weight) < 1e-5


def test_a_later_chunk_may_hold_the_largest_logits_by_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk's reference is then overtaken, and what was stored under it is brought in line."""
    monkeypatch.setattr(tiles, "CPU_TILE", (4, 16))
    given = case()
    given[1][40:] *= 40
    logits = given[0] @ given[1].T
    over = logits[:, 32:].amax(1) - logits[:, :16].amax(1)
    assert ((over > SLACK) & (over < 2 * SLACK)).any()
    assert (over > 3 * SLACK).any()
    logp, entropy, d_hidden, d_weight = reference(given, 1.0)
    for way in (fused, scored):
        out, found_hidden, found_weight = way(given, 1.0)
        scores = out if isinstance(out, objective.Scores) else out.scores
        assert far(scores.logp.detach(), logp) < 1e-5
        assert float((scores.entropy - entropy).abs().max()) < 1e-4
        assert far(found_hidden, d_hidden) < 1e-5
        assert far(found_weight, d_weight) < 1e-5


def test_an_almost_certain_token_keeps_the_digits_of_its_small_gradient() -> None:
    weight = torch.eye(8) * 12.0
    hidden = torch.eye(8)[:1].clone().requires_grad_()
    out = objective.objective(hidden, weight, torch.tensor([0]), 1.0, lambda logp, part: logp)
    (found,) = torch.autograd.grad(out.total, [hidden])
    other = 1.0 / (torch.tensor(12.0).double().exp() + 7)
    assert float(found[0, 0]) == pytest.approx(float(12 * 7 * other), rel=1e-2)
    assert float(found[0, 1]) == pytest.approx(float(-12 * other), rel=1e-2)


def test_the_weight_gradient_can_be_added_where_it_belongs() -> None:
    given = case()
    hidden, weight = (t.clone().requires_grad_() for t in given[:2])
    weight.grad = torch.ones_like(weight)
    out = objective.objective(
        hidden, weight, given[2], 1.0, lambda logp, part: token_loss(logp, given[3][part]), into=weight.grad
    )
    out.total.backward()
    assert far(weight.grad - 1.0, reference(given, 1.0)[3]) < 1e-5
    again = objective.objective(hidden, weight, given[2], 1.0, lambda logp, part: logp, into=weight.grad)
    with pytest.raises(TrainError, match="must not be scaled"):
        (again.total * 2.0).backward()


def test_a_frozen_head_and_no_gradients_at_all() -> None:
    given = case()
    hidden = given[0].clone().requires_grad_()
    out = objective.objective(
        hidden, given[1], given[2], 1.0, lambda logp, part: token_loss(logp, given[3][part])
    )
    out.total.backward()
    assert far(hidden.grad, reference(given, 1.0)[2]) < 1e-5
    with torch.no_grad():
        quiet = objective.objective(hidden, given[1], given[2], 1.0, lambda logp, part: logp)
    assert not quiet.total.requires_grad
    assert torch.equal(quiet.scores.logp, out.scores.logp)


def test_bfloat16_gradients_come_from_float32_logits() -> None:
    given = case(scale=2.0)
    rounded = (given[0].bfloat16(), given[1].bfloat16(), *given[2:])
    logp, _, d_hidden, d_weight = reference((rounded[0].float(), rounded[1].float(), *given[2:]), 1.0)
    hidden = rounded[0].clone().requires_grad_()
    master = rounded[1].float().requires_grad_()
    out = objective.objective(hidden, master, given[2], 1.0, lambda lp, part: token_loss(lp, given[3][part]))
    out.total.backward()
    assert far(out.scores.logp, logp) < 1e-6
    assert master.grad.dtype == torch.float32
    assert far(master.grad, d_weight) < EXACT
    assert hidden.grad.dtype == torch.bfloat16
    assert far(hidden.grad, d_hidden) < 2**-7
    scores = objective.scores(hidden, master, given[2], 1.0)
    (again,) = torch.autograd.grad(token_loss(scores.logp, given[3]).sum(), [master])
    assert far(again, d_weight) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_may_round_the_operands_of_a_bfloat16_model_only(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AMX does it: log-probabilities keep all digits, gradients have those of a bfloat16."""
    matmul, calls = torch.backends.mkldnn.matmul, []

    def as_amx(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
        calls.append(matmul.fp32_precision)
        if calls[-1] == "bf16":
            a, b = a.bfloat16().float(), b.bfloat16().float()
        product(a, b, out, add=add)

    monkeypatch.setattr(tiles, "product", as_amx)
    given = case(scale=2.0)
    exact = (given[0].to(dtype).float(), given[1].to(dtype).float(), *given[2:])
    logp, _, d_hidden, d_weight = reference(exact, 1.0)
    hidden, master = given[0].to(dtype).requires_grad_(), given[1].clone().requires_grad_()
    before = matmul.fp32_precision
    out = objective.objective(hidden, master, given[2], 1.0, lambda lp, part: token_loss(lp, given[3][part]))
    out.total.backward()
    assert set(calls) == {"bf16" if dtype == torch.bfloat16 else before}
    assert matmul.fp32_precision == before != "bf16"
    assert far(out.scores.logp, logp) < 1e-6
    limit = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert far(hidden.grad, d_hidden) < limit
    assert far(master.grad, d_weight) < limit


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_whole_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CPU_TILE", (8, 64))
    given = case(positions=64, vocab=640)
    with Largest() as largest:
        fused(given, 1.0)
        scored(given, 1.0)
    assert largest.numel == 640 * 32


@pytest.mark.parametrize("hidden", [1024, 2048, 2560, 4096])
@pytest.mark.parametrize("positions", [2000, 8192, 152_000])
def test_a_gpu_tile_is_large_and_within_its_budget(hidden: int, positions: int) -> None:
    cut = tiling(positions, hidden, 151_936, element=2, gpu=True)
    assert cut.held <= BUDGET
    assert cut.rows % 128 == 0
    # few passes over the weight's gradient, each as long as the others
    assert cut.rows >= 2000 or cut.rows >= positions
    tiles = -(-positions // cut.rows)
    assert cut.rows * tiles - positions < 128 * tiles
    assert cut.columns % 256 == 0
    blocks = cut.rows // 128 * cut.columns // 256
    assert 396 <= blocks <= 792
    assert blocks / (-(-blocks // 132) * 132) > 0.97
    assert tiling(10**6, hidden, 10**6, element=2, gpu=True).held <= BUDGET


@pytest.mark.parametrize("hidden", [1024, 2048, 2560, 4096])
def test_a_float32_weight_is_cast_within_the_same_budget(hidden: int) -> None:
    """By arithmetic: whole where that costs least, a chunk at a time where it does not fit or costs more."""
    for positions in (100, 8192, 152_000):
        cut = tiling(positions, hidden, 151_936, element=2, gpu=True, cast=2)
        assert cut.held <= BUDGET
        assert cut.rows >= 1500 or cut.rows >= positions
        assert cut.cast == (151_936 if hidden == 1024 or (positions, hidden) == (100, 2560) else cut.cast)
        assert cut.cast in (151_936, cut.columns)
        assert tiling(positions, hidden, 151_936, element=4, gpu=False, cast=4).held <= BUDGET
    assert (cut.cast == 151_936) == (hidden == 1024)


class NoKernels:
    """Does nothing to tensors that have no content."""

    def absorb(self, *given: object) -> None: ...

    def settle(self, *given: object) -> None: ...


@pytest.mark.parametrize("width", [1024, 4096])
def test_what_a_gpu_pass_allocates_at_full_size_is_what_is_predicted(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass itself, on tensors without content: whatever it makes beside its gradients is counted."""
    monkeypatch.setattr(tiles, "_on_gpu", lambda device: True)
    monkeypatch.setattr(tiles, "backend", lambda device, kernels: NoKernels())
    with torch.device("meta"):
        hidden = torch.empty(8192, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(151_936, width, requires_grad=True)
        weight.grad = torch.empty_like(weight)
        targets = torch.empty(8192, dtype=torch.int64)
    meter = MemoryMeter([hidden, weight, weight.grad, targets])
    with meter:
        out = objective.objective(
            hidden, weight, targets, 1.0, lambda logp, part: logp * 2.0, into=weight.grad
        )
    cut = tiles.cut_of(hidden, weight, gpu=True)
    extra = meter.peak - hidden.nbytes
    assert extra < 1 << 30
    assert extra == pytest.approx(cut.held, rel=0.01)
    assert out.total.shape == ()


@pytest.mark.parametrize("room", [1 << 20, 260_000])
def test_a_pass_in_bfloat16_stays_within_its_budget_and_exact(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted as it runs: a quarter of a MiB holds no copy of this weight, a MiB does."""
    monkeypatch.setattr(tiles, "BUDGET", room)
    monkeypatch.setattr(tiles, "CPU_TILE", (64, 128))
    given = case(positions=256, width=64, vocab=2000, scale=0.5)
    hidden, master = given[0].bfloat16().requires_grad_(), given[1].clone().requires_grad_()
    cut = tiles.cut_of(hidden, master, gpu=False)
    assert cut.cast == (2000 if room == 1 << 20 else 128)
    assert cut.rows < 64 or room == 1 << 20
    kept = torch.zeros_like(master)
    meter = MemoryMeter([hidden, master, given[2], given[3], kept])
    with meter:
        out = objective.objective(
            hidden, master, given[2], 1.0, lambda lp, part: token_loss(lp, given[3][part]), into=kept
        )
    assert cut.held <= room
    assert meter.peak - hidden.nbytes <= cut.held + 24 * 256
    rounded = (given[0].bfloat16().float(), given[1].bfloat16().float(), *given[2:])
    logp, _, d_hidden, d_weight = reference(rounded, 1.0)
    assert far(out.scores.logp, logp) < 1e-6
    assert far(kept, d_weight) < EXACT
    (found,) = torch.autograd.grad(out.total, [hidden])
    assert far(found, d_hidden) < 2**-7
    scores = objective.scores(hidden, master, given[2], 1.0)
    (again,) = torch.autograd.grad(token_loss(scores.logp, given[3]).sum(), [master])
    assert far(again, d_weight) < EXACT


def test_a_model_dtype_without_the_range_is_refused() -> None:
    given = case()
    with pytest.raises(TrainError, match="float16"):
        objective.scores(given[0].half(), given[1].half(), given[2], 1.0)


def test_score_takes_the_models_own_head() -> None:
    model = small_model()
    hidden, _, targets, _ = case()
    scores = objective.score(model, hidden, targets, 0.7)
    logp = torch.log_softmax(model.logits(hidden) / 0.7, -1)[torch.arange(7), targets]
    assert torch.allclose(scores.logp, logp, atol=1e-5)


def test_the_gradient_a_head_adds_to_is_made_only_where_it_belongs() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    made = objective.kept_gradient(weight)
    assert made is weight.grad
    assert torch.equal(made, torch.zeros(3, 2))
    assert objective.kept_gradient(weight) is made
    for other in (torch.ones(2), weight * 2, torch.ones(2, dtype=torch.bfloat16, requires_grad=True)):
        assert objective.kept_gradient(other) is None


def test_a_loss_that_leaves_every_token_out_has_no_gradient() -> None:
    given = case()
    hidden = given[0].clone().requires_grad_()
    out = objective.objective(hidden, given[1], given[2], 1.0, lambda logp, part: torch.zeros(logp.shape))
    out.total.backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
