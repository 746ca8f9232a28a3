"""The architectures that are tried, as tiny random models: the record that test_model_zoo.py checks.

python tests/training/model_zoo.py writes it into docs/models.md as a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**MOE, "shared_expert_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MLA = {
    **ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
KIMI = {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 2.827}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
TWO = {"num_hidden_layers": 2}
"""Layers of the models below."""
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is tried, and what is expected of it."""

    kind: str
    """transformers' model_type."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its configuration beside `BASE`."""
    by_rows: bool = False
    """Insitu's attention does not compute it."""
    targets: Sequence[str] = (*ATTENTION, *MLP)
    """Layers that get adapters when none are named."""
    vllm: str = "not run"
    """Whether vLLM 0.32 on a CPU serves it and takes new weights (tests/full/test_model_zoo_with_vllm.py)."""


NO_RELOAD = "serves it; new weights are refused (experts)"
LATENT = ("o_proj", *MLP, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
HYBRID = (*ATTENTION, *MLP, "in_proj_qkv", "in_proj_z", "out_proj")
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
CAP = {"final_logit_softcapping": 2.0}
GEMMA4 = {
    **CAP,
    "final_logit_softcapping": 2.0,
    "global_head_dim": 8,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
LLAMA4 = {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
          "attention_chunk_size": 64}  # fmt: skip
CONV = {"layer_types": ["conv", "full_attention"]}

ZOO: dict[str, Architecture] = {
    "Qwen2.5": Architecture(kind="qwen2", vllm="yes"),
    "Qwen3": Architecture(kind="qwen3", changed=HEAD),
    "Qwen3-MoE": Architecture(kind="qwen3_moe", changed={**HEAD, **MOE}, targets=ATTENTION),
    "Qwen3-Next": Architecture(
        kind="qwen3_next", changed={**HEAD, **SHARED, **DELTA}, by_rows=True,
        targets=(*ATTENTION, *MLP, "in_proj_qkvz", "out_proj"),
    ),
    "Qwen3.5": Architecture(
        kind="qwen3_5_text", changed={**HEAD, **DELTA}, by_rows=True, targets=HYBRID
    ),
    "Qwen3.5-MoE": Architecture(
        kind="qwen3_5_moe_text", changed={**HEAD, **SHARED, **DELTA}, by_rows=True, targets=HYBRID
    ),
    "Llama 3": Architecture(kind="llama"),
    "Llama 4": Architecture(
        kind="llama4_text", changed={**HEAD, **LLAMA4}, by_rows=True, targets=(*ATTENTION, *MLP)
    ),
    "Mistral": Architecture(kind="mistral", changed={"sliding_window": None}),
    "Mistral with a window": Architecture(kind="mistral", changed={"sliding_window": 16}, by_rows=True),
    "Gemma 2": Architecture(kind="gemma2", changed={**HEAD, **WINDOW, **CAP}, by_rows=True),
    "Gemma 3": Architecture(kind="gemma3_text", changed={**HEAD, **WINDOW}, by_rows=True, vllm="yes"),
    "Gemma 4": Architecture(kind="gemma4_text", changed={**HEAD, **WINDOW, **GEMMA4}, by_rows=True),
    "gpt-oss": Architecture(
        kind="gpt_oss", changed={**HEAD, **WINDOW, **FEW}, by_rows=True, targets=ATTENTION, vllm=NO_RELOAD
    ),
    "GLM-4.5, GLM-4.6": Architecture(kind="glm4_moe", changed={**HEAD, **ROUTED}),
    "DeepSeek-V3": Architecture(kind="deepseek_v3", changed=MLA, by_rows=True, targets=LATENT),
    "Kimi K2": Architecture(kind="deepseek_v3", changed=KIMI, by_rows=True, targets=LATENT),
    "Phi-4": Architecture(kind="phi3", targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "OLMo 2": Architecture(kind="olmo2"),
    "OLMo 3": Architecture(kind="olmo3", changed=WINDOW, by_rows=True),
    "Granite": Architecture(kind="granite", changed={"logits_scaling": 8.0}),
    "SmolLM3": Architecture(kind="smollm3"),
    "MiniMax-M2": Architecture(kind="minimax_m2", changed={**HEAD, **FEW}, targets=ATTENTION),
    "LFM2": Architecture(
        kind="lfm2", changed=CONV, by_rows=True, targets=(*ATTENTION[:3], "in_proj", "out_proj")
    ),
}  # fmt: skip


def saved(folder: Path, kind: str, **changed: Any) -> Path:
    """A model of that kind whose distributions are far from uniform."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**BASE, **changed}))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(5)
    model.save_pretrained(folder / kind)
    return folder / kind


_BEGIN, _END = "<!-- model_zoo: begin -->\n", "<!-- model_zoo: end -->"


def table() -> str:
    """The record in markdown, between its marks."""
    lines = [
        "| model | `model_type` | in a pass | layers with adapters by default | real vLLM on a CPU |",
        "|---|---|---|---|---|",
    ]
    for name, tried in ZOO.items():
        targets = ", ".join(f"`{target}`" for target in tried.targets)
        how = "one row" if tried.by_rows else "shared prefixes"
        lines.append(f"| {name} | `{tried.kind}` | {how} | {targets} | {tried.vllm} |")
    return _BEGIN + "\n".join(lines) + "\n" + _END


if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "models.md"
    text = page.read_text()
    start, end = text.index(_BEGIN), text.index(_END) + len(_END)
    page.write_text(text[:start] + table() + text[end:])
