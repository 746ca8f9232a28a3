"""Edits of single tokens of a Python file at syntax tree positions; the rest stays byte for byte."""

from __future__ import annotations

import ast
import bisect
import io
import random
import re
import tokenize
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from insitu_tasksets.mutation.literals import wrong_literal

_SPOKEN = {
    getattr(tokenize, name, tokenize.STRING)
    # Until Python 3.12 (3.14: `t"..."`) the text of an f-string is a part of one string.
    for name in ("STRING", "NUMBER", "COMMENT", "FSTRING_MIDDLE", "TSTRING_MIDDLE")
}
Place = tuple[int, int]
"""Line from 1 and column in bytes, as in ast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A range of the file and its replacement."""

    start: Place
    end: Place
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """A token with its position."""

    kind: int
    text: str
    start: Place
    end: Place

    def instead(self, text: str) -> Edit:
        return Edit(start=self.start, end=self.end, text=text)


class Source:
    """The text of a file with its tokens. Raises SyntaxError."""

    def __init__(self, text: str) -> None:
        self._lines = [line.encode() for line in text.split("\n")]
        written = text.split("\n")

        def place(at: tuple[int, int]) -> Place:
            line = written[at[0] - 1] if at[0] <= len(written) else ""
            return (at[0], len(line[: at[1]].encode()))

        try:
            self.tokens = [
                _Token(kind=token.type, text=token.string, start=place(token.start), end=place(token.end))
                for token in tokenize.generate_tokens(io.StringIO(text).readline)
            ]
        except tokenize.TokenError as error:
            raise SyntaxError(str(error)) from None
        self._starts = [token.start for token in self.tokens]
        self._times = Counter(_core(token.text) for token in self.tokens)
        self._words = Counter(w for token in self.tokens if token.kind in _SPOKEN for w in words(token.text))

    def between(self, start: Place, end: Place) -> list[_Token]:
        """Return the tokens between two positions."""
        first = bisect.bisect_left(self._starts, start)
        last = bisect.bisect_left(self._starts, end)
        return [token for token in self.tokens[first:last] if token.end <= end]

    def of(self, node: ast.expr) -> str:
        """Return the source of a node."""
        return self._cut(node.lineno, node.col_offset, *end_of(node))

    def alone(self, statement: ast.stmt) -> bool:
        """Return whether a statement is the first on its line."""
        return not self._lines[statement.lineno - 1][: statement.col_offset].strip()

    def parted(self, node: ast.expr) -> bool:
        """Return whether a word can be inserted before a node."""
        before = self._lines[node.lineno - 1][: node.col_offset].decode()
        return not before or not (before[-1].isalnum() or before[-1] == "_")

    def comments(self, node: ast.stmt) -> str:
        last = node.end_lineno or node.lineno
        found = self.between((node.lineno, 0), (last, len(self._lines[last - 1])))
        return " ".join(token.text for token in found if token.kind == tokenize.COMMENT)

    def others(
        self, node: ast.expr, revealed: Set[str], seed: str, most: int
    ) -> tuple[tuple[Edit, ...], bool]:
        """Return up to `most` edits of one token of a literal, and whether the file reveals its right value.

        They depend on `seed` and the position alone. Raises ValueError for a literal without a family.
        """
        rng = random.Random(f"{seed}/{node.lineno}/{node.col_offset}")
        right = ast.literal_eval(node)
        places = [
            token
            for leaf in _leaves(node)
            for token in self.between((leaf.lineno, leaf.col_offset), end_of(leaf))
            if token.kind in (tokenize.STRING, tokenize.NUMBER, tokenize.NAME)
        ]
        rng.shuffle(places)
        # Numbers first: most variants of a word are no words. Names last: of True and False one may be
        # likely.
        kinds = (tokenize.NUMBER, tokenize.STRING, tokenize.NAME)
        places.sort(
            key=lambda token: (self._is_revealed(token.text, token, revealed), kinds.index(token.kind))
        )
        for token in places:
            # Values that occur elsewhere in the file are not left out: that would reveal the right one.
            def other(text: str, token: _Token = token) -> bool:
                return _other_literal(right, self._with(node, token.instead(text)))

            try:
                edits = tuple(token.instead(text) for text in wrong_literal(token.text, rng, most, other))
                return edits, self._is_revealed(token.text, token, revealed)
            except ValueError:
                continue
        raise ValueError("no token of the literal has another form")

    def _is_revealed(self, text: str, token: _Token, revealed: Set[str]) -> bool:
        """Return whether `text` in place of `token` also occurs in `revealed` or elsewhere in the file."""
        core, own = _core(text), _core(token.text)
        if core in ("True", "False", "None"):
            return core in revealed
        here = words(own)
        elsewhere = any(self._words[word] > (word in here) for word in words(core) if len(word) > 2)
        repeated = len(core) > 2 and self._times[core] > (core == own)
        return bool(words(core) & revealed) or elsewhere or repeated

    def _cut(self, line: int, a: int, last: int, b: int) -> str:
        lines = self._lines[line - 1 : last]
        lines[-1] = lines[-1][:b]
        lines[0] = lines[0][a:]
        return b"\n".join(lines).decode()

    def _with(self, node: ast.expr, edit: Edit) -> str:
        before = self._cut(node.lineno, node.col_offset, *edit.start)
        return before + edit.text + self._cut(*edit.end, *end_of(node))

    def edited(self, edits: Sequence[Edit]) -> str:
        lines = list(self._lines)
        for edit in sorted(edits, key=lambda each: each.start, reverse=True):
            (first, a), (last, b) = edit.start, edit.end
            piece = lines[first - 1][:a] + edit.text.encode() + lines[last - 1][b:]
            lines[first - 1 : last] = piece.split(b"\n")
        return b"\n".join(lines).decode()


def in_place(node: ast.expr, text: str) -> Edit:
    return Edit(start=(node.lineno, node.col_offset), end=end_of(node), text=text)


def words(text: str) -> frozenset[str]:
    """Return the words and numbers of a text."""
    return frozenset(part for part in re.findall(r"[^\W_]+", text) if part.isdigit() or len(part) > 2)


def _core(token: str) -> str:
    """Return a string literal without its quotes."""
    return token.strip("'\"")


def end_of(node: ast.expr) -> Place:
    return (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)


def _leaves(node: ast.expr) -> list[ast.Constant]:
    """Return the scalars of a literal, without keys of dicts."""
    if isinstance(node, ast.Constant):
        return [node]
    inner: Sequence[ast.expr | None] = ()
    if isinstance(node, ast.Dict):
        inner = node.values
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        inner = node.elts
    elif isinstance(node, ast.UnaryOp):
        inner = [node.operand]
    elif isinstance(node, ast.BinOp):
        inner = [node.left, node.right]
    return [leaf for part in inner if part is not None for leaf in _leaves(part)]


def _other_literal(right: object, text: str) -> bool:
    try:
        wrong = ast.literal_eval(f"({text}\n)")
    except (SyntaxError, ValueError, TypeError):
        return False
    return bool(wrong != right) and not (isinstance(right, set) and len(wrong) != len(right))
