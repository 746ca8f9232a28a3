"""The benchmark of a GRPO step runs in small, without the peer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.grpo import measure

pytestmark = pytest.mark.slow


def test_a_step_samples_plans_trains_and_publishes(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=256, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    prompts = np.random.default_rng(0).integers(0, 97, (2, 20)).tolist()
    job = {"prompts": prompts, "texts": [], "group_size": 4, "tokens": 5, "token_budget": 64, "lr": 1e-3}
    found = measure(tmp_path, {**job, "threads": 1, "dtype": "float32"}, ["insitu"], 2)["insitu"]
    assert found["sampled"] == found["trained"] == 2 * 4 * 5
    # a prompt is computed once for its group; the last token of a row predicts nothing
    assert found["row_tokens"] == 2 * 4 * 25
    assert found["pass_tokens"] == 2 * (20 + 4 * 5)
    # after the first step the sampler has the new weights, or the step would be refused
    assert 0 < found["gap"] < 1e-4
    # rounded to hundredths: so small a model may take less for its samples
    assert 0 <= found["sample_cpu_s"] < found["cpu_s"]
