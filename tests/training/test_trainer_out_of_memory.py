"""A device whose memory runs out in spite of the prediction: the next technique, or no update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_policy import LOOSE, a_plan, equal, opened, trained
from train_lab import small_model

from insitu.errors import TrainError
from insitu_train.embedded.model import save_model
from insitu_train.memory.plan import LADDER
from insitu_train.model.base import MemoryOptions
from insitu_train.trainer.trainer import Trainer

pytestmark = pytest.mark.slow

ON_CPU = [t for t in LADDER if not t.offload_activations]


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, trainer: Trainer, fails: Sequence[MemoryOptions]
) -> list[str]:
    """Let every second pass with these techniques run out of memory; returns those that were tried."""
    tried: list[str] = []
    inner: Callable[..., Any] = trainer._objective

    def objective(*given: Any) -> Any:
        tried.append(str(trainer.model.techniques))  # type: ignore[attr-defined]
        if trainer.model.techniques in fails and len(tried) % 2 == 0:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")
        return inner(*given)

    monkeypatch.setattr(trainer, "_objective", objective)
    return tried


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(small_model(1), tmp_path / "model")
    return tmp_path / "model"


def test_the_next_technique_is_taken_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, short = Trainer(opened(folder), LOOSE), Trainer(opened(folder), LOOSE)
    assert len(a_plan().batches) > 1
    tried = short_of_memory(monkeypatch, short, ON_CPU[:2])
    first, second = short.step(a_plan()), short.step(a_plan())
    assert str(ON_CPU[2]) == tried[-1]
    assert set(tried) == {str(t) for t in ON_CPU[:3]}
    assert "out of memory on cpu" in first.alarm
    assert "Tried to allocate 2.00 GiB" in first.alarm
    assert "\n" not in first.alarm
    assert "memory" not in second.alarm  # not tried again with what had failed
    expected = [calm.step(a_plan()), calm.step(a_plan())]
    assert [first.loss, second.loss] == [r.loss for r in expected]
    assert equal(trained(short.model), trained(calm.model))


def test_without_another_technique_the_step_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(opened(folder), LOOSE)
    before = trained(trainer.model)
    short_of_memory(monkeypatch, trainer, ON_CPU)
    with pytest.raises(TrainError, match=r"^out of memory on cpu with .*: no update$") as refused:
        trainer.step(a_plan())
    assert "\n" not in str(refused.value)
    assert equal(trained(trainer.model), before)
    assert trainer.version == 0
    monkeypatch.undo()
    assert trainer.step(a_plan()).version == 1


def test_the_builtin_model_has_no_other_technique(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small_model(1), LOOSE)

    def objective(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(trainer, "_objective", objective)
    with pytest.raises(TrainError, match="out of memory on cpu with plain"):
        trainer.step(a_plan())
