"""The tokenizer of a GGUF file as tokenizer.json, and what ends a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from insitu.errors import ConfigError
from insitu_train.gguf.pretokenizers import ALIASES, PRETOKENIZERS, WHOLE_WORDS

KINDS = {"unknown": 2, "control": 3, "user": 4, "unused": 5}
"""Numbers of the kinds of tokens that are no pieces of text; 1 is one."""
ENDS = ("eos", "eot", "eom")
"""Settings with tokens that end a reply."""


class Settings(Protocol):
    """The settings of a file."""

    file: Path

    def get(self, key: str, default: Any = None) -> Any: ...

    def need(self, key: str) -> Any: ...


def tokenizer_json(file: Settings) -> str:
    """Return the content of tokenizer.json. Raises ConfigError for a kind of tokenizer that is not read."""
    model, pre = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    pre = ALIASES.get(pre, pre)
    if model != "gpt2":
        raise ConfigError(f"{file.file}: a tokenizer of kind {model!r} is not read, only 'gpt2' (byte pairs)")
    if pre not in PRETOKENIZERS:
        raise ConfigError(
            f"{file.file}: the pre-tokenizer {pre!r} was not compared with llama.cpp's, so it is not read;"
            f" only {', '.join(PRETOKENIZERS)}"
        )
    tokens = file.need("tokenizer.ggml.tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [_pair(file, merge, vocabulary) for merge in file.need("tokenizer.ggml.merges")]
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in WHOLE_WORDS)
    made = Tokenizer(bpe)
    made.pre_tokenizer, made.decoder = PRETOKENIZERS[pre], decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _of_kind(file, tokens, "control")]
    )
    made.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in _of_kind(file, tokens, "user")]
    )
    if file.get("tokenizer.ggml.add_bos_token") and (bos := _token(file, tokens, "bos")):
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return str(made.to_str())


def tokenizer_config(file: Settings) -> str:
    """Return the content of tokenizer_config.json."""
    tokens = file.need("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {f"{name}_token": _token(file, tokens, key) for name, key in names.items()}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **{name: text for name, text in special.items() if text},
    }
    return json.dumps(described, indent=2, ensure_ascii=False) + "\n"


def generation_config(file: Settings) -> str:
    """Return the content of generation_config.json: the tokens that end a reply."""
    numbers = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    ends = list(dict.fromkeys(number for number in numbers if number is not None))
    return json.dumps({"eos_token_id": ends}) + "\n"


def _of_kind(file: Settings, tokens: Sequence[str], kind: str) -> Iterator[str]:
    kinds = file.need("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ConfigError(f"{file.file} has {len(tokens):,} tokens and kinds of {len(kinds):,}")
    return (token for token, number in zip(tokens, kinds, strict=True) if number == KINDS[kind])


def _token(file: Settings, tokens: Sequence[str], name: str) -> str:
    number = file.get(f"tokenizer.ggml.{name}_token_id")
    return "" if number is None or not 0 <= number < len(tokens) else tokens[number]


def _pair(file: Settings, merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    first, space, second = merge.partition(" ")
    if not space or first + second not in vocabulary:
        raise ConfigError(f"{file.file}: the merge {merge!r} makes no token")
    return first, second
