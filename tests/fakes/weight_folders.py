"""Small model folders of chance weights, with the tensor names of Qwen3; and how a server would hold them.

For fake engine servers and benches: the files are real safetensors files, the numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import orjson

from insitu.engines.safetensors_file import StoredTensor, digest, write_tensors

LAYER = {
    "input_layernorm.weight": (8,),
    "mlp.down_proj.weight": (8, 16),
    "mlp.gate_proj.weight": (16, 8),
    "mlp.up_proj.weight": (16, 8),
    "post_attention_layernorm.weight": (8,),
    "self_attn.k_norm.weight": (4,),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "self_attn.q_norm.weight": (4,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.v_proj.weight": (4, 8),
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def chance_tensors(
    seed: str, *, layers: int = 2, vocab: int = 32, tied: bool = True
) -> dict[str, StoredTensor]:
    """Float32 tensors that follow from `seed`."""
    random = np.random.default_rng([ord(c) for c in seed])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, 8), "model.norm.weight": (8,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, 8)
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    found = {}
    for name in sorted(shapes):
        values = random.normal(scale=0.02, size=shapes[name]).astype(np.float32)
        found[name] = StoredTensor(dtype="F32", shape=shapes[name], data=values.reshape(-1).view(np.uint8))
    return found


def chance_folder(folder: Path, seed: str, *, tied: bool = True) -> Path:
    """A model folder with them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", chance_tensors(seed, tied=tied))
    (folder / "config.json").write_bytes(orjson.dumps({"tie_word_embeddings": tied}))
    return folder


def served_sums(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The sums a server gives for its parameters: matrices fused, a tied head left out."""
    fused = {part: whole for whole, parts in FUSED.items() for part in parts}
    groups: dict[str, list[str]] = {}
    for name in tensors:
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        groups.setdefault(f"{parent}.{fused[module]}.{leaf}" if module in fused else name, []).append(name)
    order = [part for parts in FUSED.values() for part in parts]
    found = {}
    for whole, names in groups.items():
        if len(names) > 1:
            names.sort(key=lambda name: order.index(name.split(".")[-2]))
        found[whole] = digest([tensors[name].data for name in names])
    return found
