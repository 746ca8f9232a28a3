"""The tiled head against whole logits and autograd."""

from __future__ import annotations

import pytest
import torch
from train_lab import VOCAB, small_model

from whet.train import head


@pytest.mark.parametrize("tile", [3, 2048])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_gradients_equal_whole_logits(
    tile: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "TILE", tile)
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 32, generator=generator, requires_grad=True)
    targets = torch.randint(0, VOCAB, (7,), generator=generator)
    factors = torch.randn(7, generator=generator)
    weight = model.lm_head.weight

    scores = head.score(model, hidden, targets, temperature)
    found = torch.autograd.grad((scores.logp * factors).sum(), [hidden, weight])
    logp = torch.log_softmax(model.logits(hidden) / temperature, -1)
    expected = torch.autograd.grad((logp[torch.arange(7), targets] * factors).sum(), [hidden, weight])

    assert torch.allclose(scores.logp, logp[torch.arange(7), targets], atol=1e-5)
    assert torch.allclose(scores.entropy, torch.distributions.Categorical(logits=logp).entropy(), atol=1e-5)
    assert torch.equal(scores.best, logp.argmax(-1) == targets)
    assert not scores.entropy.requires_grad
    for a, b in zip(found, expected, strict=True):
        assert b.abs().max() > 0.1
        assert torch.allclose(a, b, atol=1e-5)
