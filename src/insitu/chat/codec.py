"""Encode rendered text so that only the renderer's own scaffold can produce control tokens.

Outside text goes through `shield` before a template sees it: the first character of every control marker
becomes a lone surrogate, which valid text cannot contain. No marker can then begin inside outside text, and
templates still see its length, its ends and its white space. `encode` splits the rendered text at the
remaining markers (all scaffold), removes the shield, and encodes each run between two markers with a
tokenizer without control tokens. Content without markers gets the same ids as with the stock tokenizer.
Byte-level vocabularies are decoded by a table: the tokenizer library takes 0.2 µs per id for one look-up. The
result is the same: the bytes of all tokens joined, then decoded as UTF-8 with U+FFFD for invalid sequences.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders

from insitu.errors import RenderError
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


_SHIELD_BASE = 0xDC00
_SCAFFOLD_CHARS, _SCAFFOLDS = 32, 1024
"""Length limit and number of cached texts; texts this short are mostly scaffold of the template."""


class Codec:
    """Encoder and decoder over one `tokenizer.json`.

    `control` names the added tokens that are control tokens; None means all of them. The rest stay ordinary.
    """

    def __init__(self, tokenizer_json: str, control: Sequence[str] | None = None) -> None:
        """Load the tokenizer; raise RenderError if it cannot separate content from control tokens."""
        spec = json.loads(tokenizer_json)
        added = spec.get("added_tokens", [])
        names = [str(t["content"]) for t in added]
        control_names = names if control is None else list(control)
        missing = sorted(set(control_names) - set(names))
        if missing:
            raise RenderError(f"control tokens not among the tokenizer's added tokens: {missing}")
        for token in added:
            if token["content"] in control_names and (token.get("lstrip") or token.get("rstrip")):
                raise RenderError(f"control token {token['content']!r} strips white space; not supported")
        self._stock = Tokenizer.from_str(tokenizer_json)
        names_json = json.dumps(sorted(control_names))
        self.identity = hashlib.sha256(f"{len(names_json)} {names_json}{tokenizer_json}".encode()).hexdigest()
        """SHA-256 of the tokenizer and its control tokens."""
        ordinary = {str(t["content"]): int(t["id"]) for t in added if t["content"] not in control_names}
        spec["added_tokens"] = [t for t in added if t["content"] in ordinary]
        _drop_from_vocab(spec.get("model", {}), control_names)
        _add_to_vocab(spec.get("model", {}), ordinary)
        self._plain = Tokenizer.from_str(json.dumps(spec))
        self._stock.no_padding()
        self._plain.no_padding()
        self._stock.no_truncation()
        self._plain.no_truncation()
        self.control: Mapping[str, int] = {
            str(t["content"]): int(t["id"]) for t in added if t["content"] in control_names
        }
        """Marker text -> id."""
        self.names: Mapping[int, str] = {i: name for name, i in self.control.items()}
        self.vocab_size = 1 + max(self._stock.get_vocab(with_added_tokens=True).values())
        self._is_control = np.zeros(3 + max(self.names, default=-1), dtype=np.bool_)
        """Indexed by id + 1; ids out of range are clipped to the ends, which are False."""
        self._is_control[[i + 1 for i in self.names]] = True
        self._firsts = _shield_map(control_names)
        self._markers = _marker_pattern(control_names)
        self._scaffold: dict[str, list[int]] = {}
        self._bytes = byte_table(self._stock)
        self._check()

    def shield(self, text: str) -> str:
        """Shield outside text for a template; lone surrogates become U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for first, hidden in self._firsts:
            text = text.replace(first, hidden)
        return text

    def unshield(self, text: str) -> str:
        for first, hidden in self._firsts:
            text = text.replace(hidden, first)
        return text

    def encode(self, rendered: str) -> IntArray:
        """Return the ids of a rendered text: markers are scaffold, everything shielded is content."""
        ids: list[int] = []
        at = 0
        for hit in self._markers.finditer(rendered):
            ids += self._run(rendered[at : hit.start()])
            ids.append(self.control[hit.group()])
            at = hit.end()
        ids += self._run(rendered[at:])
        return np.array(ids, dtype=np.int32)

    def encode_content(self, text: str) -> IntArray:
        """Return the ids of outside text alone."""
        return np.array(self._run(self.shield(text)), dtype=np.int32)

    def encode_stock(self, rendered: str) -> IntArray:
        """Return the ids that the stock tokenizer gives; for the checks at load only."""
        return np.array(self._stock.encode(rendered, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: IntArray) -> str:
        """Return the text of ids, control tokens included; ids outside the vocabulary are skipped."""
        if self._bytes is not None:
            return self._bytes.text(ids)
        return str(self._stock.decode(ids.tolist(), skip_special_tokens=False))

    def pieces(self, ids: IntArray) -> list[bytes]:
        """Return the bytes of each id, for display; joined and decoded they are `decode` of all."""
        if self._bytes is not None:
            return self._bytes.pieces(ids)
        return [str(self._stock.decode([i], skip_special_tokens=False)).encode() for i in ids.tolist()]

    def decode_marked(self, ids: IntArray) -> str:
        """Return the text of ids in the form that `encode` takes.

        Control tokens become markers; marker text that ordinary tokens spell is shielded.
        """
        parts: list[str] = []
        at = 0
        for mark in [*self.control_positions(ids), len(ids)]:
            if mark > at:
                parts.append(
                    self._markers.sub(lambda hit: self.shield(hit.group()), self.decode(ids[at:mark]))
                )
            parts.append("" if mark == len(ids) else self.names[int(ids[mark])])
            at = mark + 1
        return "".join(parts)

    def markers_in(self, text: str) -> int:
        """Count control markers typed as plain text."""
        return sum(1 for _ in self._markers.finditer(text))

    def control_positions(self, ids: IntArray) -> list[int]:
        """Return the positions of control ids, ascending."""
        return self._is_control.take(ids + 1, mode="clip").nonzero()[0].tolist()

    def _run(self, text: str) -> list[int]:
        """Return the ids of a text without markers (cached: do not modify)."""
        if not text:
            return []
        cached = self._scaffold.get(text)
        if cached is not None:
            return cached
        # The fast form skips the offsets, which are not needed.
        (encoded,) = self._plain.encode_batch_fast([self.unshield(text)], add_special_tokens=False)
        ids: list[int] = encoded.ids
        if len(text) <= _SCAFFOLD_CHARS:
            if len(self._scaffold) >= _SCAFFOLDS:
                self._scaffold.clear()
            self._scaffold[text] = ids
        return ids

    def _check(self) -> None:
        for name, number in self.control.items():
            if number in self._run(self.shield(f"a{name}b {name}")):
                raise RenderError(f"control token {name!r} can be spelled by ordinary text in this tokenizer")


def _marker_pattern(markers: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any marker, the longest first."""
    # Grouped by first character, so that the regex engine skips to the next candidate without trying every
    # alternative at every position.
    rests: dict[str, list[str]] = {}
    for marker in sorted(markers, key=len, reverse=True):
        rests.setdefault(marker[0], []).append(re.escape(marker[1:]))
    return re.compile(
        "|".join(f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in rests.items()) or "(?!)"
    )


def _shield_map(markers: Sequence[str]) -> list[tuple[str, str]]:
    """Return the first character of each marker with its replacement."""
    firsts = sorted({m[:1] for m in markers})
    for first in firsts:
        if not first or first.isalnum() or first.isspace():
            raise RenderError(
                f"a control token begins with an ordinary character {first!r}; name control_tokens"
            )
    return [(first, chr(_SHIELD_BASE + i)) for i, first in enumerate(firsts)]


def _drop_from_vocab(model: dict[str, object], markers: Sequence[str]) -> None:
    """Remove the markers from a BPE vocabulary where no merge needs them, so that no text can reach them."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict):
        return
    merges = model.get("merges")
    needed: set[str] = set()
    for merge in merges if isinstance(merges, list) else []:
        left, right = merge if isinstance(merge, list) else str(merge).split(" ", 1)
        needed |= {left, right, left + right}
    for marker in markers:
        if marker not in needed and marker != model.get("unk_token"):
            vocab.pop(marker, None)


def _add_to_vocab(model: dict[str, object], ordinary: Mapping[str, int]) -> None:
    """Add ordinary added tokens to the model's vocabulary under their ids."""
    # The library renumbers added tokens that the model's vocabulary does not contain.
    vocab = model.get("vocab")
    if ordinary and not isinstance(vocab, dict):
        raise RenderError(
            "control_tokens needs a tokenizer whose vocabulary is a table; name no control_tokens"
        )
    if isinstance(vocab, dict):
        vocab.update(ordinary)
