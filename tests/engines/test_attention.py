"""Attention of bfloat16 by products is as exact as torch's kernel."""

from __future__ import annotations

import pytest
import torch

from insitu_train.embedded import attention
from insitu_train.embedded.pages import HIDDEN, PAGE
from insitu_train.embedded.weights import BFLOAT16

pytestmark = pytest.mark.skipif(not BFLOAT16, reason="this CPU does not multiply bfloat16")


@pytest.mark.parametrize("rows", [1, 3, 4, 32])
@pytest.mark.parametrize("masked", [False, True])
def test_products_lose_no_more_than_the_kernel(
    rows: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(rows)
    q = (3 * torch.randn(6, 2, rows, 64, generator=rng)).bfloat16()
    k = (3 * torch.randn(6, 2, PAGE, 64, generator=rng)).bfloat16()
    v = torch.randn(6, 2, PAGE, 64, generator=rng).bfloat16()
    mask = torch.zeros(6, 1, 1, PAGE, dtype=torch.bfloat16)
    mask[1, ..., 5:], mask[2] = HIDDEN, HIDDEN  # a page that begins, and one that no token is seen of
    if not masked:
        mask.zero_()
    seen = torch.tensor([True, True, not masked, True, True, True])
    scores = q.double() @ k.double().transpose(2, 3) * 64**-0.5 + mask.double()
    exact = (torch.softmax(scores, -1) @ v.double()).transpose(1, 2)
    sums = torch.logsumexp(scores, -1).transpose(1, 2)

    out, lse = attention.attend(q, k, v, mask if masked else None)
    monkeypatch.setattr(attention, "FEW", 0)
    kernel, _ = attention.attend(q, k, v, mask if masked else None)

    def error(found: torch.Tensor) -> float:
        return float((found[seen].double() - exact[seen]).square().mean().sqrt())

    assert error(out) <= 1.5 * error(kernel)
    assert (lse[seen].double() - sums[seen]).abs().max() < 2e-3
    assert masked is False or bool((lse[2] < HIDDEN / 2).all())
