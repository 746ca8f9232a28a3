"""The prefix tree against a trie built token by token, and the sorted prefixes against Python's own order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.errors import TrainError
from insitu.types import BoolArray, FloatArray, IntArray
from insitu_train.plan.prefix import common_prefix, sort_rows
from insitu_train.plan.prefix_tree import Tree, build_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRow:
    """A row with its own numbers in every trained place, so that a mix-up shows."""

    ids: IntArray
    mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    advantage: float
    weight: float
    experts: None = None


def made_row(number: int, ids: list[int], trained: set[int]) -> MadeRow:
    n = len(ids)
    return MadeRow(
        ids=np.array(ids, np.int32),
        mask=np.array([i > 0 and i in trained for i in range(n)], np.bool_),
        logprobs=np.array([-number - i / 100 for i in range(n)], np.float32),
        versions=np.array([number * 1000 + i for i in range(n)], np.int32),
        advantage=float(number),
        weight=1.0 / (number + 1),
    )


@dataclass(slots=True)
class Trie:
    """The slow truth: one Python object per token."""

    children: dict[int, Trie] = field(default_factory=dict)

    def add(self, ids: list[int]) -> None:
        node = self
        for token in ids:
            node = node.children.setdefault(token, Trie())

    def preorder(self, depth: int = 0) -> list[tuple[int, int]]:
        """(token, depth), children in the order of their ids."""
        out = []
        for token in sorted(self.children):
            out += [(token, depth), *self.children[token].preorder(depth + 1)]
        return out


rows_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.sets(st.integers(1, 8))),
    min_size=1,
    max_size=9,
)


def path_of(tree: Tree, token: int) -> list[int]:
    """Indices of the tokens that `token` sees, itself included, by the interval rule."""
    node = tree.node
    return [k for k in range(token + 1) if tree.end[node[k]] > token]


@settings(max_examples=80)
@given(raw=rows_strategy)
def test_the_tree_is_the_trie(raw: list[tuple[list[int], set[int]]]) -> None:
    rows = [made_row(number, ids, trained) for number, (ids, trained) in enumerate(raw)]
    tree = build_tree(rows)
    trie = Trie()
    for ids, _ in raw:
        trie.add(ids)
    assert list(zip(tree.ids.tolist(), tree.positions.tolist(), strict=True)) == trie.preorder()
    for number, row in enumerate(rows):
        path = tree.path(number)
        assert tree.ids[path].tolist() == row.ids.tolist()
        assert tree.positions[path].tolist() == list(range(len(path)))
        assert path_of(tree, int(path[-1])) == path.tolist()
        assert int(path[-1]) == tree.start[tree.leaf[number] + 1] - 1
        mine = tree.row == number
        trained = np.flatnonzero(row.mask)
        assert tree.at[mine].tolist() == path[trained - 1].tolist()
        assert tree.target[mine].tolist() == row.ids[trained].tolist()
        assert tree.mu[mine].tolist() == row.logprobs[trained].tolist()
        assert tree.version[mine].tolist() == row.versions[trained].tolist()
        assert set(tree.advantage[mine].tolist()) <= {row.advantage}
        assert set(tree.weight[mine].tolist()) <= {float(np.float32(row.weight))}
    assert (np.diff(tree.row) >= 0).all()


@settings(max_examples=80)
@given(raw=rows_strategy)
def test_nodes_are_as_long_as_they_can_be_and_in_preorder(raw: list[tuple[list[int], set[int]]]) -> None:
    tree = build_tree([made_row(i, ids, trained) for i, (ids, trained) in enumerate(raw)])
    assert (np.diff(tree.start) > 0).all()
    assert tree.start[0] == 0
    assert tree.start[-1] == tree.tokens
    children = [np.flatnonzero(tree.parent == n) for n in range(len(tree.parent))]
    for n, below in enumerate(children):
        assert tree.parent[n] < n
        # a single child where no row ends could have been the same node
        assert len(below) != 1 or n in tree.leaf
        ends = [tree.start[n + 1], *(tree.end[below])]
        assert tree.end[n] == max(ends)


@settings(max_examples=80)
@given(raw=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12))
def test_sorted_rows_are_in_pythons_order(raw: list[list[int]]) -> None:
    ids = [np.array(row, np.int32) for row in raw]
    found = sort_rows(ids)
    assert list(found.order) == sorted(range(len(raw)), key=lambda i: (raw[i], i))
    before = [None, *found.order][: len(raw)]
    for shared, one, two in zip(found.shared, before, found.order, strict=True):
        assert shared == (0 if one is None else common_prefix(ids[one], ids[two]))


def test_long_rows_share_across_blocks() -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 9, 150_000).astype(np.int32)
    rows = []
    for number, part in enumerate((5, 70_000, 70_000, 150_000)):
        ids = np.concatenate([trunk[:part], np.array([9 + number, 1], np.int32)])
        rows.append(made_row(number, ids.tolist(), {part}))
    tree = build_tree(rows)
    assert tree.tokens == 150_000 + 4 * 2
    assert [int(tree.positions[a]) for a in tree.at] == [4, 69_999, 69_999, 149_999]
    lengths = [7, 70_002, 70_002, 150_002]
    own = sum(range(1, 150_001)) + sum(n - 1 + n for n in lengths)
    assert int(tree.positions.sum(dtype=np.int64)) + tree.tokens == own


def test_a_first_token_cannot_be_trained() -> None:
    row = made_row(0, [1, 2], {1})
    wrong = MadeRow(ids=row.ids, mask=row.mask[::-1], logprobs=row.logprobs, versions=row.versions,
                    advantage=1.0, weight=1.0)  # fmt: skip
    with pytest.raises(TrainError, match="row 1 of a tree is empty or trains its first token"):
        build_tree([row, wrong])
