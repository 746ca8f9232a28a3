"""The planner: the account, fates, weights, packing and indifference to arrival order."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_lab import group, rollout, sampled_groups, segment, small_model

from insitu.config import load_config, model_folder
from insitu.errors import ConfigError, TrainError
from insitu.types import Ledger, Rollout, Status
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import initialise, save_model
from insitu_train.plan.digest import is_plan
from insitu_train.plan.packing import PAIR_COST, pack, pair_cost
from insitu_train.plan.prefix import common_prefix
from insitu_train.plan.step import PlanConfig, plan_digest, plan_step

pytestmark = pytest.mark.slow


def simple(name: str, reward: float | None, tokens: int = 2, **more: object) -> Rollout:
    """One segment: 3 context ids, then `tokens` trained ids, then 2 dead ones."""
    ids = [1, 2, 3, *range(4, 4 + tokens), 0, 0]
    mask = [False] * 3 + [True] * tokens + [False] * 2
    return rollout(name, reward, [segment(name, 0, ids, mask, [-1.0] * len(ids))], **more)  # type: ignore[arg-type]


def failed(name: str, tokens: int) -> Rollout:
    return simple(name, None, tokens, status=Status.INFRA_FAILED)


def test_fates_and_account() -> None:
    groups = [
        group("train/0/0", [
            simple("train/0/0/0", 1.0, excluded={"undelivered": 5}),
            simple("train/0/0/1", 0.0),
            failed("train/0/0/2", 7),
            simple("train/0/0/3", 0.5, 3),
        ]),
        group("train/0/1", [simple("train/0/1/0", 1.0, 4), simple("train/0/1/1", 1.0, 4)]),
        group("eval/0/2", [simple("eval/0/2/0", 1.0, 9), simple("eval/0/2/1", 0.0, 9)]),
        group("train/0/3", [simple("train/0/3/0", 1.0, 6), failed("train/0/3/1", 1)]),
    ]  # fmt: skip
    plan = plan_step(groups, PlanConfig())
    assert [r.rollout_id for r in plan.rows] == ["train/0/0/0", "train/0/0/1"]
    assert plan.groups == 1
    assert plan.ledger == Ledger(
        captured=2 + 5 + 2 + 7 + 3 + 8 + 18 + 7,
        trained=4,
        excluded={
            "degenerate": 8, "evaluation": 18, "infra": 8 + 6, "undelivered": 5, "zero_advantage": 3,
        },
    )  # fmt: skip
    assert plan.ledger.balanced
    assert len(plan.rows[0].ids) == 5  # the dead tail is cut
    assert [r.advantage for r in plan.rows] == [0.5, -0.5]


def test_a_rollout_without_a_reward_is_ungraded() -> None:
    """The reward function returned None: neither a zero nor a failure."""
    scored = [simple("train/0/0/0", 1.0), simple("train/0/0/1", 0.0), simple("train/0/0/2", None, 4)]
    thin = [simple("train/0/1/0", 1.0, 3), simple("train/0/1/1", None, 5)]
    plan = plan_step([group("train/0/0", scored), group("train/0/1", thin)], PlanConfig())
    assert plan.ledger == Ledger(captured=16, trained=4, excluded={"ungraded": 12})
    assert plan.exclusion_reasons["train/0/1/0"] == "ungraded"


def test_a_group_with_too_few_scores_is_left_out() -> None:
    def planned(group_min: int) -> Ledger:
        members = [
            simple("train/0/0/0", 1.0),
            simple("train/0/0/1", 0.0, 3),
            failed("train/0/0/2", 4),
        ]
        whole = [simple("train/0/1/0", 1.0), simple("train/0/1/1", 0.0), simple("train/0/1/2", 0.0)]
        groups = [group("train/0/0", members), group("train/0/1", whole)]
        return plan_step(groups, PlanConfig(group_min=group_min)).ledger

    assert planned(2) == Ledger(captured=15, trained=11, excluded={"infra": 4})
    assert planned(3) == Ledger(captured=15, trained=6, excluded={"infra": 9})
    assert PlanConfig.of(load_config(None, ["collect.group_min=5"])).group_min == 5


def test_fewer_useful_groups_than_wanted_train_nothing_and_say_so() -> None:
    groups = [group("train/0/0", [simple("train/0/0/0", 1.0), simple("train/0/0/1", 0.0)])]
    plan = plan_step(groups, PlanConfig(min_groups=2))
    assert plan.skipped == "1 useful groups of 1; 2 are needed"
    assert not plan.rows
    assert not plan.batches
    assert plan.ledger == Ledger(captured=4, trained=0, excluded={"few_groups": 4})
    assert set(plan.exclusion_reasons.values()) == {"few_groups"}
    assert plan_step([], PlanConfig()).skipped
    one = plan_step(groups, PlanConfig.of(load_config(None, [])))
    assert (one.skipped, one.ledger.trained) == ("", 4), "by default one group with a gradient is enough"


def test_truncated_policies() -> None:
    def made(policy: str) -> object:
        cut = simple("train/0/0/0", 1.0, status=Status.TRUNCATED)
        members = [cut, simple("train/0/0/1", 0.0), simple("train/0/0/2", 0.0)]
        return plan_step([group("train/0/0", members)], PlanConfig(truncated=policy))  # type: ignore[arg-type]

    assert [r.advantage for r in made("keep").rows] == pytest.approx([2 / 3, -1 / 3, -1 / 3])  # type: ignore[attr-defined]
    masked = made("mask")
    assert [r.advantage for r in masked.rows] == pytest.approx([-1 / 3, -1 / 3])  # type: ignore[attr-defined]
    assert masked.ledger.excluded == {"truncated": 2}  # type: ignore[attr-defined]
    penalised = made("penalise")  # 1.0 - 1.0: nothing sets it apart any more
    assert penalised.ledger.excluded == {"degenerate": 6}  # type: ignore[attr-defined]
    assert made("drop_group").ledger.excluded == {"truncated": 6}  # type: ignore[attr-defined]


@pytest.mark.parametrize("reducer", ["rollout", "constant", "token", "group"])
@pytest.mark.parametrize("left", ["masked", "over the caps"])
def test_what_a_setting_leaves_out_is_in_neither_sum_nor_mean(reducer: str, left: str) -> None:
    """The weights of the others are those that they have without it; its reward still counts."""
    lengths, rewards = [2, 3, 4, 9, 9], [1.0, 0.0, 0.5, 0.0, 1.0]
    status = Status.TRUNCATED if left == "masked" else Status.OK
    members = [
        simple(f"g/0/{k}", reward, length, **({"status": status} if length == 9 else {}))
        for k, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    setting = {"truncated": "mask"} if left == "masked" else {"max_row_tokens": 12}
    config = PlanConfig(reducer=reducer, constant_tokens=10, **setting)  # type: ignore[arg-type]
    other = group("g/1", [simple("g/1/0", 1.0, 5), simple("g/1/1", 0.0, 6)])
    plan = plan_step([group("g/0", members), other], config)
    without = plan_step([group("g/0", members[:3]), other], config)
    assert [r.weight for r in plan.rows] == [r.weight for r in without.rows]
    assert [r.advantage for r in plan.rows] == pytest.approx([0.5, -0.5, 0.5, -0.5])
    assert plan.ledger.excluded[{"masked": "truncated"}.get(left, "overlong")] == 18
    if reducer == "rollout":  # a mean over five rollouts, one of which adds 0
        assert sum(r.weight * r.mask.sum() for r in plan.rows) == pytest.approx(4 / 5)


@pytest.mark.parametrize("reducer", ["rollout", "constant", "token", "group"])
def test_a_rollout_whose_final_row_is_over_the_cap_is_in_no_mean(reducer: str) -> None:
    """The other rows count in the mean of a final row that is trained, not without one."""

    def two_rows(name: str, reward: float, last: int) -> Rollout:
        rows = [
            segment(name, index, [1, 2, *range(3, 3 + n)], [False] * 2 + [True] * n, [-1.0] * (2 + n))
            for index, n in enumerate((2, last))
        ]
        return rollout(name, reward, rows)

    rewards = (1.0, 0.0, 1.0)
    members = [two_rows(f"g/0/{k}", reward, 3 if k < 2 else 9) for k, reward in enumerate(rewards)]
    config = PlanConfig(rows="final", max_row_tokens=8, reducer=reducer, constant_tokens=10)  # type: ignore[arg-type]
    plan = plan_step([group("g/0", members)], config)
    weights = {"rollout": 1 / (2 * 5), "constant": 1 / (2 * 10), "token": 1 / 10, "group": 1 / 10}
    assert [row.weight for row in plan.rows] == [weights[reducer]] * 2
    assert plan.ledger.excluded == {"not_final": 6, "overlong": 9}


def test_length_lowers_the_reward_that_is_compared() -> None:
    """Sampled tokens of the whole rollout count, those that are not trained too."""
    ids, mask = [1, 2, 3, 4], [False, False, True, True]
    names = [f"g/0/{k}" for k in range(3)]
    members = [
        rollout(name, 1.0, [segment(name, 0, ids, mask, [-1.0] * 4)], excluded={"auxiliary": 4 * k})
        for k, name in enumerate(names)
    ]
    same = plan_step([group("g/0", members)], PlanConfig())
    assert (same.skipped != "", same.ledger.excluded["degenerate"]) == (True, 6)
    plan = plan_step([group("g/0", members)], PlanConfig(overlong_tokens=(2, 10)))
    assert [r.advantage for r in plan.rows] == pytest.approx([0.5, -0.5])  # rewards 1, 0.5 and 0
    assert [r.rollout_id for r in plan.rows] == ["g/0/0", "g/0/2"]


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        ("rollout", [1 / 2 / 5, 1 / 2 / 5, 1 / 2 / 4]),
        ("token", [1 / 9] * 3),
        ("constant", [1 / 200] * 3),
        ("group", [1 / 9] * 3),
    ],
)
def test_segments_of_one_rollout_count_as_one(reducer: str, expected: list[float]) -> None:
    a, b = "train/0/0/0", "train/0/0/1"
    mu = [-1.0] * 5
    two = [
        segment(a, 0, [1, 2, 3, 4, 5], [False, False, True, True, True], mu),
        segment(a, 1, [1, 2, 6, 7, 8], [False, False, False, True, True], mu),
    ]
    one = [segment(b, 0, [1, 2, 3, 4, 5], [False, True, True, True, True], mu)]
    groups = [group("train/0/0", [rollout(a, 1.0, two), rollout(b, 0.0, one)])]
    plan = plan_step(groups, PlanConfig(reducer=reducer, constant_tokens=100))  # type: ignore[arg-type]
    assert [r.weight for r in plan.rows] == pytest.approx(expected)
    assert [r.advantage for r in plan.rows] == [0.5, 0.5, -0.5]


def test_group_mean_weighs_groups_equally_and_dropping_zero_rows_changes_nothing() -> None:
    big = group("g/0", [simple("g/0/0", 1.0, 8), simple("g/0/1", 0.0, 8)])
    small = group("g/1", [simple("g/1/0", 1.0, 1), simple("g/1/1", 0.0, 1)])
    plan = plan_step([big, small], PlanConfig(reducer="group"))
    assert [r.weight for r in plan.rows] == pytest.approx([1 / 32, 1 / 32, 1 / 4, 1 / 4])
    with_zero = group("g/0", [simple("g/0/0", 1.0), simple("g/0/1", 0.0), simple("g/0/2", 0.5)])
    weights = [r.weight for r in plan_step([with_zero], PlanConfig()).rows]
    assert weights == pytest.approx([1 / 6, 1 / 6])  # a mean over three rollouts, one of which adds 0


def test_arrival_order_does_not_matter_and_content_does() -> None:
    groups = sampled_groups(small_model(), groups=12, size=3)
    plan = plan_step(groups, PlanConfig(token_budget=150))
    mixed = [dataclasses.replace(g, rollouts=g.rollouts[::-1]) for g in groups]
    random.Random(1).shuffle(mixed)
    again = plan_step(mixed, PlanConfig(token_budget=150))
    assert again.digest == plan.digest == plan_digest(plan)
    assert [r.rollout_id for r in again.rows] == [r.rollout_id for r in plan.rows]
    names = [r.rollout_id for r in plan.rows]
    assert names == sorted(names, key=lambda n: [int(p) for p in n.split("/")[1:]])
    packed = plan_step(groups, PlanConfig(token_budget=90))
    assert len(packed.batches) > len(plan.batches)
    assert packed.digest == plan.digest, "a resumed run may pack otherwise"
    earlier = plan_digest(plan, packed=True)
    assert (is_plan(plan, earlier), is_plan(packed, earlier)) == (True, False)
    assert is_plan(packed, plan.digest)
    other = plan_step(groups, PlanConfig(token_budget=150, reducer="token"))
    assert other.digest != plan.digest


def test_refusals_name_the_place() -> None:
    bad = rollout("g/0/0", 1.0, [segment("g/0/0", 3, [1, 2], [True, False], [-1, 0])])
    fine = simple("g/0/1", 0.0)
    with pytest.raises(TrainError, match="rollout g/0/0 segment 3 token 0: the first token"):
        plan_step([group("g/0", [bad, fine])], PlanConfig())
    bad = rollout("g/0/0", 1.0, [segment("g/0/0", 0, [1, 2, 3], [False, True, True], [0, -1, np.nan])])
    with pytest.raises(TrainError, match="segment 0 token 2: log-probability nan"):
        plan_step([group("g/0", [bad, fine])], PlanConfig())
    with pytest.raises(TrainError, match="rollout g/0/1 was given twice"):
        plan_step([group("g/0", [fine, fine])], PlanConfig())
    lost = dataclasses.replace(fine, trajectory=dataclasses.replace(fine.trajectory, segments=()))
    with pytest.raises(TrainError, match="segments hold 0 trained tokens"):
        plan_step([group("g/0", [lost, simple("g/0/2", 1.0)])], PlanConfig())
    with pytest.raises(ValueError, match="maxrl"):
        PlanConfig(advantage="maxrl", truncated="penalise")
    with pytest.raises(ValueError, match="maxrl .* overlong_tokens"):
        PlanConfig(advantage="maxrl", overlong_tokens=(5, 10))


@pytest.mark.parametrize("reason", ["infra", "evaluation"])
def test_tokens_excluded_before_planning_make_no_row(reason: str) -> None:
    """Failures of the infrastructure after sampling keep their segments."""
    lost = rollout(
        "g/2", None, [segment("g/2", 0, [1, 2], [False, True], [0, -1.0])], status=Status.INFRA_FAILED
    )
    ledger = Ledger(captured=1, trained=0, excluded={reason: 1})
    lost = dataclasses.replace(lost, trajectory=dataclasses.replace(lost.trajectory, ledger=ledger))
    others = [rollout(f"g/{k}", k, [segment(f"g/{k}", 0, [1, 2], [False, True], [0, -1.0])]) for k in (0, 1)]
    plan = plan_step([group("g", [*others, lost])], PlanConfig())
    assert plan.ledger == Ledger(captured=3, trained=2, excluded={reason: 1})


def test_a_rollout_without_tokens_makes_no_row() -> None:
    empty = rollout("g/0/0", 1.0, [])
    plan = plan_step([group("g/0", [empty, simple("g/0/1", 0.0)])], PlanConfig())
    assert [r.rollout_id for r in plan.rows] == ["g/0/1"]
    assert plan.ledger.balanced


rows_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.integers(1, 11)),
    min_size=1,
    max_size=9,
)


@settings(max_examples=80)
@given(rows=rows_strategy, budget=st.integers(1, 60))
def test_packing_is_a_partition_with_true_prefixes_under_the_budget(
    rows: list[tuple[list[int], int]], budget: int
) -> None:
    ids = [np.array(r, np.int32) for r, _ in rows]
    first = [min(f, len(r) - 1) for r, f in rows]
    batches = pack(ids, first, budget)
    assert sorted(i for b in batches for i in b.rows) == list(range(len(rows)))
    for b in batches:
        members = [ids[i] for i in b.rows]
        assert all((m[: b.prefix] == members[0][: b.prefix]).all() and len(m) > b.prefix for m in members)
        assert all(first[i] >= b.prefix for i in b.rows)
        assert b.tokens == b.prefix + len(members) * (max(map(len, members)) - b.prefix)
        assert b.tokens <= budget or len(members) == 1


@settings(max_examples=60)
@given(rows=rows_strategy, budget=st.integers(1, 60), ranks=st.integers(1, 4))
def test_trees_and_ranks_are_a_partition_under_the_budget(
    rows: list[tuple[list[int], int]], budget: int, ranks: int
) -> None:
    ids = [np.array(r, np.int32) for r, _ in rows]
    first = [min(f, len(r) - 1) for r, f in rows]
    for layout in ("tree", "prefix"):
        batches = pack(ids, first, budget, layout=layout, ranks=ranks)  # type: ignore[arg-type]
        assert sorted(i for b in batches for i in b.rows) == list(range(len(rows)))
        assert {b.rank for b in batches} <= set(range(ranks))
        assert all(b.tokens <= budget or len(b.rows) == 1 for b in batches)
    for b in pack(ids, first, budget, layout="tree"):
        prefixes = {tuple(ids[i][:n].tolist()) for i in b.rows for n in range(1, len(ids[i]) + 1)}
        assert (b.tokens, b.prefix, b.layout) == (len(prefixes), 0, "tree")
    alone = pack(ids, first, budget, layout="rows", ranks=ranks)
    assert sorted((b.rows[0], b.tokens, b.prefix) for b in alone) == [
        (i, len(r), 0) for i, r in enumerate(ids)
    ]
    assert all(len(b.rows) == 1 and b.layout == "rows" and b.rank < ranks for b in alone)


def test_ranks_have_about_as_much_to_do() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 900, int(n)).astype(np.int32) for n in rng.integers(100, 900, 64)]
    for ranks in (2, 4):
        load = [0] * ranks
        for b in pack(ids, [50] * 64, 16384, ranks=ranks):
            load[b.rank] += sum(len(ids[i]) + len(ids[i]) ** 2 // 2000 for i in b.rows)
        assert max(load) < 1.1 * sum(load) / ranks


def test_pairs_cost_what_they_do_in_the_model(tmp_path: Path) -> None:
    """2 operations per weight and token, 4 per pair and head dimension, from config.json alone."""
    config = ModelConfig(vocab_size=50, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=16, intermediate_size=48, num_hidden_layers=1)  # fmt: skip
    model = initialise(config, 0)
    save_model(model, tmp_path)
    matrices = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2)
    assert pair_cost(tmp_path) == pytest.approx(4 * 4 * 16 / (2 * matrices))
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    with pytest.raises(ConfigError, match="lacks 'num_attention_heads'"):
        pair_cost(tmp_path)
    # Padding a short row to a long one costs pairs; a pass of its own costs BATCH_COST tokens.
    ids = [np.full(n, n, np.int32) for n in (10, 70)]
    assert [len(pack(ids, [1, 1], 10_000, pair_cost=c)) for c in (0.0, 0.1)] == [1, 2]
    config_of = load_config(None, ["train.ranks=2"])
    assert PlanConfig.of(config_of).pair_cost == pair_cost(model_folder(config_of))
    assert PlanConfig.of(load_config(None, [])).pair_cost == PAIR_COST


def test_packing_shares_the_common_prompt_and_keeps_long_rows() -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(0, 900, 254)
    ids = []
    for _ in range(12):
        task = rng.integers(0, 900, 60)
        ids += [
            np.concatenate([system, task, rng.integers(0, 900, n)]).astype(np.int32)
            for n in range(80, 240, 20)
        ]
    ids.append(np.concatenate([system, rng.integers(0, 900, 5000)]).astype(np.int32))
    began = time.perf_counter()
    batches = pack(ids, [300] * len(ids), 4096)
    seconds = time.perf_counter() - began
    assert [b.rows for b in batches if b.tokens > 4096] == [(96,)]
    spent = sum(b.tokens for b in batches)
    assert spent < 0.65 * sum(map(len, ids))  # one row each would cost all of it
    assert seconds < 1.0
    assert common_prefix(ids[0], ids[1]) == 314


def test_an_advantage_of_zero_is_trained_where_the_loss_has_a_pull() -> None:
    """It counts in the means either way, so what pulls at it must not be lost."""
    members = [simple("g/0/0", 1.0), simple("g/0/1", 0.0), simple("g/0/2", 0.5, 3)]
    same = [simple("g/1/0", 1.0), simple("g/1/1", 1.0)]
    for pull, names in ((False, ["g/0/0", "g/0/1"]), (True, ["g/0/0", "g/0/1", "g/0/2"])):
        plan = plan_step([group("g/0", members), group("g/1", same)], PlanConfig(pull=pull))
        assert [r.rollout_id for r in plan.rows] == names
        assert [r.weight for r in plan.rows] == pytest.approx([1 / 6, 1 / 6, 1 / 9][: len(names)])
        left = {"degenerate": 4} if pull else {"degenerate": 4, "zero_advantage": 3}
        assert (plan.ledger.excluded, plan.ledger.balanced) == (left, True)


@pytest.mark.parametrize(
    ("pull", "overrides"),
    [
        (True, []),  # dppo, with its tau
        (False, ["train.dppo_tau=0"]),
        (True, ["train.dppo_tau=0", "train.kl=k3", "train.kl_weight=0.1"]),
        (False, ["train.loss=ppo_clip"]),
        (False, ["train.loss=ppo_clip", "train.kl=k2"]),  # only measured
        (True, ["train.loss=ppo_clip", "train.kl=k2", "train.kl_weight=0.1"]),
    ],
)
def test_the_losses_that_pull(pull: bool, overrides: list[str]) -> None:
    assert PlanConfig.of(load_config(None, overrides)).pull is pull
