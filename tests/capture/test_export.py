"""Chains, tree and per-request rows train the same tokens; the tree expands to the chains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from capture_lab import START, Lab, answer, call, check_exported, check_views, long_chain, says, user
from per_request import per_request
from token_tree import tree
from tree_check import branch, check_tree, dense_mask, expand

from insitu.errors import CaptureError
from insitu.types import Ledger, Trajectory


def forked() -> Trajectory:
    """Turn 0 with three ways on; one of them goes one turn further. Turn 4 is demonstrated."""
    lab = Lab()
    first = says("", call("c0"))
    lab.turn(START, first)
    for way in "abc":
        lab.turn([*START, first, answer("c0", way)], says(way))
    shown = lab.sample(
        lab.ask([*START, first, answer("c0", "a"), says("a"), user("on")]), says("d"), demonstrated=True
    )
    lab.deliver(shown)
    trajectory = lab.forest.trajectory()
    check_exported(lab, trajectory)
    return trajectory


def test_the_three_shapes_train_the_same_tokens() -> None:
    trajectory = forked()
    check_views(trajectory)
    assert len(trajectory.segments) == 4
    rows = per_request(trajectory)
    assert [int(row.mask.sum()) for row in rows] == [3] * 5
    assert [row.kind for row in rows] == ["sampled"] * 4 + ["demonstrated"]
    held = tree(trajectory, "once")
    assert len(held.ids) == sum(len(t.ids) for t in trajectory.turns) + sum(
        len(ids) for ids in {t.context_ids.tobytes(): t.context_ids for t in trajectory.turns}.values()
    )
    assert float(held.weights.sum()) == int(held.mask.sum()) == 15


def test_branch_mean_is_the_mean_over_branches_of_a_kind() -> None:
    held = tree(forked(), "branch_mean")
    weight = {
        int(turn): float(held.weights[held.starts[node]]) for node, turn in enumerate(held.turns) if turn >= 0
    }
    assert weight == pytest.approx({0: 1.0, 1: 1 / 3, 2: 1 / 3, 3: 1 / 3, 4: 1.0})
    # sum over tokens == mean over branches of the branch's own tokens
    ends = [node for node, turn in enumerate(held.turns) if turn in (1, 2, 3)]
    sampled = np.repeat([kind == "sampled" for kind in held.kinds], np.diff(held.starts))
    by_branch = [int((held.mask & sampled)[branch(held, node)].sum()) for node in ends]
    assert float(held.weights[sampled].sum()) == pytest.approx(np.mean(by_branch))


def test_a_token_sees_its_ancestors_and_itself_only() -> None:
    expanded = expand(tree(forked(), "once"))
    seen = dense_mask(expanded)
    for token in range(len(expanded.ids)):
        line, at = set(), token
        while at >= 0:
            line.add(at)
            at = int(expanded.parents[at])
        assert set(np.flatnonzero(seen[token]).tolist()) == line
        assert expanded.positions[token] == len(line) - 1


def test_twins_share_their_prompt_and_excluded_branches_are_left_out() -> None:
    lab = Lab()
    twins = [lab.ask(START) for _ in range(3)]
    for made in twins:
        lab.sample(made, says("x"))
    lab.deliver(twins[0])
    lab.deliver(twins[2])
    trajectory = lab.forest.trajectory()
    check_views(trajectory)
    held = tree(trajectory, "branch_mean")
    assert held.turns.tolist() == [-1, 0, 2]
    assert held.weights[held.mask].tolist() == [0.5] * 6
    assert len(held.ids) == len(twins[0].prompt) + 6


def test_an_undelivered_turn_in_mid_branch_is_context_of_the_tree() -> None:
    lab = Lab()
    lab.turn(START, says("x"))
    lab.forest.exclude(lab.calls[0].node, "edited")
    lab.turn([*START, says("x"), user("on")], says("y"))
    held = tree(lab.forest.trajectory(), "once")
    assert held.kinds == ("context", "context", "context", "sampled")
    assert int(held.mask.sum()) == 3
    check_views(lab.forest.trajectory())


def test_nothing_sampled_gives_empty_views() -> None:
    empty = Trajectory(segments=(), turns=(), ledger=Ledger())
    check_tree(tree(empty, "once"), empty)
    assert per_request(empty) == ()
    assert dense_mask(expand(tree(empty, "branch_mean"))).shape == (0, 0)


@pytest.mark.slow
@pytest.mark.case(39)
def test_a_deep_tree_needs_no_recursion() -> None:
    forest, _ = long_chain(5000)
    trajectory = forest.trajectory()
    held = tree(trajectory, "once")
    check_tree(held, trajectory)
    assert len(held.parents) == 10_000
    assert int(held.mask.sum()) == trajectory.ledger.trained == 15_000


@pytest.mark.parametrize("what", ["ids", "mask", "logprobs", "versions", "parents"])
def test_a_tree_that_differs_from_the_chains_is_found_out(what: str) -> None:
    trajectory = forked()
    held = tree(trajectory, "once")
    spoiled = getattr(held, what).copy()
    spoiled[-1] = (spoiled[-1] + 1) % 2 if what == "mask" else spoiled[-1] - 1
    with pytest.raises(CaptureError):
        check_tree(replace(held, **{what: spoiled}), trajectory)


def test_turns_that_make_no_tree_are_refused() -> None:
    trajectory = forked()
    orphan = replace(trajectory, turns=trajectory.turns[1:])
    for view in (per_request, lambda t: tree(t, "once")):
        with pytest.raises(CaptureError, match="parent"):
            view(orphan)
    with pytest.raises(CaptureError, match="segments for"):
        per_request(replace(trajectory, segments=trajectory.segments[1:]))


def test_rows_keep_the_label_of_the_chain_that_trains_the_call() -> None:
    trajectory = forked()
    rows = per_request(trajectory)
    wanted = Counter(s.label for s in trajectory.segments)
    assert set(wanted) == {row.label for row in rows}
    assert [row.index for row in rows] == list(range(5))
