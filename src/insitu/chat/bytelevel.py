"""Decoding of byte-level vocabularies by a table: a token is the bytes that its characters stand for.

The tokenizer library takes 0.2 µs per id for what is one look-up. The table follows its rule exactly: the
bytes of all tokens joined, then read as UTF-8 with U+FFFD for what is none. `byte_table` gives None for any
tokenizer whose decoder is another one, or that decodes a probe otherwise. Caller: encode.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer, decoders

from insitu.types import IntArray

_PROBES, _PROBE_IDS = 32, 64


class ByteTable:
    """Bytes by id, filled as ids come."""

    def __init__(self, token: Callable[[int], str | None]) -> None:
        """`token`: the vocabulary's entry of an id."""
        self._token = token
        self._pieces: dict[int, bytes] = {}

    def text(self, ids: IntArray) -> str:
        """Ids outside the vocabulary vanish. Raises OverflowError for negative ones, as the library does."""
        pieces, known = ids.tolist(), self._pieces
        try:
            return b"".join([known[i] for i in pieces]).decode("utf-8", "replace")
        except KeyError:
            for i in pieces:
                if i not in known:
                    known[i] = _bytes(self._token(i))
            return b"".join([known[i] for i in pieces]).decode("utf-8", "replace")


def byte_table(tokenizer: Tokenizer) -> ByteTable | None:
    """None unless the tokenizer's decoder is the byte-level one alone, and gives the same on the probes:
    every added token, and chance ids. Probes alone would not do: a step behind that decoder may change one
    token of a large vocabulary only."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    table = ByteTable(tokenizer.id_to_token)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    chance = random.Random(0)
    probes = [[chance.randrange(size + 2) for _ in range(_PROBE_IDS)] for _ in range(_PROBES)]
    probes += [[chance.randrange(size), added] for added in tokenizer.get_added_tokens_decoder()]
    for ids in probes:
        if table.text(np.array(ids, dtype=np.int32)) != tokenizer.decode(ids, skip_special_tokens=False):
            return None
    return table


def _bytes(token: str | None) -> bytes:
    """What a vocabulary entry stands for; one with a character outside the alphabet stands for itself."""
    if token is None:
        return b""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _alphabet()
