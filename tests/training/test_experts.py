"""Models with experts reach an engine under the names of a checkpoint, by files and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import BASE, MOE, SHARED, TWO, ZOO, saved
from test_parity_architectures import opened

from insitu.engines.safetensors_file import read_folder
from insitu.engines.weight_mapping import map_weights
from insitu.errors import EngineError
from insitu_train.learner.transfer import published
from insitu_train.weights.export import export
from insitu_train.weights.files import ExportRequest

pytestmark = pytest.mark.slow

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ATTENTION = ("input_layernorm", "post_attention_layernorm", "self_attn.qkv_proj", "self_attn.o_proj")
SERVED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "qwen3_moe": (
        {"head_dim": 8, **MOE},
        (*ATTENTION, "self_attn.q_norm", "self_attn.k_norm", "mlp.gate"),
        "mlp.experts",
    ),
    "qwen2_moe": (
        SHARED, (*ATTENTION, "mlp.gate", "mlp.shared_expert_gate", "mlp.shared_expert.gate_up_proj",
                 "mlp.shared_expert.down_proj"), "mlp.experts",
    ),
    "mixtral": (MIXTRAL, (*ATTENTION, "block_sparse_moe.gate"), "block_sparse_moe.experts"),
}  # fmt: skip
"""As vLLM names them: what a layer has beside its experts, and where these are."""


def server_names(kind: str, between: str) -> list[str]:
    """Parameters of a server, with what stands between experts and their tensors."""
    _, beside, experts = SERVED[kind]
    bias = ["self_attn.qkv_proj.bias"] if kind == "qwen2_moe" else []
    each = [
        *(f"{part}.weight" for part in beside),
        *bias,
        *(f"{experts}{between}.{w}" for w in ("w13_weight", "w2_weight")),
    ]
    layers = [f"model.layers.{i}.{name}" for i in range(BASE["num_hidden_layers"]) for name in each]
    return ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *layers]


@pytest.mark.parametrize("between", ["", ".routed_experts"])
@pytest.mark.parametrize("kind", SERVED)
def test_experts_feed_a_server_by_files_and_without(tmp_path: Path, kind: str, between: str) -> None:
    folder = saved(tmp_path, kind, **SERVED[kind][0])
    policy = opened(folder)
    export(policy, ExportRequest(folder=tmp_path / "out", version=1), folder)
    files = {name: tensor.shape for name, tensor in read_folder(tmp_path / "out").items()}
    sent = {name: tuple(tensor.shape) for name, tensor in published(policy).items()}
    assert sent == {name: tuple(shape) for name, shape in files.items()}
    names = [f"dp0:pp0:tp0:{name}" for name in server_names(kind, between)]
    fed = map_weights(names, sent)
    experts = next(parts for name, parts in fed.sources.items() if name.endswith("0." + SERVED[kind][2]
                   + between + ".w13_weight"))  # fmt: skip
    assert len(experts) == 2 * 4
    lacking = {name: shape for name, shape in sent.items() if ".experts.3." not in name}
    assert (
        map_weights(names, lacking) is not None
    )  # fewer experts, each whole, are another model with as many
    torn = {name: shape for name, shape in sent.items() if name != experts[1]}
    with pytest.raises(EngineError, match="would receive none of the published tensors"):
        map_weights(names, torn)


def test_what_is_sent_is_what_the_files_hold(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe", **SERVED["qwen3_moe"][0])
    policy = opened(folder)
    export(policy, ExportRequest(folder=tmp_path / "out", version=1, dtype="float32"), folder)
    files = read_folder(tmp_path / "out")
    for name, tensor in published(policy).items():
        assert tensor.is_contiguous()
        assert torch.equal(
            tensor, torch.from_numpy(files[name].data.view("float32").copy()).view(tensor.shape)
        )


def test_one_tensor_of_all_experts_feeds_a_server(tmp_path: Path) -> None:
    tried = ZOO["gpt-oss"]
    policy = opened(saved(tmp_path, tried.kind, **{**TWO, **tried.changed}))
    sent = {name: tuple(tensor.shape) for name, tensor in published(policy).items()}
    parts = (
        "attn.qkv_proj.weight", "attn.qkv_proj.bias", "attn.o_proj.weight", "attn.o_proj.bias", "attn.sinks",
        "mlp.router.weight", "mlp.router.bias", "mlp.experts.routed_experts.w13_weight",
        "mlp.experts.routed_experts.w13_bias", "mlp.experts.routed_experts.w2_weight",
        "mlp.experts.routed_experts.w2_bias", "input_layernorm.weight", "post_attention_layernorm.weight",
    )  # fmt: skip
    names = [f"model.layers.{layer}.{part}" for layer in range(2) for part in parts]
    names += ["model.embedding.weight", "model.norm.weight", "lm_head.weight"]
    found = map_weights(names, sent).sources
    assert found["model.layers.1.mlp.experts.routed_experts.w13_bias"] == (
        "model.layers.1.mlp.experts.gate_up_proj_bias",
    )
    assert len(found["model.layers.0.attn.qkv_proj.bias"]) == 3
