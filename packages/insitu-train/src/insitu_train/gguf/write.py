"""A model as one GGUF file, which llama.cpp and what is built on it load."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.errors import ConfigError, RecordError
from insitu.install_hints import install_extra
from insitu_train.gguf.families import (
    FAMILIES,
    ROPE_DIVISORS,
    TOP,
    halves_paired,
    layer_tensors,
    llama3_divisors,
    rotary_heads,
)
from insitu_train.gguf.pretokenizers import kind_of
from insitu_train.gguf.tokenizer import ENDS, KINDS

WRITTEN: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""Types of the matrices in the file, by `--dtype`; vectors are float32."""
_FILE_TYPES = {"F32": 0, "BF16": 32, "Q8_0": 7}
_CALLED = {"mistral": "llama"}
"""Architectures that llama.cpp calls by another name."""

Values = npt.NDArray[np.float32]


def write_gguf(
    file: Path,
    assets: Path,
    config: Mapping[str, Any],
    names: Collection[str],
    values_of: Callable[[str], Values],
    *,
    dtype: str,
) -> None:
    """Write the new file, one tensor at a time in memory.

    assets: folder with the tokenizer's files. names, values_of: the tensors as the folder of `config` has
    them. dtype: a key of `WRITTEN`. Raises RecordError for a model that GGUF cannot hold, ConfigError without
    the package, OSError.
    """
    if find_spec("gguf") is None:
        raise ConfigError(f"--to gguf: the package gguf is not installed: {install_extra('gguf')}")
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    kind = _architecture(config)
    heads, kv_heads, head_width = _heads(config)
    tied = bool(config.get("tie_word_embeddings"))
    stored = _stored_names(kind, int(config["num_hidden_layers"]), names, tied)
    writer = GGUFWriter(None, kind)
    _describe(writer, kind, config, head_width, dtype)
    _describe_tokenizer(writer, assets, int(config["vocab_size"]))
    divisors = _divisors(config, head_width)

    def raw_type(rows: Sequence[int]) -> GGMLQuantizationType:
        return GGMLQuantizationType[WRITTEN[dtype] if len(rows) > 1 else "F32"]

    def data_of(own: str) -> Values:
        if own == ROPE_DIVISORS:
            return divisors
        found = values_of(stored[own])
        turned = rotary_heads(own, heads, kv_heads) if FAMILIES[kind].permuted else 0
        return halves_paired(found, turned) if turned else found  # type: ignore[return-value]

    order = [*stored, *([ROPE_DIVISORS] if len(divisors) else [])]
    for own in order:
        shape = data_of(own).shape
        held = raw_type(shape)
        if held == GGMLQuantizationType.F32:
            writer.add_tensor_info(own, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
            continue
        try:
            packed = quant_shape_to_byte_shape(shape, held)
        except ValueError as error:
            raise RecordError(f"{stored[own]}: {error}: write it with --dtype bfloat16") from error
        writer.add_tensor_info(own, packed, np.dtype(np.uint8), int(np.prod(packed)), raw_dtype=held)
    writer.write_header_to_file(file)
    try:
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for own in order:
            values = np.ascontiguousarray(data_of(own), np.float32)
            writer.write_tensor_data(quantize(values, raw_type(values.shape)))
    finally:
        writer.close()


def _architecture(config: Mapping[str, Any]) -> str:
    named = str(config.get("model_type"))
    kind = _CALLED.get(named, named)
    if kind not in FAMILIES:
        known = ", ".join([*FAMILIES, *_CALLED])
        raise RecordError(
            f"a model of type {named!r} is not written as GGUF, only {known}; llama.cpp's"
            " convert_hf_to_gguf.py may write it from --to hf"
        )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and named != "llama":
        raise RecordError(f"{named} with a sliding window of {window:,} tokens is not written as GGUF")
    return kind


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return heads, int(config.get("num_key_value_heads") or heads), width


def _stored_names(kind: str, layers: int, names: Collection[str], tied: bool) -> dict[str, str]:
    """Return the tensors' names in the folder, by those in the file; raise RecordError for what is amiss."""
    top = {f"{own}.weight": f"{name}.weight" for own, name in TOP.items()}
    if tied:
        del top["output.weight"]
    wanted = {**top, **layer_tensors(FAMILIES[kind], layers)}
    if missing := {*wanted.values()} - {*names}:
        raise RecordError(f"the model has no tensor {min(missing)}, which {kind} needs in GGUF")
    if unknown := {*names} - {*wanted.values()} - {"lm_head.weight"}:
        raise RecordError(f"GGUF has no place for the tensor {min(unknown)} of {kind}")
    return wanted


def _describe(writer: Any, kind: str, config: Mapping[str, Any], head_width: int, dtype: str) -> None:
    heads, kv_heads, _ = _heads(config)
    writer.add_file_type(_FILE_TYPES[WRITTEN[dtype]])
    if dtype == "q8_0":
        writer.add_quantization_version(2)
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_rope_dimension_count(head_width)
    writer.add_rope_freq_base(_theta(config))


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _theta(config: Mapping[str, Any]) -> float:
    return float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _divisors(config: Mapping[str, Any], head_width: int) -> Values:
    """Return the content of `rope_freqs`, empty for RoPE as it is. Raises RecordError for other scaling."""
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return np.zeros(0, np.float32)
    if kind != "llama3":
        raise RecordError(f"RoPE with scaling {kind!r} is not written as GGUF")
    return llama3_divisors(
        _theta(config),
        head_width,
        float(rope["factor"]),
        int(rope["original_max_position_embeddings"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
    )


def _describe_tokenizer(writer: Any, assets: Path, rows: int) -> None:
    """Write vocabulary, merges, chat template and the tokens that end a reply; `rows` of the embedding."""
    file = json.loads((assets / "tokenizer.json").read_text(encoding="utf-8"))
    pre = kind_of(file)
    if file["model"].get("type") != "BPE" or not pre:
        raise RecordError(
            "the tokenizer cuts text in a way that insitu does not know of llama.cpp: write --to hf and"
            " convert that with llama.cpp's convert_hf_to_gguf.py"
        )
    ids: dict[str, int] = dict(file["model"]["vocab"])
    kinds: dict[str, int] = {}
    for token in file["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["content"]] = KINDS["control" if token["special"] else "user"]
    if not ids or max(ids.values()) >= rows:
        raise RecordError(f"the tokenizer has ids that the {rows:,} rows of the embedding do not cover")
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [KINDS["unused"]] * rows
    for text, number in ids.items():
        tokens[number], types[number] = text, kinds.get(text, 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # tokenizers writes a merge as a pair, older versions of it as one text
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in file["model"]["merges"]])
    described = _read(assets / "tokenizer_config.json")
    for name in ("bos", "pad", "unk"):
        known = ids.get(_text(described.get(f"{name}_token")))
        if known is not None:
            getattr(writer, f"add_{name}_token_id")(known)
    for name, end in zip(ENDS, _ends(assets, described, ids), strict=False):
        getattr(writer, f"add_{name}_token_id")(end)
    bos = _text(described.get("bos_token"))
    writer.add_add_bos_token(bool(bos) and bos in json.dumps(file.get("post_processor"), ensure_ascii=False))
    template = assets / "chat_template.jinja"
    written = template.read_text(encoding="utf-8") if template.exists() else described.get("chat_template")
    if written:
        writer.add_chat_template(written)


def _ends(assets: Path, described: Mapping[str, Any], ids: Mapping[str, int]) -> Iterable[int]:
    """Return the tokens that end a reply, the one of the chat template first."""
    named = _read(assets / "generation_config.json").get("eos_token_id", [])
    chat = ids.get(_text(described.get("eos_token")))
    found = [*([] if chat is None else [chat]), *(named if isinstance(named, list) else [named])]
    return list(dict.fromkeys(found))


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
