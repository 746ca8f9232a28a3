"""Attention over a prefix tree against its definition; a model over a tree against its rows one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from train_lab import VOCAB, small_model

from insitu.types import BoolArray, FloatArray, IntArray
from insitu_train.attention.flex import FlexAttend, block_mask
from insitu_train.attention.rows import Causal, Shared
from insitu_train.attention.tree import TreeAttend, tree_pieces, visible
from insitu_train.model.base import Attend
from insitu_train.plan.prefix_tree import Tree, build_tree

pytestmark = [pytest.mark.numeric, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Line:
    ids: IntArray
    mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    advantage: float = 1.0
    weight: float = 1.0
    experts: None = None


def line(ids: list[int], trained: list[int] | None = None) -> Line:
    mask = np.zeros(len(ids), np.bool_)
    mask[trained or []] = True
    return Line(np.array(ids, np.int32), mask, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))


def grown(seed: int, rows: int = 9, length: int = 40) -> list[Line]:
    """Rows that part and part again, one of them a prefix of another, with two roots."""
    rng = np.random.default_rng(seed)
    held = [rng.integers(1, VOCAB, length).tolist(), rng.integers(1, VOCAB, 7).tolist()]
    held[1][0] = 0
    while len(held) < rows - 1:
        old = held[int(rng.integers(len(held)))]
        cut = int(rng.integers(1, len(old)))
        held.append(old[:cut] + rng.integers(0, VOCAB, int(rng.integers(1, length))).tolist())
    held.append(held[0][: length // 2])
    return [
        line(ids, sorted(rng.choice(np.arange(1, len(ids)), len(ids) // 3, replace=False))) for ids in held
    ]


@pytest.mark.parametrize("seed", range(5))
def test_every_visible_pair_is_in_one_piece(seed: int) -> None:
    tree = build_tree(grown(seed))
    pieces = tree_pieces(tree)
    count = torch.zeros(tree.tokens, tree.tokens, dtype=torch.int)
    for p in pieces:
        block = count[p.q0 : p.q1, p.k0 : p.k1]
        block += torch.ones_like(block).tril() if p.causal else 1
    assert torch.equal(count, visible(tree).int())
    assert int(count.sum()) == int(tree.positions.sum()) + tree.tokens
    assert len(pieces) > 9
    # one for each row and one for each place where rows part, not one for each node and ancestor
    assert len(pieces) <= 2 * 9


def test_a_row_sees_its_own_tokens_and_no_other_rows() -> None:
    rows = grown(1)
    tree = build_tree(rows)
    seen = visible(tree)
    for i, row in enumerate(rows):
        path = tree.path(i)
        assert np.array_equal(tree.ids[path], row.ids)
        last = torch.zeros(tree.tokens, dtype=torch.bool)
        last[path.astype(np.int64)] = True
        assert torch.equal(seen[int(path[-1])], last)


def masked(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> Tensor:
    group = q.shape[0] // k.shape[0]
    scores = (q @ k.repeat_interleave(group, 0).mT * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 0)


def qkv(tree: Tree, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, tree.tokens, 8), (kv_heads, tree.tokens, 8), (kv_heads, tree.tokens, 8)]
    return [torch.randn(*s, generator=generator) * 2 for s in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rows", [[line([1, 2, 3, 4, 5, 6])], grown(3), grown(4, length=150)])
def test_output_and_gradients_equal_a_masked_softmax(rows: list[Line], kv_heads: int) -> None:
    tree = build_tree(rows)
    given = qkv(tree, kv_heads)
    factor = torch.randn(4, tree.tokens, 8, generator=torch.Generator().manual_seed(1))
    leaves = [t.clone().requires_grad_() for t in given]
    out = TreeAttend.of(tree)(*leaves, 0.3)
    found = torch.autograd.grad((out * factor).sum(), leaves)
    exact = [t.double().requires_grad_() for t in given]
    expected = masked(*exact, 0.3, visible(tree))
    true = torch.autograd.grad((expected * factor).sum(), exact)
    assert float((out - expected).detach().abs().max()) < 1e-5
    for a, b in zip(found, true, strict=True):
        assert float(b.abs().max()) > 0.1
        assert float((a - b).abs().max() / b.abs().max()) < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.full
def test_flex_attention_sees_the_same() -> None:
    tree = build_tree(grown(4, length=400))
    q, k, v = qkv(tree, 2)
    with torch.no_grad():
        found = FlexAttend.of(tree, q.device)(q, k, v, 0.3)
    assert torch.allclose(found, masked(q, k, v, 0.3, visible(tree)), atol=1e-5)


def test_blocks_of_the_mask_are_neither_too_many_nor_too_few() -> None:
    tree = build_tree(grown(4, length=700))
    mask = block_mask(tree, torch.device("cpu"))
    seen = visible(tree)
    count = -(-tree.tokens // 128)
    assert count >= 8
    padded = torch.zeros(count * 128, count * 128, dtype=torch.bool)
    padded[: tree.tokens, : tree.tokens] = seen
    blocks = padded.view(count, 128, count, 128).transpose(1, 2).flatten(2)
    inside = torch.zeros_like(padded)
    inside[: tree.tokens, : tree.tokens] = True
    whole = (padded | ~inside).view(count, 128, count, 128).transpose(1, 2).flatten(2).all(2)
    listed = torch.zeros(count, count, dtype=torch.int)
    full = torch.zeros(count, count, dtype=torch.bool)
    for q in range(count):
        for k in mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist():
            listed[q, k] += 1
        for k in mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist():
            listed[q, k] += 1
            full[q, k] = True
    assert torch.equal(listed > 0, blocks.any(2))
    assert int(listed.max()) == 1
    assert bool(full.any())
    assert torch.equal(full, whole & (blocks.sum(2) > 0) & ~torch.eye(count, dtype=torch.bool))


def test_a_model_over_a_tree_has_the_gradients_of_its_rows() -> None:
    rows = grown(2)
    tree = build_tree(rows)
    model = small_model()
    assert tree.tokens < 0.8 * sum(len(r.ids) for r in rows)

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    ids, positions = (torch.from_numpy(a.astype(np.int64)) for a in (tree.ids, tree.positions))
    hidden = model.flat(ids, positions, TreeAttend.of(tree))[torch.from_numpy(tree.at.astype(np.int64))]
    logp = torch.log_softmax(model.logits(hidden), -1)
    chosen = logp.gather(1, torch.from_numpy(tree.target.astype(np.int64))[:, None])[:, 0]
    factor = torch.randn(len(chosen), generator=torch.Generator().manual_seed(0))
    by_tree = gradients((chosen * factor).sum())

    single = []
    for row in rows:
        whole = torch.from_numpy(row.ids.astype(np.int64))
        out = torch.log_softmax(model.logits(model.hidden(whole[:0], whole[None]))[0], -1)
        where = torch.from_numpy(np.flatnonzero(row.mask))
        single.append(out[where - 1].gather(1, whole[where, None])[:, 0])
    linear = torch.cat(single)
    assert float((linear - chosen).detach().abs().max()) < 1e-4
    by_rows = gradients((linear * factor).sum())
    for name, grad in by_rows.items():
        assert float((by_tree[name] - grad).abs().max() / grad.abs().max()) < 1e-5, name


@pytest.mark.parametrize("attend", [Causal(), Shared(12, 3), TreeAttend.of(build_tree(grown(2)))])
def test_bfloat16_on_a_cpu_is_float32_rounded_once(attend: Attend) -> None:
    """A kernel in bfloat16 would also round the attention weights."""
    tokens = build_tree(grown(2)).tokens if isinstance(attend, TreeAttend) else 48
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(heads, tokens, 16, generator=generator).bfloat16() for heads in (4, 2, 2)]
    narrow, wide = ([cast(t).requires_grad_() for t in given] for cast in (torch.clone, Tensor.float))
    ours, theirs = attend(*narrow, 0.25), attend(*wide, 0.25)
    assert torch.equal(ours, theirs.bfloat16())
    slope = torch.randn(theirs.shape, generator=generator).bfloat16()
    found = torch.autograd.grad(ours, narrow, slope)
    exact = torch.autograd.grad(theirs, wide, slope.float())
    for one, other in zip(found, exact, strict=True):
        assert torch.equal(one, other.bfloat16())
