"""A GGUF file as a model folder, converted once and kept in the cache.

The folder is named after the file's SHA-256 and appears whole or not at all. Quantized tensors become
float32, by the package `gguf`; bfloat16 ones stay.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from insitu.engines.safetensors_file import Bytes, TensorSpec, write_stream
from insitu.errors import ConfigError, boundary
from insitu.install_hints import install_extra
from insitu.storage.files import sha256_of
from insitu.storage.temp_dirs import cache_folder, keep, part_folder, remove_stale_parts
from insitu_train.gguf.families import (
    FAMILIES,
    ROPE_DIVISORS,
    TOP,
    Family,
    halves_apart,
    layer_tensors,
    llama3_divisors,
    rotary_heads,
)
from insitu_train.gguf.tokenizer import generation_config, tokenizer_config, tokenizer_json

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

READ = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of tensors that are read; a file in Q4_K has some tensors in Q6_K or Q5_K."""
LAYOUT = 1
"""Number of the form of converted folders: another one makes them again."""
_ORIGINAL_CONTEXTS, _FACTORS = (8192,), (8.0, 32.0)
"""Settings of Llama 3.1, 3.2 and 3.3, of which a file has only the result."""


def gguf_folder(path: str, say: Callable[[str], None]) -> Path:
    """Return the folder of the file's model; convert it first where the cache has it not.

    `say` gets a line before a conversion. Raises ConfigError for a file that is not whole or not of a kind
    that is read.
    """
    file = Path(path)
    with boundary(ConfigError, f"model.path: read {file}"):
        state = file.stat()
    if not file.is_file():
        raise ConfigError(f"model.path: {file} is not a file")
    # Renamed or copied it is the same file; touched, its digest is computed again.
    folder = (
        cache_folder() / "models" / f"gguf-{_digest(file, state.st_size, state.st_mtime_ns)[:24]}-{LAYOUT}"
    )
    if (folder / "config.json").exists():
        return folder
    if find_spec("gguf") is None:
        raise ConfigError(f"model.path: {file}: the package gguf is not installed: {install_extra('gguf')}")
    say(f"converting {file.name} into a model folder, once")
    with boundary(ConfigError, f"model.path: convert {file}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_parts(folder.parent)
        with part_folder(folder) as part:
            convert(file, part)
            keep(part, folder)
    return folder


@functools.cache
def _digest(file: Path, size: int, changed: int) -> str:
    return sha256_of(file)


def convert(file: Path, folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template into an existing folder.

    Raises ConfigError, OSError.
    """
    reader = _opened(file)
    model = _Model(file, reader)
    texts = {
        "config.json": json.dumps(model.config(), indent=2) + "\n",
        "generation_config.json": generation_config(model),
        "tokenizer.json": tokenizer_json(model),
        "tokenizer_config.json": tokenizer_config(model),
    }
    if template := model.get("tokenizer.chat_template"):
        texts["chat_template.jinja"] = template
    model.write_weights(folder / "model.safetensors")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _opened(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise ConfigError(f"{file} is not a GGUF file")
        return GGUFReader(file)
    except (ValueError, LookupError, OverflowError, MemoryError, TypeError) as error:
        raise ConfigError(f"{file} is damaged or cut off: {error or type(error).__name__}") from error


class _Model:
    """A file's settings by name, and its tensors."""

    def __init__(self, file: Path, reader: GGUFReader) -> None:
        self.file = file
        self._fields = reader.fields
        self.kind = str(self.need("general.architecture"))
        if self.kind not in FAMILIES:
            raise ConfigError(
                f"{file}: the architecture {self.kind!r} is not read from GGUF, only {', '.join(FAMILIES)}; a"
                " model folder of transformers may be (docs/models.md)"
            )
        self.family: Family = FAMILIES[self.kind]
        self.tensors: Mapping[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.layers = int(self.own("block_count"))
        self.heads = int(self.own("attention.head_count"))
        self.kv_heads = int(self.own("attention.head_count_kv", self.heads))
        self.width = int(self.own("embedding_length"))
        whole = 0 < self.layers <= len(self.tensors) and 0 < self.kv_heads <= self.heads <= self.width
        if not whole or self.heads % self.kv_heads:
            raise ConfigError(
                f"{file} is damaged: {self.layers} layers of {self.heads}/{self.kv_heads} heads"
            )
        self.head_width = int(self.own("attention.key_length", self.width // self.heads))
        self._named = self._names()

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """Return a setting; raise ConfigError where the file has none."""
        if (found := self.get(key)) is None:
            raise ConfigError(f"{self.file} has no {key}")
        return found

    def own(self, key: str, default: Any = None) -> Any:
        """Return a setting of the architecture: one number for all layers."""
        name = f"{self.kind}.{key}"
        found = self.need(name) if default is None else self.get(name, default)
        if not isinstance(found, int | float):
            raise ConfigError(f"{self.file}: {name} differs from layer to layer, which is not read")
        return found

    def _names(self) -> Mapping[str, str]:
        """Return the tensors' names in a folder, by those in the file; raise ConfigError for others."""
        top = {f"{own}.weight": f"{name}.weight" for own, name in TOP.items()}
        known = {**top, **layer_tensors(self.family, self.layers)}
        if missing := known.keys() - self.tensors.keys() - {"output.weight"}:
            raise ConfigError(f"{self.file} has no tensor {min(missing)}")
        if unknown := self.tensors.keys() - known.keys() - {ROPE_DIVISORS}:
            raise ConfigError(f"{self.file}: {self.kind} has no tensor {min(unknown)}")
        for name, tensor in self.tensors.items():
            if tensor.tensor_type.name not in READ:
                raise ConfigError(
                    f"{self.file}: {name} is of type {tensor.tensor_type.name}, which is not read; only"
                    f" {', '.join(READ)}"
                )
        return {own: name for own, name in known.items() if own in self.tensors}

    def config(self) -> Mapping[str, Any]:
        """Return the content of config.json."""
        dtype = "bfloat16" if self.tensors["token_embd.weight"].tensor_type.name == "BF16" else "float32"
        theta = _exact(self.own("rope.freq_base", 10000.0))
        scaling = self._scaling(theta)
        return {
            "architectures": [self.family.model_class],
            "model_type": self.kind,
            "hidden_act": "silu",
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "hidden_size": self.width,
            "intermediate_size": int(self.own("feed_forward_length")),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "max_position_embeddings": int(self.own("context_length")),
            "rms_norm_eps": _exact(self.own("attention.layer_norm_rms_epsilon")),
            "rope_theta": theta,
            **({"rope_scaling": scaling} if scaling else {}),
            "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "use_sliding_window": False,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.need("tokenizer.ggml.eos_token_id"),
            "dtype": dtype,
            "torch_dtype": dtype,
        }

    def _scaling(self, theta: float) -> Mapping[str, Any]:
        """Return `rope_scaling`, empty for none. Raises ConfigError for one that is not known."""
        if (kind := self.get(f"{self.kind}.rope.scaling.type", "none")) != "none":
            raise ConfigError(f"{self.file}: RoPE with scaling {kind!r} is not read from GGUF")
        if int(self.own("rope.dimension_count", self.head_width)) != self.head_width:
            raise ConfigError(f"{self.file}: RoPE turns a part of each head, which is not read from GGUF")
        if ROPE_DIVISORS not in self.tensors:
            return {}
        stored = np.asarray(self.tensors[ROPE_DIVISORS].data, np.float32)
        for factor in _FACTORS:
            for original in _ORIGINAL_CONTEXTS:
                made = llama3_divisors(theta, self.head_width, factor, original)
                if made.shape == stored.shape and np.allclose(made, stored, rtol=1e-4):
                    return {
                        "rope_type": "llama3",
                        "factor": factor,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": original,
                    }
        raise ConfigError(f"{self.file}: {ROPE_DIVISORS} is not the RoPE scaling of Llama 3.1 to 3.3")

    def write_weights(self, path: Path) -> None:
        """Write all tensors, one at a time in memory."""
        by_name = {name: own for own, name in self._named.items()}
        specs = {name: self._spec(own) for name, own in by_name.items()}
        write_stream(path, specs, lambda name: self._data(by_name[name]))

    def _spec(self, own: str) -> TensorSpec:
        tensor = self.tensors[own]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        code, width = ("BF16", 2) if tensor.tensor_type.name == "BF16" else ("F32", 4)
        return TensorSpec(dtype=code, shape=shape, nbytes=width * int(tensor.n_elements))

    def _data(self, own: str) -> Bytes:
        from gguf.quants import dequantize

        tensor = self.tensors[own]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if tensor.tensor_type.name == "BF16":
            values: Any = np.ascontiguousarray(tensor.data).view(np.uint16)
        else:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        values = values.reshape(shape)
        heads = rotary_heads(own, self.heads, self.kv_heads) if self.family.permuted else 0
        if heads:
            values = halves_apart(values, heads)
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _exact(value: float) -> float:
    """Return the shortest decimal number that is this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
