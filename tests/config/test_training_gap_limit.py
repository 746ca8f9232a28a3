"""train.max_logprob_gap: 0 stands for what engine and precision allow, any other number for itself."""

from __future__ import annotations

import pytest

from insitu.config import demo_preset, load_config
from insitu_train.options import TrainConfig

VLLM = "engine.kind=vllm engine.urls=http://127.0.0.1:1"
HF = f"{VLLM} policy.kind=hf"


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ("", 1e-4),
        (VLLM, 1.0),
        (f"{VLLM} engine.publish_dtype=float32", 1e-3),
        (f"{VLLM} engine.publish_dtype=bfloat16", 1.0),
        (f"{HF} engine.publish_dtype=float32", 1.0),
        (f"{HF} engine.publish_dtype=float32 policy.device=cpu", 1e-3),
        (f"{HF} engine.publish_dtype=float32 policy.dtype=float32", 1e-3),
        (f"{HF} engine.publish_dtype=float32 policy.device=cpu policy.dtype=bfloat16", 1.0),
        (f"{HF} policy.dtype=float32", 1.0),
        ("train.max_logprob_gap=0.02", 0.02),
        (f"{VLLM} train.max_logprob_gap=1e-4", 1e-4),
    ],
)
def test_the_limit_follows_the_precision(overrides: str, limit: float) -> None:
    assert TrainConfig.of(load_config(None, overrides.split())).max_logprob_gap == limit


def test_the_demo_keeps_its_limit() -> None:
    assert TrainConfig.of(load_config(base=demo_preset())).max_logprob_gap == 1e-4
