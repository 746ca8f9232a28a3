"""How text is cut before byte pairs are merged: the kinds that `tokenizer.ggml.pre` may name.

Only kinds whose tokens were compared with llama.cpp's own are here (tests/full/test_gguf_tokens.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS + digits + _REST), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRETOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _gpt2(),
    "smollm": _single_digits(),
    "qwen2": _split(r"\p{N}"),
    "llama-bpe": _split(r"\p{N}{1,3}"),
}
"""By the first name that llama.cpp has for a kind."""
ALIASES: Mapping[str, str] = {"deepseek-r1-qwen": "qwen2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}
WHOLE_WORDS = ("llama-bpe",)
"""Kinds with which a piece of text that is a token is not taken apart (`ignore_merges`)."""


def kind_of(tokenizer: Mapping[str, Any]) -> str:
    """Return the kind of a tokenizer.json, "" if it is none of these."""
    wanted = _described(tokenizer.get("pre_tokenizer"))
    return next(
        (k for k, own in PRETOKENIZERS.items() if _described(json.loads(own.__getstate__())) == wanted), ""
    )


def _described(value: Any) -> Any:
    """Return a pre-tokenizer without what changes no token."""
    if isinstance(value, dict):
        return {k: _described(v) for k, v in value.items() if k not in ("trim_offsets", "invert")}
    return [_described(one) for one in value] if isinstance(value, list) else value
