"""Products of bfloat16 with a float32 result: each method that older versions of torch leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from train_lab import VOCAB

from insitu_train.loss import chunked_logits as tiles
from insitu_train.loss import mixed_matmul as ways
from insitu_train.loss.fused_head import objective
from insitu_train.loss.mixed_matmul import Method, method_of, product

pytestmark = [pytest.mark.numeric, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    method_of.cache_clear()
    yield
    method_of.cache_clear()


def like_torch(method: Method) -> Callable[..., Tensor]:
    """torch.mm and torch.addmm of a CUDA build that offers `method`: out_dtype of addmm since 2.10, of
    mm since 2.8. This CPU's torch has neither, so the result is computed by casting."""

    def call(*given: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        *addend, a, b = given
        if out_dtype is None:
            return REAL[len(addend)](*given, out=out)
        if method == "cast":
            raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")
        if addend and method == "mm":
            raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")
        return REAL[len(addend)](*addend, a.to(out_dtype), b.to(out_dtype), out=out)

    return call


REAL: tuple[Callable[..., Tensor], ...] = (torch.mm, torch.addmm)
METHODS: tuple[Method, ...] = ("addmm", "mm", "cast")


@pytest.fixture(params=METHODS)
def offered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Method:
    method: Method = request.param
    monkeypatch.setattr(torch, "mm", like_torch(method))
    monkeypatch.setattr(torch, "addmm", like_torch(method))
    return method


def operands(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(70, 50, generator=generator), torch.randn(50, 30, generator=generator)
    return a.bfloat16(), b.bfloat16(), torch.randn(70, 30, generator=generator)


@pytest.mark.parametrize("band", [1, 3000, 1 << 20])
@pytest.mark.parametrize("add", [False, True])
def test_every_way_gives_the_product(
    offered: Method, add: bool, band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "BAND", band)
    assert method_of("cpu", torch.bfloat16) == offered
    a, b, out = operands()
    expected = a.double() @ b.double() + (out.double() if add else 0)
    product(a, b, out, add=add)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_this_machines_own_torch_finds_a_way() -> None:
    a, b, out = operands()
    expected = out.double() + a.double() @ b.double()
    product(a, b, out, add=True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_gives_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "addmm", lambda *given, out, out_dtype: out)
    monkeypatch.setattr(torch, "mm", like_torch("mm"))
    assert method_of("cpu", torch.bfloat16) == "mm"


def test_no_memory_is_not_taken_for_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **more: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "addmm", full)
    with pytest.raises(torch.OutOfMemoryError):
        method_of("cpu", torch.bfloat16)


@pytest.mark.usefixtures("offered")
def test_the_head_as_on_a_gpu_is_exact_by_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products that a GPU is asked for: hidden states and exponentials in bfloat16, sums in float32."""
    monkeypatch.setattr(tiles, "_on_gpu", lambda device: True)
    monkeypatch.setattr(tiles, "backend", lambda device, kernels: tiles.TorchBackend())
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(20, 32, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(VOCAB, 32, generator=generator) * 0.3).requires_grad_()
    targets = torch.randint(0, VOCAB, (20,), generator=generator)
    found = objective(hidden, weight, targets, 1.0, lambda logp, part: -logp)
    grads = torch.autograd.grad(found.total, [hidden, weight])
    h, w = hidden.detach().double().requires_grad_(), weight.detach().bfloat16().double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(h @ w.T, targets, reduction="sum")
    expected = torch.autograd.grad(loss, [h, w])
    assert float(found.total.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    for got, right in zip(grads, expected, strict=True):
        assert (
            float((got.double() - right).abs().max() / right.abs().max()) < 1e-2
        )  # exponentials in bfloat16
