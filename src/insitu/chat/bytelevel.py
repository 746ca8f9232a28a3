"""Table-based decoding of byte-level vocabularies: each character of a token stands for one byte.

The tokenizer library takes 0.2 µs per id for what is one table lookup. The result is the same: the bytes of
all tokens joined, then decoded as UTF-8 with U+FFFD for invalid sequences.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer, decoders

from insitu.types import IntArray

_PROBES, _PROBE_IDS = 32, 64


class _ByteTable:
    """Bytes by token id, filled lazily."""

    def __init__(self, token: Callable[[int], str | None]) -> None:
        """Set the vocabulary lookup: `token` maps an id to its entry, or None."""
        self._token = token
        self._pieces: dict[int, bytes] = {}

    def text(self, ids: IntArray) -> str:
        """Return the text of ids; ids outside the vocabulary are skipped.

        Raises OverflowError for negative ids, as the library does.
        """
        return b"".join(self.pieces(ids)).decode("utf-8", "replace")

    def pieces(self, ids: IntArray) -> list[bytes]:
        """Return the bytes of each id; none for ids outside the vocabulary."""
        tokens, pieces = ids.tolist(), self._pieces
        try:
            return [pieces[i] for i in tokens]
        except KeyError:
            for i in tokens:
                if i not in pieces:
                    pieces[i] = _bytes(self._token(i))
            return [pieces[i] for i in tokens]


def byte_table(tokenizer: Tokenizer) -> _ByteTable | None:
    """Return a table for a tokenizer with the byte-level decoder alone, else None.

    None is also returned when the table and the tokenizer disagree on the probes: random ids and every added
    token.
    """
    # Probes alone would not do: a step behind the decoder may change one token of a large vocabulary only.
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    table = _ByteTable(tokenizer.id_to_token)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    rng = random.Random(0)
    probes = [[rng.randrange(size + 2) for _ in range(_PROBE_IDS)] for _ in range(_PROBES)]
    probes += [[rng.randrange(size), added] for added in tokenizer.get_added_tokens_decoder()]
    for ids in probes:
        if table.text(np.array(ids, dtype=np.int32)) != tokenizer.decode(ids, skip_special_tokens=False):
            return None
    return table


def _bytes(token: str | None) -> bytes:
    """Return the bytes of a vocabulary entry; one with characters outside the alphabet is UTF-8."""
    if token is None:
        return b""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable bytes map to themselves, the others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _alphabet()
