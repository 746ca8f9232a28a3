"""Models of every family that the embedded engine reads, against transformers, which wrote their files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from insitu.errors import EngineError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu_train.embedded import weights
from insitu_train.embedded.architecture import FAMILIES, read_architecture
from insitu_train.embedded.core import EmbeddedCore, EngineOptions, SampledFolder

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

SHAPE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
}
OPTIONS = EngineOptions(max_rows=8, max_context=256)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(folder: Path, kind: str, **changed: Any) -> Any:
    """Write a model whose norms, biases and attention matter, in several files; return it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **changed})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 5 if p.ndim > 1 else p + 0.3 * torch.randn(p.shape))
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def sampled(core: EmbeddedCore, prompts: list[IntArray], tokens: int) -> list[Generation]:
    out: dict[int, Generation | EngineError] = {}
    for i, prompt in enumerate(prompts):
        key = RequestKey(seed=1, rollout_id=f"r{i}", turn=0)
        params = SamplingParams(max_tokens=tokens, temperature=(1.0, 0.7)[i % 2])
        core.submit(prompt, params, key, lambda result, i=i: out.__setitem__(i, result))  # type: ignore[misc]
    while core.busy:
        core.step()
    found = [out[i] for i in range(len(prompts))]
    assert all(isinstance(one, Generation) for one in found)
    return [one for one in found if isinstance(one, Generation)]


def worst_gap(model: Any, prompts: list[IntArray], found: list[Generation]) -> float:
    worst = 0.0
    for i, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        ids = torch.from_numpy(np.concatenate([prompt, one.ids])).long()[None]
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0].float() / (1.0, 0.7)[i % 2], -1)
        wanted = scores[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert one.logprobs is not None
        worst = max(worst, float((wanted - torch.from_numpy(one.logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_transformers_in_any_company(name: str, tmp_path: Path) -> None:
    kind, changed = MODELS[name]
    model = made(tmp_path, kind, **changed)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 131, 140).astype(np.int32)
    prompts = [np.concatenate([trunk[: 70 * (i % 3)], trunk[i : i + 9]]) for i in range(10)]
    core = EmbeddedCore(SampledFolder(tmp_path), OPTIONS)
    together = sampled(core, prompts, 40)
    assert worst_gap(model, prompts, together) <= 1e-4
    again = sampled(core, prompts, 40)
    alone = [sampled(EmbeddedCore(SampledFolder(tmp_path), OPTIONS), prompts[:1], 40)[0]]
    for one, other in zip([*together, together[0]], [*again, *alone], strict=True):
        assert one.ids.tobytes() == other.ids.tobytes()
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "smollm3"])
@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
def test_bfloat16_is_right_to_its_rounding(
    name: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU's own products where it has them, else by float32 products of rounded numbers."""
    if native and not weights.BFLOAT16:
        pytest.skip("this CPU has no bfloat16 products")
    monkeypatch.setattr(weights, "BFLOAT16", native)
    kind, changed = MODELS[name]
    made(tmp_path, kind, **changed)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 131, n).astype(np.int32) for n in (3, 60, 150)]
    core = EmbeddedCore(SampledFolder(tmp_path), replace(OPTIONS, dtype="bfloat16"))
    assert core.cache.keys.dtype == torch.bfloat16
    assert 1e-4 < worst_gap(model, prompts, sampled(core, prompts, 40)) < 0.5


def test_every_family_is_tried() -> None:
    assert {kind for kind, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("kind", "changed", "line"),
    [
        ("gemma3_text", {}, "a model of type gemma3_text: the embedded engine runs llama"),
        ("mistral", {"sliding_window": 64}, "a sliding window of 64"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "a sliding win"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
        ("llama", {"hidden_act": "gelu"}, "the activation gelu"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
    ],
)
def test_another_architecture_is_refused_by_a_line_that_names_what_runs_it(
    kind: str, changed: dict[str, Any], line: str, tmp_path: Path
) -> None:
    raw = {**SHAPE, "model_type": kind, "hidden_act": "silu", **changed}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(EngineError, match=line) as found:
        read_architecture(tmp_path)
    assert 'engine.kind = "vllm"' in str(found.value)
    assert "\n" not in str(found.value)


def test_a_missing_file_tensor_or_a_foreign_one_is_one_line(tmp_path: Path) -> None:
    made(tmp_path, "llama")
    files = sorted(tmp_path.glob("*.safetensors"))
    kept = files[1].read_bytes()
    files[1].unlink()
    with pytest.raises(EngineError, match=rf"{files[1].name} is missing, which model.safetensors.index.json"):
        EmbeddedCore(SampledFolder(tmp_path), OPTIONS)
    files[1].write_bytes(kept)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, line in (
        ({"model_type": "qwen3"}, "no tensor model.layers.0.self_attn.q_norm.weight"),
        ({"num_hidden_layers": 3}, "9 tensors have no place in a model of this type, first model.layers.3"),
        ({"intermediate_size": 64}, r"mlp.gate_proj.weight has the shape \(96, 48\)"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(EngineError, match=line):
            EmbeddedCore(SampledFolder(tmp_path), OPTIONS)
