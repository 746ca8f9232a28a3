"""GGUF files become model folders and are made of them; what is not whole or known is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_lab import CONTROL, FAMILIES, TEMPLATE, TEXTS, gguf_of, logits, model_folder
from safetensors.torch import load_file
from tokenizers import Tokenizer

from insitu import cli
from insitu.config import load_config
from insitu.config import model_folder as folder_of
from insitu.errors import ConfigError, RecordError
from insitu_train.gguf.pretokenizers import PRETOKENIZERS
from insitu_train.gguf.read import gguf_folder

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
IDS = np.arange(3, 60) * 7


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def read(file: Path) -> Path:
    said: list[str] = []
    return gguf_folder(str(file), said.append)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_comes_back_as_it_was_written(tmp_path: Path, kind: str) -> None:
    source = model_folder(tmp_path / "model", kind)
    folder = read(gguf_of(source, tmp_path / "model.gguf"))
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(source, IDS), logits(folder, IDS)), "the configuration says the same"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == json.loads((source / "generation_config.json").read_text())["eos_token_id"]
    described = json.loads((folder / "tokenizer_config.json").read_text())
    assert described["eos_token"] == CONTROL[2]


@pytest.mark.parametrize("pre", PRETOKENIZERS)
def test_text_becomes_the_same_tokens(tmp_path: Path, pre: str) -> None:
    source = model_folder(tmp_path / "model", "llama", pre)
    folder = read(gguf_of(source, tmp_path / "model.gguf"))
    ours, theirs = (Tokenizer.from_file(str(one / "tokenizer.json")) for one in (folder, source))
    for text in [*TEXTS, "<|im_start|>user\nx<|im_end|><tool_call>{}</tool_call>"]:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_bfloat16_stays_and_quantized_tensors_become_float32(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "model", "llama")
    whole = load_file(source / "model.safetensors")
    for dtype, bound, kept in (("bfloat16", 2**-8, torch.bfloat16), ("q8_0", 2**-7, torch.float32)):
        held = load_file(read(gguf_of(source, tmp_path / f"{dtype}.gguf", dtype)) / "model.safetensors")
        for name, tensor in whole.items():
            assert held[name].dtype == (kept if tensor.dim() > 1 else torch.float32)
            # Rounding is relative to a value in bfloat16, to the largest of 32 in Q8_0.
            scale = tensor.abs() if dtype == "bfloat16" else tensor.abs().max()
            assert ((held[name].float() - tensor).abs() <= bound * scale + 1e-9).all(), (dtype, name)


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_each_type_that_is_read_is_dequantized_by_the_package(tmp_path: Path, kind: str) -> None:
    source = model_folder(tmp_path / "model", "llama")
    file = with_matrix_of(gguf_of(source, tmp_path / "a.gguf"), tmp_path / "b.gguf", kind)
    held = load_file(read(file) / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.0.ffn_up.weight")
    wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    assert np.array_equal(held.numpy(), wanted.reshape(held.shape))


def with_matrix_of(file: Path, out: Path, kind: str) -> Path:
    """The file again with `blk.0.ffn_up` as random blocks of a type."""
    quant = gguf.GGMLQuantizationType[kind]
    rows, columns = 96, 64
    _, width = gguf.GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(0)
    block = gguf.GGML_QUANT_SIZES[quant][0]
    if kind == "F16":
        data: Any = rng.standard_normal((rows, columns)).astype(np.float16)
    elif columns % block:
        # k-quants need rows of 256: the same values in fewer, longer rows.
        rows, columns = rows * columns // block, block
        data = rng.integers(0, 60, (rows, width), np.uint8)
    else:
        data = rng.integers(0, 60, (rows, columns // block * width), np.uint8)
    return rewritten(file, out, {"blk.0.ffn_up.weight": (data, quant)})


def rewritten(
    file: Path,
    out: Path,
    tensors: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """The file with other tensors (data, type) and settings."""
    tensors, fields = tensors or {}, fields or {}
    reader = gguf.GGUFReader(file)
    kind = fields.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(None, kind)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in without:
            continue
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        value = fields.get(name, field.contents())
        writer.add_key_value(name, value, field.types[0], sub_type=field.types[-1] if array else None)
    for tensor in reader.tensors:
        if tensor.name not in without:
            data, quant = tensors.get(tensor.name, (tensor.data, tensor.tensor_type))
            writer.add_tensor(tensor.name, data, raw_dtype=quant)
    writer.write_header_to_file(out)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_a_file_is_converted_once_and_found_by_its_content(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_of(model_folder(tmp_path / "model", "qwen3"), tmp_path / "model.gguf")
    said: list[str] = []
    folder = gguf_folder(str(file), said.append)
    assert said == ["converting model.gguf into a model folder, once"]
    copied = tmp_path / "copied.gguf"
    copied.write_bytes(file.read_bytes())
    monkeypatch.setitem(sys.modules, "gguf", None)  # what is in the cache needs no package
    assert gguf_folder(str(copied), said.append) == folder
    assert folder_of(load_config(None, {"model.path": str(copied)})) == folder
    assert len(said) == 1
    assert list(cache.iterdir()) == [folder]


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_model(tmp_path: Path, cache: Path) -> None:
    file = gguf_of(model_folder(tmp_path / "model", "llama"), tmp_path / "model.gguf")
    code = (
        "import os, signal; from insitu_train.gguf import read\n"
        "write = read.write_stream\n"
        "def cut(path, specs, data, *rest):\n"
        "    write(path, dict(list(specs.items())[:3]), data); os.kill(os.getpid(), signal.SIGKILL)\n"
        "read.write_stream = cut\n"
        f"read.gguf_folder({str(file)!r}, print)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    assert [path.name.partition(".part")[1] for path in cache.iterdir()] == [".part"]
    folder = read(file)
    assert list(cache.iterdir()) == [folder]


def cut(file: Path, out: Path) -> Path:
    data = file.read_bytes()
    out.write_bytes(data[: len(data) * 2 // 3])
    return out


def noise(file: Path, out: Path) -> Path:
    out.write_bytes(b"GGUF" + bytes(range(256)) * 8)
    return out


def no_gguf(file: Path, out: Path) -> Path:
    out.write_bytes(b"PK\3\4 something else")
    return out


def with_field(name: str, value: Any) -> Callable[[Path, Path], Path]:
    return lambda file, out: rewritten(file, out, fields={name: value})


def unknown_type(file: Path, out: Path) -> Path:
    quant = gguf.GGMLQuantizationType.IQ4_NL
    data = np.zeros((96, 64 // 32 * gguf.GGML_QUANT_SIZES[quant][1]), np.uint8)
    return rewritten(file, out, {"blk.1.ffn_up.weight": (data, quant)})


REFUSED = {
    "cut off": (cut, "is damaged or cut off"),
    "noise": (noise, "is damaged or cut off"),
    "another file": (no_gguf, "is not a GGUF file"),
    "architecture": (
        lambda file, out: rewritten(file, out, fields={"general.architecture": "mamba"}),
        "the architecture 'mamba' is not read from GGUF, only llama, qwen2, qwen3",
    ),
    "quantization": (unknown_type, "blk.1.ffn_up.weight is of type IQ4_NL, which is not read; only F32"),
    "tensor": (
        lambda file, out: rewritten(file, out, without=("blk.1.ffn_up.weight",)),
        "has no tensor blk.1.ffn_up.weight",
    ),
    "setting": (
        lambda file, out: rewritten(file, out, without=("llama.block_count",)),
        "has no llama.block_count",
    ),
    "no heads": (with_field("llama.attention.head_count", 0), "is damaged: 2 layers of 0/"),
    "no end of layers": (with_field("llama.block_count", 2**32 - 1), "is damaged: 4294967295 layers"),
    "pre-tokenizer": (
        with_field("tokenizer.ggml.pre", "tekken"),
        "the pre-tokenizer 'tekken' was not compared with llama.cpp's, so it is not read; only gpt-2, smollm",
    ),
    "tokenizer": (with_field("tokenizer.ggml.model", "llama"), "a tokenizer of kind 'llama' is not read"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_whole_or_not_known_is_refused_in_one_line(
    tmp_path: Path, cache: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, said = REFUSED[what]
    file = spoil(gguf_of(model_folder(tmp_path / "model", "llama"), tmp_path / "a.gguf"), tmp_path / "b.gguf")
    with pytest.raises(ConfigError) as refused:
        read(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(cache.glob("*")), "nothing half stays"
    assert cli.main(["train", "examples/demo.toml", f"model.path={file}", "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_a_missing_file_and_a_missing_package_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"model.path: read .*no\.gguf.*No such file"):
        read(tmp_path / "no.gguf")
    file = gguf_of(model_folder(tmp_path / "model", "llama"), tmp_path / "model.gguf")
    monkeypatch.setattr("insitu_train.gguf.read.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package gguf is not installed: .*gguf\]"):
        read(file)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "gemma3_text"}, "a model of type 'gemma3_text' is not written as GGUF"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "RoPE with scaling 'yarn' is not written as GGUF"),
        ({"num_hidden_layers": 3}, "the model has no tensor model.layers.2."),
        ({"num_hidden_layers": 1}, "GGUF has no place for the tensor model.layers.1."),
        ({"vocab_size": 100}, "the tokenizer has ids that the 100 rows of the embedding do not cover"),
    ],
)
def test_what_gguf_cannot_hold_is_not_written(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    source = model_folder(tmp_path / "model", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(RecordError, match=said):
        gguf_of(source, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
