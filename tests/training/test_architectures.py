"""Which architectures of transformers are trained, with random tiny weights: what one says only in its
mask, position embeddings or class is refused with the reason, and adapters find the layers that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import apart
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from insitu.errors import TrainError
from insitu.training.model import parity as proof
from insitu.training.model.hf import HfPolicy, open_hf
from insitu.training.options import Lora

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**MOE, "shared_expert_intermediate_size": 16}
MLA = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def saved(folder: Path, kind: str, **changed: Any) -> Path:
    """A model of that kind whose distributions are far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**BASE, **changed}))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(5)
    model.save_pretrained(folder / kind)
    return folder / kind


def opened(folder: Path, lora: Lora | None = None) -> HfPolicy:
    return open_hf(folder, device=CPU, dtype=torch.float32, lora=lora)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a window in the mask alone": (
        "phimoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "router_jitter_noise": 0.0,
         "input_jitter_noise": 0.0},
        "an attention mask that is not plain causal (sliding_window = 64): not supported",
    ),
    "a window longer than the rows of the proof": (
        "doge", {"sliding_window": 200}, "not plain causal (sliding_window = 200): not supported",
    ),
    "layers with a window": ("olmo3", {"sliding_window": 16}, "olmo3 has layers of type sliding_attention"),
    "linear attention": (
        "qwen3_next",
        {**SHARED, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8},
        "qwen3_next has layers of type linear_attention: insitu trains full_attention only",
    ),
    "chunks": (
        "llama4_text",
        {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
         "attention_chunk_size": 64},
        "llama4_text has layers of type chunked_attention",
    ),
    "longrope": (
        "phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
        "phi3 has rope_type longrope, whose angles depend on the longest row",
    ),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}, "llama has rope_type dynamic"),
    "values of another width": (
        "deepseek_v3", MLA, "DeepseekV3Attention needs values of width 8 with keys of width 16",
    ),
    "scaled embeddings": (
        "gemma3_text", {"head_dim": 8, "layer_types": ["full_attention"] * 4},
        "embeddings that are not a plain table (Gemma3TextScaledWordEmbedding)",
    ),
    "gemma4": ("gemma4_text", {"head_dim": 8, "sliding_window": 16}, "has layers of type sliding_attention"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_computed_is_refused_with_its_reason(tmp_path: Path, what: str) -> None:
    kind, changed, reason = REFUSED[what]
    with pytest.raises(TrainError) as refused:
        opened(saved(tmp_path, kind, **changed))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_of_more_than_text_is_one_line(tmp_path: Path) -> None:
    for kind, reason in (
        ("qwen2_5_vl", "multimodal"),
        ("clip", "multimodal"),
        ("t5", "transformers: Unrec"),
    ):
        config = CONFIG_MAPPING[kind]()
        config.save_pretrained(tmp_path / kind)
        with pytest.raises(TrainError, match=reason) as refused:
            opened(tmp_path / kind)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_proof_itself_finds_angles_that_depend_on_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A kind of position embedding that nobody listed."""
    monkeypatch.setattr(proof, "_ROPE_BY_LENGTH", frozenset())
    folder = saved(tmp_path, REFUSED[kind][0], **REFUSED[kind][1])
    if kind == "dynamic":  # its angles move beyond the length that it was made for
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["original_max_position_embeddings"] = 64
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
        monkeypatch.setattr(proof, "last_position", lambda config: 200)
    with pytest.raises(TrainError, match="differ by"):
        opened(folder)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("llama", {"rope_parameters": YARN}),
        ("qwen2_moe", SHARED),
        ("phi3", {}),
        ("glm4", {"head_dim": 8}),
    ],
)
def test_rows_longer_than_the_proof_are_the_models_own(
    tmp_path: Path, kind: str, changed: dict[str, Any]
) -> None:
    folder = saved(tmp_path, kind, **changed)
    policy = opened(folder)
    ids = torch.randint(3, 64, (250,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids[None]).logits[0]
        rows = torch.stack([ids[5:], ids[5:].flip(0)])
        alone = policy.hidden(ids[:0], ids[None])[0] @ policy.head_weight.T
        packed = policy.hidden(ids[:5], rows)[0] @ policy.head_weight.T
    assert apart(alone, own) < 1e-4
    assert apart(packed, own[5:]) < 1e-4


ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ADAPTED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3": ({"head_dim": 8}, (*ATTENTION, *MLP)),
    "phi3": ({}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "glm4": ({"head_dim": 8}, (*ATTENTION, "gate_up_proj", "down_proj")),
    "qwen3_moe": ({"head_dim": 8, **MOE}, ATTENTION),
    "qwen2_moe": (SHARED, (*ATTENTION, *MLP)),
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_are_given_to_the_layers_that_an_architecture_has(tmp_path: Path, kind: str) -> None:
    changed, targets = ADAPTED[kind]
    policy = opened(saved(tmp_path, kind, **changed), Lora(rank=2, alpha=4.0))
    assert policy.lora is not None
    assert set(policy.lora.targets) == set(targets)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    for layer in range(4):
        assert {n.split(".")[-2] for n in trained if f"layers.{layer}." in n} == set(targets)
    policy.save(tmp_path / "adapters")
    # with a config.json transformers would take the folder for a whole model
    assert {p.suffix for p in (tmp_path / "adapters").iterdir()} == {".safetensors", ".json"}
    assert not (tmp_path / "adapters" / "config.json").exists()
    config = tmp_path / "adapters" / "adapter_config.json"
    described = json.loads(config.read_text())
    assert described["target_modules"] == sorted(targets)
    described["target_modules"].reverse()  # PEFT writes them in any order
    config.write_text(json.dumps(described))
    assert set(policy.read(tmp_path / "adapters")) == trained


@pytest.mark.parametrize(
    ("kind", "changed", "asked", "reason"),
    [
        ("qwen3_moe", {"head_dim": 8, **MOE}, "gate_proj",
         "no layer has a linear layer gate_proj (gate_up_proj is one tensor of all experts, without"
         " adapter support); every layer has k_proj, o_proj, q_proj, v_proj"),
        ("qwen3_moe", {"head_dim": 8, **MOE, "mlp_only_layers": [0]}, "gate_proj",
         "only 1 of 4 layers have a linear layer gate_proj"),
        ("phi3", {}, "q_proj", "every layer has down_proj, gate_up_proj, o_proj, qkv_proj"),
    ],
)  # fmt: skip
def test_a_layer_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, kind: str, changed: dict[str, Any], asked: str, reason: str
) -> None:
    with pytest.raises(TrainError) as refused:
        opened(saved(tmp_path, kind, **changed), Lora(rank=2, alpha=4.0, targets=(asked,)))
    assert reason in str(refused.value)
