"""Known families for the tests: Qwen's real vocabulary, and small ones with the others' control tokens."""

from __future__ import annotations

import functools
from pathlib import Path

from qwen_vocabulary import qwen_tokenizer_json

from whet.render.encode import Codec
from whet.render.known import KnownFamily, known_family

FAMILIES = ("qwen3",)


@functools.cache
def family_of(name: str, cache: Path) -> KnownFamily:
    return known_family(name, Codec(qwen_tokenizer_json(cache)))
