"""The benchmark runs and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._engine_model import batching_side, insitu_side, measure_model, transformers_side
from benchmarks.engine import main

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_the_benchmark_prints_ratios_and_fails_below_the_wanted_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--prompt-tokens", "48", "--tokens", "2", "--repeats", "1", "--vocab", "64"]
    assert main([*small, "--at-least", "1e9"]) == 1
    result = json.loads(capsys.readouterr().out)
    shapes = {f"{shape}_{batch}" for shape in ("call", "decode") for batch in (1, 8, 32)}
    shapes |= {f"{shape}_{batch}" for shape in ("group", "conversation") for batch in (8, 32)}
    assert set(result["ratios"]) == shapes
    assert all(rate["tokens_s"] > 0 and rate["tokens_s_wall"] > 0 for rate in result["rates"])
    assert result["settings"]["threads"] == 1


def tiny_model(folder: Path) -> Path:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=2048, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_models_folder_is_measured_beside_its_peers(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    sides = {
        "insitu float32": insitu_side(folder, "float32", 1),
        "transformers generate": transformers_side(folder, 1),
    }
    rates = measure_model(sides, 97, 3, 1, ((2, 40),))
    found = {(rate.shape, rate.side) for rate in rates}
    assert found == {(shape, side) for shape in ("decode 2 x 40", "prefill 512") for side in sides}
    assert all(rate.tokens_s > 0 and rate.tokens_cpu_s > 0 for rate in rates)


@pytest.mark.full
def test_continuous_batching_of_transformers_is_a_side(tmp_path: Path) -> None:
    run = batching_side(tiny_model(tmp_path), 1)
    for tokens in (1, 5):
        run(np.random.default_rng(0).integers(0, 97, (3, 20), dtype=np.int32), tokens)
