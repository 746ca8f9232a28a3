"""Edits of a Python file at the places that its syntax tree names, one token each.

What stands around an edit stays byte for byte: layout, comments, quotes, the columns of other lines.
"""

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

from insitu.grading.mutation.literals import wrong_literal

Place = tuple[int, int]
"""A line from 1 and a column in bytes, as ast counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A piece of the file and what stands there instead."""

    start: Place
    end: Place
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token and where it stands."""

    kind: int
    text: str
    start: Place
    end: Place

    def instead(self, text: str) -> Edit:
        return Edit(start=self.start, end=self.end, text=text)


class Source:
    """The text of a file with its tokens. Raises SyntaxError where there are none."""

    def __init__(self, text: str) -> None:
        self._lines = [line.encode() for line in text.split("\n")]
        written = text.split("\n")

        def place(at: tuple[int, int]) -> Place:
            line = written[at[0] - 1] if at[0] <= len(written) else ""
            return (at[0], len(line[: at[1]].encode()))

        try:
            self.tokens = [
                Token(kind=token.type, text=token.string, start=place(token.start), end=place(token.end))
                for token in tokenize.generate_tokens(io.StringIO(text).readline)
            ]
        except tokenize.TokenError as error:
            raise SyntaxError(str(error)) from None
        self._starts = [token.start for token in self.tokens]
        self._times = Counter(_core(token.text) for token in self.tokens)
        said = (tokenize.STRING, tokenize.NUMBER, tokenize.COMMENT)
        self._words = Counter(w for token in self.tokens if token.kind in said for w in words(token.text))

    def between(self, start: Place, end: Place) -> list[Token]:
        """The tokens that begin at `start` or later and end at `end` or before."""
        first = bisect.bisect_left(self._starts, start)
        last = bisect.bisect_left(self._starts, end)
        return [token for token in self.tokens[first:last] if token.end <= end]

    def of(self, node: ast.expr) -> str:
        """The text of a node as it is written."""
        return self._cut(node.lineno, node.col_offset, *end_of(node))

    def alone(self, statement: ast.stmt) -> bool:
        """Whether nothing stands before a statement on its line."""
        return not self._lines[statement.lineno - 1][: statement.col_offset].strip()

    def parted(self, node: ast.expr) -> bool:
        """Whether a word put before a node does not become one with what stands there."""
        before = self._lines[node.lineno - 1][: node.col_offset].decode()
        return not before or not (before[-1].isalnum() or before[-1] == "_")

    def comments(self, node: ast.stmt) -> str:
        last = node.end_lineno or node.lineno
        found = self.between((node.lineno, 0), (last, len(self._lines[last - 1])))
        return " ".join(token.text for token in found if token.kind == tokenize.COMMENT)

    def others(self, node: ast.expr, told: Set[str], seed: str, most: int) -> tuple[tuple[Edit, ...], bool]:
        """Up to `most` edits of one token, by each of which a literal is another one, and whether what it was
        also stands in `told` or elsewhere in the file. Depends on `seed` and the place in the file alone, so
        that a literal has the same others whenever it is asked for. Raises ValueError where it has none."""
        rng = random.Random(f"{seed}/{node.lineno}/{node.col_offset}")
        right = ast.literal_eval(node)
        places = [
            token
            for leaf in _leaves(node)
            for token in self.between((leaf.lineno, leaf.col_offset), end_of(leaf))
            if token.kind in (tokenize.STRING, tokenize.NUMBER, tokenize.NAME)
        ]
        rng.shuffle(places)
        # Of a word most others are none, and of two values one may be likely: numbers first, and those last.
        kinds = (tokenize.NUMBER, tokenize.STRING, tokenize.NAME)
        places.sort(key=lambda token: (self._told(token.text, token, told), kinds.index(token.kind)))
        for token in places:
            # Values that the file has elsewhere stay among the others: leaving them out only where the right
            # one is not such a value would tell which form is right.
            def other(text: str, token: Token = token) -> bool:
                return _other_literal(right, self._with(node, token.instead(text)))

            try:
                edits = tuple(token.instead(text) for text in wrong_literal(token.text, rng, most, other))
                return edits, self._told(token.text, token, told)
            except ValueError:
                continue
        raise ValueError("no token of the literal has a near one")

    def _told(self, text: str, token: Token, told: Set[str]) -> bool:
        """Whether `text` in the place of `token` also stands in `told` or elsewhere in the file."""
        core, own = _core(text), _core(token.text)
        if core in ("True", "False", "None"):
            return core in told
        here = words(own)
        elsewhere = any(self._words[word] > (word in here) for word in words(core) if len(word) > 2)
        return bool(words(core) & told) or elsewhere or (len(core) > 2 and self._times[core] > (core == own))

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
    """What a reader of a name, a comment or a message can hold against a literal."""
    return frozenset(part for part in re.findall(r"[^\W_]+", text) if part.isdigit() or len(part) > 2)


def _core(token: str) -> str:
    """A text without its quotes, by which its copies are found."""
    return token.strip("'\"")


def end_of(node: ast.expr) -> Place:
    return (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)


def _leaves(node: ast.expr) -> list[ast.Constant]:
    """The scalars of a literal that may be others: no keys, by which it is asked for."""
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
