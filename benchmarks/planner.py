"""How long does planning a step take when trajectories are long?

Run `python -m benchmarks planner` (--json: one object on the last line). 64 rollouts of 100,000 tokens in
groups of 8: a system prompt of 6,000 tokens that all share, a task that a group shares, turns of a sampled
reply and an observation, in every fourth rollout a fork (a sub-agent, an edit, a compaction) whose row
repeats what was before. Timed is all that the controller does with collected groups before the plan is sent:
advantages, checks, account, prefix sharing, micro-batches, digest; medians of wall time over the repeats.
Before that the order and the shared prefixes are held against a trie built token by token in plain Python,
timed beside it.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks._arguments import Arguments, count
from benchmarks._tree_rows import tree_work
from insitu.errors import TrainError
from insitu.types import (
    BoolArray,
    Group,
    IntArray,
    Ledger,
    Rollout,
    Segment,
    Status,
    Timings,
    Trajectory,
)
from insitu_train.plan.prefix import Sorted, sort_rows
from insitu_train.plan.prefix_tree import build_tree
from insitu_train.plan.step import PlanConfig, plan_step

VOCAB = 151_936
SYSTEM, TASK = 6_000, 2_000
REPLY, OBSERVATION = (40, 700), (100, 1_900)
"""Tokens of a sampled reply and of what comes back: a quarter of all tokens is sampled."""
FORKED = 4
"""Every so many rollouts has a second row."""


LEAST_TOKENS = 1_000
"""Of one rollout: enough for a trunk, and for rows that go on from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is planned."""

    rollouts: int = 64
    tokens: int = 100_000
    """Of one rollout, over all its rows."""
    group_size: int = 8


def workload(shape: Shape, seed: int = 0) -> list[Group]:
    """Groups of rollouts whose rows have exactly `shape.tokens` tokens each."""
    rng = np.random.default_rng(seed)
    system = _ids(rng, SYSTEM)
    groups = []
    for g in range(shape.rollouts // shape.group_size):
        trunk = np.concatenate([system, _ids(rng, TASK)])[: shape.tokens // 4]
        members = [
            _rollout(rng, f"train/00001/{g:03}/{k:02}", trunk, shape, k) for k in range(shape.group_size)
        ]
        groups.append(Group(id=f"train/00001/{g:03}", task_id=f"task-{g}", rollouts=tuple(members)))
    return groups


def _ids(rng: np.random.Generator, count: int) -> IntArray:
    return rng.integers(0, VOCAB, count, dtype=np.int32)


def _turns(rng: np.random.Generator, start: IntArray, total: int) -> tuple[IntArray, BoolArray]:
    """`start` continued by turns up to `total` tokens, the last ones sampled."""
    ids, mask = [start], [np.zeros(len(start), np.bool_)]
    left = total - len(start)
    while left > 0:
        for sampled, (low, high) in ((True, REPLY), (False, OBSERVATION)):
            count = min(left, int(rng.integers(low, high)))
            ids.append(_ids(rng, count))
            mask.append(np.full(count, sampled))
            left -= count
    mask[-1][:] = mask[-2][:] = True
    return np.concatenate(ids), np.concatenate(mask)


def _segment(rng: np.random.Generator, name: str, index: int, ids: IntArray, mask: BoolArray) -> Segment:
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = -rng.exponential(0.5, int(mask.sum())).astype(np.float32)
    versions = np.where(mask, 3, 0).astype(np.int32)
    return Segment(
        rollout_id=name,
        index=index,
        kind="sampled",
        label="final",
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
    )


def _rollout(rng: np.random.Generator, name: str, trunk: IntArray, shape: Shape, number: int) -> Rollout:
    main = shape.tokens
    forked = number % FORKED == FORKED - 1
    if forked:
        main = int(shape.tokens * rng.uniform(0.4, 0.7))
    ids, mask = _turns(rng, trunk, main)
    segments = [_segment(rng, name, 0, ids, mask)]
    if forked:
        rest = shape.tokens - main
        at = int(rng.integers(len(trunk), max(len(trunk) + 1, min(main, rest) - 1)))
        more, own = _turns(rng, ids[:at], rest)
        own[:at] = False
        segments.append(_segment(rng, name, 1, more, own))
    trained = sum(int(s.mask.sum()) for s in segments)
    return Rollout(
        id=name,
        task_id=name,
        category="bench",
        status=Status.OK,
        reward=float(rng.random() < 0.5) if number > 1 else float(number),
        trajectory=Trajectory(
            segments=tuple(segments), turns=(), ledger=Ledger(captured=trained, trained=trained)
        ),
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(),
    )


def trie(rows: Sequence[IntArray]) -> int:
    """Tokens of the prefix tree of `rows`, by a trie in plain Python that goes token by token."""
    root: dict[int, Any] = {}
    made = 0
    for row in rows:
        node = root
        for token in row.tolist():
            below = node.get(token)
            if below is None:
                below = node[token] = {}
                made += 1
            node = below
    return made


def check(rows: Sequence[IntArray], found: Sorted) -> None:
    """Raises TrainError unless rows are in order and share with their predecessors what is said."""
    for before, row, shared in zip(found.order, found.order[1:], found.shared[1:], strict=False):
        a, b = rows[before][: shared + 1], rows[row][: shared + 1]
        same = np.array_equal(a[:shared], b[:shared])
        if not same or (len(a) > shared and not (len(b) > shared and a[shared] < b[shared])):
            raise TrainError(f"rows {before} and {row} do not stand in order, or do not share {shared} ids")


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main(argv: list[str]) -> int:
    """0, or 1 when the planner and the trie do not agree."""
    parser = Arguments(prog="benchmarks planner", description=__doc__)
    parser.add_argument("--rollouts", type=count, default=Shape().rollouts)
    parser.add_argument("--tokens", type=count, default=Shape().tokens, help="tokens of one rollout")
    parser.add_argument("--repeats", type=count, default=11)
    parser.add_argument("--budget", type=count, default=131_072, help="tokens of one micro-batch")
    parser.add_argument("--layout", choices=("tree", "prefix"), default="tree")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(argv)
    shape = Shape(rollouts=options.rollouts, tokens=options.tokens)
    if shape.rollouts % shape.group_size:
        parser.error(f"--rollouts {shape.rollouts}: groups are of {shape.group_size}, give a multiple of it")
    if shape.tokens < LEAST_TOKENS:
        parser.error(f"--tokens {shape.tokens}: a rollout with a fork has {LEAST_TOKENS} tokens or more")
    groups = workload(shape)
    config = PlanConfig(token_budget=options.budget, layout=options.layout)
    plan = plan_step(groups, config)
    rows = [row.ids for row in plan.rows]
    found = sort_rows(rows)
    slow: list[int] = []
    trie_wall, trie_cpu = timed(lambda: slow.append(trie(rows)))
    check(rows, found)
    tree = build_tree(plan.rows, found)
    fast = sum(len(row) for row in rows) - sum(found.shared)
    times = [timed(lambda: plan_step(groups, config)) for _ in range(options.repeats)]
    sorting = [timed(lambda: sort_rows(rows)) for _ in range(options.repeats)]
    laid = [timed(lambda: build_tree(plan.rows, found)) for _ in range(options.repeats)]
    tokens = sum(len(s.ids) for g in groups for r in g.rollouts for s in r.trajectory.segments)
    seconds = statistics.median(wall for wall, _ in times)
    shares = tree_work(tree, [len(row) for row in rows])
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(
        f"{tokens:,} tokens of {shape.rollouts} rollouts in {len(rows)} rows ({plan.tokens:,} trained);"
        f" {len(plan.batches)} micro-batches; a tree has {fast:,} tokens:"
        f" {shares[0]:.2f} x fewer tokens, {shares[1]:.2f} x fewer attention pairs"
    )
    for name, found_times in (
        ("plan_step", times),
        ("of it: order and shared prefixes", sorting),
        ("a trie token by token in Python", [(trie_wall, trie_cpu)]),
        ("laying out all rows as one tree", laid),
    ):
        wall, cpu = (statistics.median(column) for column in zip(*found_times, strict=True))
        print(f"{name:34}{wall * 1e3:10.1f} ms wall{cpu * 1e3:10.1f} ms CPU")
    if slow != [fast] or tree.tokens != fast:
        print(f"the trie has {slow} tokens, the sorted prefixes say {fast}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"seconds": round(seconds, 4), "tokens": tokens}))
    return 0
