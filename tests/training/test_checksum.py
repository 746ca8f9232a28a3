"""The checksum of a learner's weights: the engine's where all are trained, cheap where most are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from train_lab import small_model

from insitu_train.embedded.weights import checksum, checksum_of
from insitu_train.trainer import checksum as fingerprint
from insitu_train.trainer.checksum import WeightChecksum

pytestmark = pytest.mark.slow


def test_of_a_model_that_is_trained_whole_it_is_the_engines() -> None:
    model = small_model()
    names = WeightChecksum(model)
    assert names.now() == checksum(model)
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1.0
    assert names.now() == checksum(model)


def test_frozen_weights_are_hashed_once_and_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(part: Mapping[str, torch.Tensor]) -> str:
        hashed.append(sum(p.numel() for p in part.values()))
        return checksum_of(part)

    monkeypatch.setattr(fingerprint, "checksum_of", counting)

    def adapted(seed: int) -> Any:
        model = small_model(seed)
        for name, p in model.named_parameters():
            p.requires_grad_("q_proj" in name)
            if "q_proj" in name:
                with torch.no_grad():
                    p.fill_(0.5)
        return model

    one = adapted(0)
    trained = sum(p.numel() for p in one.parameters() if p.requires_grad)
    names = WeightChecksum(one)
    before = [names.now(), names.now()]
    assert hashed == [sum(p.numel() for p in one.parameters()) - trained, trained, trained]
    assert before[0] == before[1] == WeightChecksum(adapted(0)).now()
    # the same adapters on another model are other weights
    assert WeightChecksum(adapted(1)).now() != before[0]
    with torch.no_grad():
        next(p for p in one.parameters() if p.requires_grad)[0, 0] += 1.0
    assert names.now() != before[0]
