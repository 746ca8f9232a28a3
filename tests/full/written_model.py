"""A Qwen3 model whose weights are written by hand, so that it samples an agent's session from a script.

A real engine serves it and insitu trains it like any other; each sampled token has the probability that the
weights give it. Scripts are tables: (latest marker in the context, last tokens) -> next tokens, equally
likely if several. One layer suffices:

- heads 0..SLOTS-1 attend to the tokens before the current one, one each, by rotary phases alone;
- the last head attends to the latest marker (a word of the script, nowhere else in a prompt): by content, and
  by the slope of one slow rotary frequency;
- each neuron of the MLP is one row of the table: it fires only if all its tokens are where it wants them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from insitu.types import IntArray
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3

SLOTS = 9
"""Tokens before the current one that a row can ask for."""
CODE = 24
"""Numbers that stand for one token."""
HEAD, THETA = 32, 1e6
NEAR, SLOPE = range(12), 12
"""Rotary pairs by which heads find a distance, and the one whose phase falls with it; the others tell markers
from other tokens."""
UNEVEN = 0.98
"""By which the stop is less likely than the other token that follows where no row fits."""
CLOSEST = 0.45
"""Largest product of two codes."""
_EITHER = re.compile(r"\((\w+)\|(\w+)\)")
ONE, IS_MARKER = 0, 1
"""Dimensions of the hidden state: 1 everywhere, and FAINT at markers."""
ROWS = 1280
FAINT = 0.1
SHARP, STEEP, CHOOSY, SURE, LOUD = 108.0, 140_000.0, 30_000.0, 20.0, 100.0
"""Scales: of scores by distance, of the slope, of scores by content, of the rows, and of the logits."""


def _place(slot: int) -> slice:
    """Dimensions of a slot: 0 the current token, then those before it, the marker, and the output."""
    return slice(2 + slot * CODE, 2 + (slot + 1) * CODE)


MARKER, OUT = SLOTS + 1, SLOTS + 2
HIDDEN = -(-(2 + (OUT + 1) * CODE) // 32) * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model says where `after` is the latest marker."""

    after: Sequence[str]
    """Any of these; none = whatever the marker."""
    text: str
    """(a|b) = one of both."""
    behind: str = ""
    """Text right before the generation prompt."""
    not_behind: str = ""
    """One token that does not end the message before."""
    urgent: bool = False
    """Wins over another row that fits too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    marker: int
    """-1 = any."""
    last: tuple[int, ...]
    """Tokens at the end of the context, the newest last."""
    absent: tuple[int, int] = (0, -1)
    """(place before the newest, token that is not there); -1 = any."""
    strength: float = 1.0


@dataclass(slots=True)
class Table:
    """Rows and what follows them."""

    markers: frozenset[int]
    rows: dict[Row, list[int]] = field(default_factory=dict)

    def add(self, row: Row, token: int) -> None:
        found = self.rows.setdefault(row, [])
        if token not in found:
            found.append(token)

    @property
    def branches(self) -> int:
        """Rows after which more than one token may follow."""
        return sum(len(tokens) > 1 for tokens in self.rows.values())

    def next(self, ids: IntArray) -> list[int]:
        """Return the tokens that may follow."""
        seen = [int(i) for i in ids[-1 - SLOTS :]]
        marker = next((int(i) for i in ids[::-1] if int(i) in self.markers), -1)
        fits = [row for row in self.rows if _fits(row, seen, marker)]
        strongest = max((row.strength for row in fits), default=0.0)
        return sorted({t for row in fits if row.strength == strongest for t in self.rows[row]})


def _fits(row: Row, seen: Sequence[int], marker: int) -> bool:
    at, token = row.absent
    return (
        row.marker in (-1, marker)
        and tuple(seen[-len(row.last) :]) == row.last
        and (token < 0 or seen[-1 - at] != token)
    )


def table_of(
    encode: object, prompt: Sequence[int], end: int, replies: Iterable[Reply], markers: Sequence[str]
) -> Table:
    """Return the table by which `replies` are said.

    encode: text -> ids; prompt: ids of the end of a message and the generation prompt; end: id of the stop.
    """
    ids = {word: [int(i) for i in encode(word)] for word in markers}  # type: ignore[operator]
    if long := [word for word, found in ids.items() if len(found) != 1]:
        raise ValueError(f"not one token each: {long}")
    number = {word: found[0] for word, found in ids.items()}
    table = Table(frozenset(number.values()))
    for reply, text in ((one, text) for one in replies for text in _ways(one.text)):
        said = [*(int(i) for i in encode(text)), end]  # type: ignore[operator]
        behind = [int(i) for i in encode(reply.behind)] if reply.behind else []  # type: ignore[operator]
        hidden = (len(prompt), int(encode(reply.not_behind)[0])) if reply.not_behind else (0, -1)  # type: ignore[operator]
        for word in reply.after or ("",):
            marker = number[word] if word else -1
            known = [*behind, *prompt]
            for at, token in enumerate(said):
                strength = 0.3 if not word else 3.0 if reply.urgent and not at else 1.0
                last = tuple(known[-1 - SLOTS :])
                table.add(
                    Row(marker=marker, last=last, absent=hidden if not at else (0, -1), strength=strength),
                    token,
                )
                known.append(token)
                marker = token if token in table.markers else marker
    return table


def _ways(text: str) -> list[str]:
    """Return the texts that `text` stands for."""
    found = _EITHER.search(text)
    if found is None:
        return [text]
    return [
        way for word in found.groups() for way in _ways(text[: found.start()] + word + text[found.end() :])
    ]


def written(table: Table, vocabulary: int, positions: int) -> Qwen3:
    """Return the model that says what the table says, and a few words where that says nothing.

    All have one shape. Raises ValueError for a table of more than ROWS rows.
    """
    if len(table.rows) >= ROWS:
        raise ValueError(f"{len(table.rows)} rows, at most {ROWS - 1}")
    config = ModelConfig(
        vocab_size=vocabulary, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=SLOTS + 1,
        num_key_value_heads=1, head_dim=HEAD, intermediate_size=ROWS,
        rope_theta=THETA, max_position_embeddings=positions, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3(config)
    codes = _codes(table)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_() if parameter.ndim > 1 else parameter.fill_(1.0)
        embed = model.model.embed_tokens.weight
        embed[:, ONE] = 1.0
        for token, code in codes.items():
            embed[token, _place(0)] = code
            model.lm_head.weight[token, _place(OUT)] = code * (LOUD / math.sqrt(HIDDEN))
        for token in table.markers:
            embed[token, IS_MARKER] = FAINT
        _write_attention(model)
        _write_rows(model, table, codes)
        _write_babble(model, table, codes)
    return model


def _codes(table: Table) -> Mapping[int, Tensor]:
    """Return unit vectors far from each other, one per token of the table."""
    tokens = {*table.markers}
    for row, following in table.rows.items():
        tokens |= {*row.last, *following} | ({row.absent[1]} - {-1})
    random = torch.Generator().manual_seed(0)
    found = torch.zeros(0, CODE)
    while len(found) < len(tokens):
        code = torch.randn(CODE, generator=random)
        code /= code.norm()
        if not len(found) or float((found @ code).max()) < CLOSEST:
            found = torch.cat([found, code[None]])
    return dict(zip(sorted(tokens), found, strict=True))


def _write_attention(model: Qwen3) -> None:
    layer = model.model.blocks[0].self_attn
    half = HEAD // 2
    theta = [THETA ** (-pair / half) for pair in range(half)]
    q, k, content = layer.q_proj.weight, layer.k_proj.weight, range(SLOPE + 1, half)
    for head in range(SLOTS):
        for pair in NEAR:
            phase = -theta[pair] * (head + 1)
            q[head * HEAD + pair, ONE] = math.cos(phase)
            q[head * HEAD + half + pair, ONE] = math.sin(phase)
    last = SLOTS * HEAD
    q[last + half + SLOPE, ONE] = 1.0  # the score is minus the sine of the distance
    for pair in content:
        q[last + pair, ONE] = 1.0
        k[pair, ONE] = -1.0
        k[pair, IS_MARKER] = 2.0 / FAINT
    for pair in (*NEAR, SLOPE):
        k[pair, ONE] = 1.0
    for pairs, weight in ((NEAR, SHARP), ((SLOPE,), STEEP), (content, CHOOSY)):
        for pair in pairs:
            layer.q_norm.weight[[pair, half + pair]] = weight
    layer.v_proj.weight[:CODE, _place(0)] = torch.eye(CODE)
    for head in range(SLOTS + 1):
        slot = layer.o_proj.weight[_place(head + 1), head * HEAD : head * HEAD + CODE]
        slot.copy_(torch.eye(CODE) * math.sqrt(2 / HIDDEN))  # the norm before the layer made codes longer


def _write_rows(model: Qwen3, table: Table, codes: Mapping[int, Tensor]) -> None:
    mlp = model.model.blocks[0].mlp
    for at, (row, following) in enumerate(table.rows.items()):
        asked = [(slot, token) for slot, token in enumerate(row.last[::-1])]
        asked += [(MARKER, row.marker)] if row.marker >= 0 else []
        gate = torch.zeros(HIDDEN)
        for slot, token in asked:
            gate[_place(slot)] = codes[token]
        gate[ONE] = 0.25 - len(asked)
        if row.absent[1] >= 0:
            gate[_place(row.absent[0])] -= 0.5 * codes[row.absent[1]]
        mlp.gate_proj.weight[at] = gate * SURE
        mlp.up_proj.weight[at, ONE] = 1.0
        mlp.down_proj.weight[_place(OUT), at] = row.strength * sum(codes[token] for token in following)


def _write_babble(model: Qwen3, table: Table, codes: Mapping[int, Tensor]) -> None:
    """Let the stop or another token follow, not equally likely, where no row fits; else this is too faint."""
    first = next(iter(table.rows))
    word, stop = first.last[-1], first.last[0]
    direction = codes[word] + UNEVEN * codes[stop]
    mlp = model.model.blocks[0].mlp
    mlp.gate_proj.weight[-1, ONE] = SURE
    mlp.up_proj.weight[-1, ONE] = 1.0
    mlp.down_proj.weight[_place(OUT), -1] = 0.005 * direction / direction.norm()
