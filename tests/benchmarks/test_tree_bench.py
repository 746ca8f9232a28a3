"""The tree's benchmark prints what it promises, on rows that are what they say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import tree
from benchmarks._tree_rows import Work, rows_of
from benchmarks.tree import SMALL, operations
from insitu_train.attention.tree import TreeAttend
from insitu_train.plan.prefix_tree import build_tree
from insitu_train.plan.step import PlanRow

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

TINY = Work(tokens=3000, group_size=4, system=40, task=6, turns=(4, 8), observation=16, reply=5)


def trained(rows: list[PlanRow]) -> int:
    return sum(int(r.mask.sum()) for r in rows)


@pytest.mark.parametrize(("forks", "least"), [(0.25, 1.5), (-0.25, 1.1)])
def test_rows_share_what_agents_share_and_train_each_sampled_token_once(forks: float, least: float) -> None:
    work = replace(TINY, forks=forks)
    rows = rows_of(work)
    held = build_tree(rows)
    raw = sum(len(r.ids) for r in rows)
    assert 3000 <= raw < 3600
    assert least < raw / held.tokens < 8
    assert len(held.at) == trained(rows)
    # no position of the tree is trained for two rows, random ids apart
    assert len(np.unique(held.at)) > 0.95 * len(held.at)
    for row in rows:
        assert row.mask[-1]
        assert not row.mask[: work.system].any()
        assert np.array_equal(row.ids[: work.system], rows[0].ids[: work.system])
        assert (row.logprobs[row.mask] < 0).all()


def test_operations_of_a_model_are_counted() -> None:
    layer = 256 * (2 * 256 + 2 * 128 + 3 * 768)
    assert operations(SMALL, 10, 0, 0) == 3 * 2 * 10 * 2 * layer
    assert operations(SMALL, 0, 10, 0) == 3.5 * 4 * 10 * 256 * 2
    assert operations(SMALL, 0, 0, 10) == 6 * 10 * 1024 * 256


ARGUMENTS = "--device cpu --tokens 800 --scale 0.005 --repeats 1".split()


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(SMALL, hidden_size=32, head_dim=16, intermediate_size=48, vocab_size=128)
    monkeypatch.setattr(tree, "SMALL", small)


@pytest.mark.usefixtures("tiny_model")
def test_one_object_with_equal_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    assert tree.main([*ARGUMENTS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result) == ["speedup", "work_ratio", "max_rel_grad_diff"]
    assert 1 < result["work_ratio"] < 10
    assert result["speedup"] > 0
    assert 0 < result["max_rel_grad_diff"] < 1e-5


@pytest.mark.usefixtures("tiny_model")
def test_gradients_that_differ_fail_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "LIMIT", 1e-12)
    assert tree.main(ARGUMENTS) == 1
    said = capsys.readouterr().err
    assert "of the work saved" in said
    assert "tokens_per_s" in said


@pytest.mark.full
def test_a_model_of_transformers_over_a_tree_has_the_gradients_of_its_rows() -> None:
    small = replace(SMALL, hidden_size=32, head_dim=16, intermediate_size=48, vocab_size=128)
    cpu = torch.device("cpu")
    policy = tree.make_policy(small, torch.float32, cpu, hf=True)
    rows = rows_of(replace(TINY, tokens=800, vocab=128))
    held = build_tree(rows)
    ours = [tree.tree_pass(held, TreeAttend.of(held), cpu)]
    assert tree.difference(policy, ours, tree.linear_passes(rows, 300, cpu)) < 1e-5


def test_the_kernels_that_are_timed_are_held_against_float32(tiny_model: None) -> None:
    """As on a GPU, with a CPU's kernels of bfloat16."""
    cpu = torch.device("cpu")
    rows = rows_of(replace(TINY, tokens=800, vocab=128))
    held = build_tree(rows)
    exact = tree.make_policy(tree.SMALL, torch.float32, cpu, hf=True)
    true = tree.gradients(exact, tree.linear_passes(rows, 300, cpu))
    whole = TreeAttend.of(held)
    lost = TreeAttend(tuple(p for p in whole.pieces if p.causal))
    found = tree.rounded_ways(tree.SMALL, true, held, {"pieces": whole, "wrong": lost}, cpu)
    assert 1e-4 < found["pieces"] < tree.ROUNDED_LIMIT < found["wrong"]


@pytest.mark.usefixtures("tiny_model")
def test_rounding_beyond_its_limit_fails_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tree.measure(replace(TINY, tokens=800, vocab=128), tree.SMALL, torch.device("cpu"), 1)
    for share, status in ((0.9, 1), (0.01, 0)):
        monkeypatch.setattr(tree, "measure", lambda *_, share=share: {**result, "rounded": {"flex": share}})
        assert tree.main([*ARGUMENTS, "--json"]) == status
    capsys.readouterr()
