"""How architectures of transformers are trained, with random tiny weights: by rows, with the reason, where
insitu's attention does not compute one; refused where its head or positions are not the engine's. Adapters
find the layers that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import ATTENTION, BASE, DELTA, HEAD, MLA, MLP, MOE, SHARED, TWO, saved
from rounding import apart
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

from insitu.engines.safetensors_file import read_folder
from insitu.engines.weight_mapping import map_weights
from insitu.errors import TrainError
from insitu_train.model import parity as proof
from insitu_train.model.hf import HfPolicy, open_hf
from insitu_train.options import Lora
from insitu_train.weights.export import export
from insitu_train.weights.files import ExportRequest

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def opened(folder: Path, lora: Lora | None = None) -> HfPolicy:
    return open_hf(folder, device=CPU, dtype=torch.float32, lora=lora)


BY_ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a window in the mask alone": (
        "phimoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "router_jitter_noise": 0.0,
         "input_jitter_noise": 0.0},
        "an attention mask that is not plain causal (sliding_window = 64)",
    ),
    "a window longer than the rows of the proof": (
        "doge", {"sliding_window": 200}, "not plain causal (sliding_window = 200)",
    ),
    "layers with a window": ("olmo3", {"sliding_window": 16}, "olmo3 has layers of type sliding_attention"),
    "chunks": (
        "llama4_text",
        {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
         "attention_chunk_size": 64},
        "llama4_text has layers of type chunked_attention",
    ),
    "values of another width": (
        "deepseek_v3", MLA, "DeepseekV3Attention needs values of width 8 with keys of width 16",
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": (
        "phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
        "phi3 has rope_type longrope, whose angles depend on the longest row",
    ),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}, "llama has rope_type dynamic"),
    "a head with a bias": ("phi", {}, "PhiForCausalLM has no plain output head"),
}  # fmt: skip


@pytest.mark.parametrize("what", BY_ROWS)
def test_what_insitus_attention_does_not_compute_runs_by_rows(tmp_path: Path, what: str) -> None:
    kind, changed, reason = BY_ROWS[what]
    policy = opened(saved(tmp_path, kind, **changed))
    assert policy.by_rows
    assert reason in policy.notices[0]
    assert policy.notices[0].endswith('; each row runs alone (train.layout = "rows")')
    assert "\n" not in policy.notices[0]
    assert ["has experts" in line for line in policy.notices[1:]] == [True] * ("experts" in str(changed))


def test_the_layout_can_be_asked_for(tmp_path: Path) -> None:
    policy = open_hf(saved(tmp_path, "llama"), device=CPU, dtype=torch.float32, rows=True)
    assert policy.by_rows
    assert not policy.notices


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


def wrapped(folder: Path) -> Path:
    """A tiny Qwen3.5 as it is published: the text part beside a vision tower."""
    text = {**BASE, **TWO, **HEAD, **DELTA}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    config = CONFIG_MAPPING["qwen3_5"](text_config=text, vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_the_text_part_of_a_multimodal_model_trains_and_keeps_its_names(tmp_path: Path) -> None:
    start = wrapped(tmp_path / "start")
    policy = opened(start)
    assert policy.by_rows
    export(policy, ExportRequest(folder=tmp_path / "out", version=1, dtype="float32"), start)
    out = {name: tensor.shape for name, tensor in read_folder(tmp_path / "out").items()}
    given = {name: tensor.shape for name, tensor in read_folder(start).items()}
    assert out == {name: shape for name, shape in given.items() if ".visual." not in name}
    assert set(out) == {name for name, _ in policy.published()}
    # a server that was started without its vision tower
    server = [name.replace("model.language_model.", "language_model.model.") for name in out]
    server = [name.replace("lm_head.", "language_model.lm_head.") for name in server]
    fused = [
        name.replace("in_proj_qkv.", "in_proj_qkvz.").replace("in_proj_b.", "in_proj_ba.") for name in server
    ]
    named = [name for name in fused if "in_proj_z." not in name and "in_proj_a." not in name]
    found = map_weights(named, {name: tuple(shape) for name, shape in out.items()}).sources
    assert found["language_model.lm_head.weight"] == ("lm_head.weight",)
    assert opened(tmp_path / "out").by_rows


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_proof_itself_finds_angles_that_depend_on_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A kind of position embedding that is not listed."""
    monkeypatch.setattr(proof, "_ROPE_BY_LENGTH", frozenset())
    folder = saved(tmp_path, REFUSED[kind][0], **REFUSED[kind][1])
    if kind == "dynamic":  # its angles move beyond the length that it was made for
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["original_max_position_embeddings"] = 64
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
        monkeypatch.setattr(proof, "last_position", lambda config: 200)
    policy = opened(folder)
    assert policy.by_rows
    assert "differ by" in policy.notices[0]


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
    policy.stored().write(tmp_path / "adapters")
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
         " adapter support); there are k_proj, o_proj, q_proj, v_proj: set policy.lora_targets = "
         '["q_proj", "k_proj", "v_proj", "o_proj"], or policy.lora_rank = 0 for all weights'),
        ("qwen3_moe", {"head_dim": 8, **MOE, "mlp_only_layers": [0]}, "gate_proj",
         "only 1 of 4 layers have a linear layer gate_proj"),
        ("phi3", {}, "q_proj", "a linear layer q_proj; there are down_proj, gate_up_proj, o_proj, qkv_proj"),
    ],
)  # fmt: skip
def test_a_layer_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, kind: str, changed: dict[str, Any], asked: str, reason: str
) -> None:
    with pytest.raises(TrainError) as refused:
        opened(saved(tmp_path, kind, **changed), Lora(rank=2, alpha=4.0, targets=(asked,)))
    assert reason in str(refused.value)
