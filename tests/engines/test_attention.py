"""Attention of bfloat16 by products is as exact as torch's kernel."""

from __future__ import annotations

import pytest
import torch

from insitu_train.embedded import attention
from insitu_train.embedded.attention import MANY
from insitu_train.embedded.pages import HIDDEN, PAGE
from insitu_train.embedded.weights import BFLOAT16

pytestmark = pytest.mark.skipif(not BFLOAT16, reason="this CPU does not multiply bfloat16")


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 64), (4, 128), (8, 80), (32, 64)])
@pytest.mark.parametrize("masked", [False, True])
def test_products_lose_no_more_than_the_kernel(
    rows: int, size: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(rows)
    q = (3 * torch.randn(MANY, 2, rows, size, generator=rng)).bfloat16()
    k = (3 * torch.randn(MANY, 2, PAGE, size, generator=rng)).bfloat16()
    v = torch.randn(MANY, 2, PAGE, size, generator=rng).bfloat16()
    mask = torch.zeros(MANY, 1, 1, PAGE, dtype=torch.bfloat16)
    mask[1, ..., 5:], mask[2] = HIDDEN, HIDDEN  # a page that begins, and one that no token is seen of
    if not masked:
        mask.zero_()
    seen = torch.ones(MANY, dtype=torch.bool)
    seen[2] = not masked
    scores = q.double() @ k.double().transpose(2, 3) * size**-0.5 + mask.double()
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
