"""Operations of an update, counted by hand, and the peaks of devices; no GPU was there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from train_lab import sampled_groups, small_model

from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer import utilization
from insitu_train.trainer.utilization import operations, peak_of


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return plan_step(sampled_groups(small_model()), PlanConfig())


def test_a_plan_of_single_rows_is_six_operations_per_parameter_and_attention(plan: StepPlan) -> None:
    model = small_model()
    c = model.config
    assert c.tie_word_embeddings
    single = [replace(plan.batches[0], prefix=0, rows=(row,), layout="rows") for row in range(len(plan.rows))]
    lengths = [len(row.ids) for row in plan.rows]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wide = c.num_hidden_layers * c.num_attention_heads * c.head_dim
    expected = sum(6 * parameters * n + 6 * wide * n * n for n in lengths)
    assert operations(model, replace(plan, batches=tuple(single))) == pytest.approx(expected)
    # A prefix that rows share is computed once.
    shared = operations(model, plan)
    assert shared is not None
    assert shared < expected
    for parameter in model.parameters():
        parameter.requires_grad = False
    frozen = operations(model, replace(plan, batches=tuple(single)))
    assert frozen == pytest.approx(sum(4 * parameters * n + 6 * wide * n * n for n in lengths))


def test_peaks_are_of_the_whole_name() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA L40S") == 362e12
    for unknown in ("NVIDIA L40", "NVIDIA A10", "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X", ""):
        assert peak_of(unknown) is None


class OnDevice:
    """A model that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.compute_dtype = dtype


@pytest.mark.parametrize(
    ("name", "dtype", "share"),
    [
        ("NVIDIA H200", torch.bfloat16, 3 * 989e12 / (2 * 4 * 989e12)),
        ("NVIDIA H200", torch.float32, None),
        ("Some GPU", torch.bfloat16, None),
    ],
)
def test_the_share_of_known_devices(
    plan: StepPlan, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, share: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(utilization, "operations", lambda model, plan: 989e12)
    model: Any = OnDevice(dtype)
    found = utilization.utilization(model, plan, epochs=3, ranks=4, seconds=2.0)
    assert found == (share if share is None else pytest.approx(share))
    assert utilization.utilization(small_model(), plan, epochs=1, ranks=1, seconds=1.0) is None
