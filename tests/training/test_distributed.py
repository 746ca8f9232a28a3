"""Several ranks train as one: loss, gradient and update do not depend on how many there are. The ranks are
threads of this process that speak gloo with each other; one test has real processes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from train_lab import group, rollout, sampled_groups, segment, small_model

from insitu.config.training import LossConfig
from insitu.errors import TrainError
from insitu.shutdown import descendants
from insitu_train.embedded.model import save_model
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.learner.ranks import make_trainer
from insitu_train.options import OptimConfig, StepResult, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.scores import read_row, score_file
from insitu_train.trainer import checkpoint, distributed
from insitu_train.trainer.distributed import Sharded, Together, join
from insitu_train.trainer.reference import Reference
from insitu_train.trainer.trainer import Trainer

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

T = TypeVar("T")
Named = dict[str, torch.Tensor]
CONFIG = TrainConfig(loss=LossConfig(loss="ppo_clip"), optim=OptimConfig(lr=1e-3))
_stores = itertools.count()
LEFT_OUT = ("seconds", "mfu", "ranks", "shared_s")
"""Numbers of a step that are of the machine."""


def on_ranks(world: int, folder: Path, work: Callable[[Together], T]) -> list[T]:
    """work(ranks) on each of `world` ranks at once; their results, or the first exception."""
    store = folder / f"store-{next(_stores)}"
    done: dict[int, T] = {}
    failed: dict[int, Exception] = {}

    def one(rank: int) -> None:
        try:
            done[rank] = work(join(rank, world, store, deadline_s=20))
        except (TrainError, AssertionError, RuntimeError) as error:
            failed[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in sorted(failed):
        raise failed[rank]
    return [done[rank] for rank in range(world)]


def made_plan(world: int, reducer: str = "rollout", budget: int = 120) -> StepPlan:
    groups = sampled_groups(small_model(0))
    return plan_step(groups, PlanConfig(reducer=reducer, token_budget=budget, ranks=world))  # type: ignore[arg-type]


def gradients(ranks: Together | None, plan: StepPlan, config: TrainConfig = CONFIG) -> tuple[float, Named]:
    trainer = Trainer(small_model(1), config, ranks=ranks)  # not the sampler's weights
    loss = trainer.gradients(plan)
    return loss, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def gap(a: Named, b: Named) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "reducer",
    [
        "rollout",
        "token",
        pytest.param("constant", marks=pytest.mark.full),
        pytest.param("group", marks=pytest.mark.full),
    ],
)
def test_loss_and_gradient_do_not_depend_on_the_number_of_ranks(
    world: int, reducer: str, tmp_path: Path
) -> None:
    loss, grad = gradients(None, made_plan(1, reducer, 10_000))
    plan = made_plan(world, reducer)
    assert len({b.rank for b in plan.batches}) == world
    for other_loss, other_grad in on_ranks(world, tmp_path, lambda ranks: gradients(ranks, plan)):
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-8)
        assert gap(grad, other_grad) < 1e-5 * max(float(g.abs().max()) for g in grad.values())


def test_the_divergence_of_each_task_set_is_that_of_all_ranks(tmp_path: Path) -> None:
    def of_sets(ranks: Together | None, world: int) -> Mapping[str, float]:
        plan = made_plan(world)
        parts = {name: "ab"[at % 2] for at, name in enumerate(sorted({row.group_id for row in plan.rows}))}
        rows = [dataclasses.replace(row, part=parts[row.group_id]) for row in plan.rows]
        plan = dataclasses.replace(plan, rows=tuple(rows))
        config = TrainConfig(loss=LossConfig(kl="k3", kl_weight=1.0))
        trainer = Trainer(small_model(), config, reference=Reference(small_model(1)), ranks=ranks)
        return trainer.step(plan).ref_kl_of_sets

    alone = of_sets(None, 1)
    assert alone.keys() == {"a", "b"}
    for found in on_ranks(2, tmp_path, lambda ranks: of_sets(ranks, 2)):
        assert found == pytest.approx(alone, rel=1e-5)


def test_ranks_that_read_different_references_are_refused(tmp_path: Path) -> None:
    """Each host reads its own folder, which nothing else compares."""
    for seed in range(2):
        save_model(small_model(seed), tmp_path / str(seed))

    def made(ranks: Together, other: int) -> str:
        config = TrainConfig(loss=LossConfig(kl="k3", kl_weight=1.0), reference=str(tmp_path / str(other)))
        found = make_trainer(small_model(0), tmp_path / "0", config, ranks).reference
        assert found is not None
        return found.checksum

    assert len(set(on_ranks(2, tmp_path, lambda ranks: made(ranks, 1)))) == 1
    with pytest.raises(TrainError, match=r"^train\.reference: its file is another one on some host"):
        on_ranks(2, tmp_path, lambda ranks: made(ranks, ranks.rank))


def test_ranks_that_read_different_losses_are_refused(tmp_path: Path) -> None:
    """Their gradients would be summed, and no weights would differ."""
    for at, sign in enumerate("--+"):
        (tmp_path / f"{at}.py").write_text(f"def loss(logp, terms, config):\n    return {sign}logp\n")

    def made(ranks: Together, other: int) -> int:
        config = TrainConfig(loss=LossConfig(loss=f"{tmp_path / str(other)}.py:loss"))
        return make_trainer(small_model(0), tmp_path, config, ranks).steps

    assert on_ranks(2, tmp_path, lambda ranks: made(ranks, ranks.rank)) == [0, 0]
    with pytest.raises(TrainError, match=r"^train\.loss: its file is another one on some host"):
        on_ranks(2, tmp_path, lambda ranks: made(ranks, 2 * ranks.rank))


def test_trees_over_ranks_give_what_padded_rows_give(tmp_path: Path) -> None:
    loss, grad = gradients(None, made_plan(1, budget=10_000))
    config = PlanConfig(token_budget=120, ranks=2, layout="tree")
    plan = plan_step(sampled_groups(small_model(0)), config)
    assert {(b.rank, b.layout) for b in plan.batches} == {(0, "tree"), (1, "tree")}
    for other_loss, other_grad in on_ranks(2, tmp_path, lambda ranks: gradients(ranks, plan)):
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert gap(grad, other_grad) < 1e-5 * max(float(g.abs().max()) for g in grad.values())


def test_a_ratio_of_whole_rollouts_is_gathered_from_all_ranks(tmp_path: Path) -> None:
    """Two segments of a rollout lie on two ranks; gspo needs the mean over both."""
    config = CONFIG.changed(loss=LossConfig(loss="gspo", clip=(0.5, 9.0)))
    split = []
    for g in sampled_groups(small_model(0)):
        members = []
        for r in g.rollouts:
            (s,) = r.trajectory.segments
            first, second = s.mask.copy(), s.mask.copy()
            first[20:], second[:20] = False, False
            parts = [segment(r.id, i, s.ids, m, s.logprobs) for i, m in enumerate((first, second))]
            members.append(rollout(r.id, r.reward, parts))
        split.append(group(g.id, members))
    plan = plan_step(split, PlanConfig(token_budget=1))
    turns = tuple(dataclasses.replace(b, rank=n % 2) for n, b in enumerate(plan.batches))
    plan = dataclasses.replace(plan, batches=turns)
    home = {(plan.rows[i].rollout_id, b.rank) for b in plan.batches for i in b.rows}
    assert len(home) > len({name for name, _ in home})
    loss, grad = gradients(None, plan, config)
    for other_loss, other_grad in on_ranks(2, tmp_path, lambda ranks: gradients(ranks, plan, config)):
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert gap(grad, other_grad) < 1e-5 * max(float(g.abs().max()) for g in grad.values())


def trained(
    ranks: Together | None, plan: StepPlan, epochs: int = 2, scores: Path | None = None
) -> tuple[StepResult, Named]:
    model = small_model(0)
    trainer = Trainer(model, CONFIG.changed(epochs=epochs), ranks=ranks)
    result = trainer.step(plan, scores)
    return result, {n: p.detach().clone() for n, p in model.named_parameters()}


def test_a_step_of_two_ranks_is_that_of_one_and_the_same_bits_again(tmp_path: Path) -> None:
    one, alone = trained(None, made_plan(1))
    plan = made_plan(2)
    first, second = on_ranks(2, tmp_path, lambda ranks: trained(ranks, plan))
    again = on_ranks(2, tmp_path, lambda ranks: trained(ranks, plan))[0]
    assert all(torch.equal(first[1][n], second[1][n]) for n in alone)
    assert all(torch.equal(first[1][n], again[1][n]) for n in alone)
    assert gap(first[1], alone) < 1e-4
    for result in (first[0], second[0]):
        assert (result.tokens, result.rows, result.version) == (one.tokens, one.rows, one.version)
        assert result.loss == pytest.approx(one.loss, abs=1e-6)
        assert result.entropy == pytest.approx(one.entropy, rel=1e-5)
        assert result.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert 0 < result.max_logprob_gap < 1e-5


def test_every_number_of_a_step_is_that_of_one_rank(tmp_path: Path) -> None:
    """One rank has one short row and the other all else: no mean of means, and a maximum is the largest."""
    plan = plan_step(sampled_groups(small_model(0)), PlanConfig(token_budget=1))
    few = tuple(dataclasses.replace(b, rank=int(n > 0)) for n, b in enumerate(plan.batches))
    loss = LossConfig(
        loss="ppo_clip", kl="k3", kl_weight=0.1, ratio="trainer", correction="tis", clip=(1e-4, 1e-4)
    )
    config = CONFIG.changed(loss=loss, epochs=2, max_logprob_gap=100.0)

    def step(ranks: Together | None, plan: StepPlan) -> dict[str, float]:
        # not the sampler's weights, so that ratios, clipping and divergence are something
        trainer = Trainer(small_model(1), config, reference=Reference(small_model(2)), ranks=ranks)
        found = dataclasses.asdict(trainer.step(plan))
        return {n: v for n, v in found.items() if isinstance(v, int | float) and n not in LEFT_OUT}

    alone = step(None, plan)
    for name in ("clip_fraction", "clip_low_fraction", "corrected_fraction", "max_logprob_gap", "ref_kl"):
        assert alone[name] > 0, name
    assert alone["mismatch_kl"] > 0
    assert alone["ess"] < 1
    for found in on_ranks(2, tmp_path, lambda ranks: step(ranks, dataclasses.replace(plan, batches=few))):
        assert found == {name: pytest.approx(value, rel=1e-4) for name, value in alone.items()}


def test_each_rank_writes_the_scores_of_its_rows(tmp_path: Path) -> None:
    plan, folder = made_plan(2), tmp_path / "scores"
    on_ranks(2, tmp_path, lambda ranks: trained(ranks, plan, scores=score_file(folder, 1)))
    assert len(list(folder.iterdir())) == 2
    trained(None, plan, scores=score_file(folder, 2))
    for row in plan.rows:
        one, two = (read_row(folder, step, plan.digest, row.rollout_id, row.segment) for step in (1, 2))
        assert one.gap == pytest.approx(two.gap, abs=1e-5)


def test_what_one_rank_refuses_all_refuse_and_nothing_changes(tmp_path: Path) -> None:
    plan = made_plan(2)
    batch = next(b for b in plan.batches if b.rank == 1)
    row = plan.rows[batch.rows[0]]
    mu = row.logprobs.copy()
    mu[row.mask] -= 0.5
    bad = dataclasses.replace(row, logprobs=mu)
    wrong = dataclasses.replace(plan, rows=tuple(bad if r is row else r for r in plan.rows))

    def refused(ranks: Together) -> tuple[str, Named]:
        model = small_model(0)
        with pytest.raises(TrainError) as caught:
            Trainer(model, CONFIG, ranks=ranks).step(wrong)
        return str(caught.value), dict(model.named_parameters())

    before = dict(small_model(0).named_parameters())
    for text, after in on_ranks(2, tmp_path, refused):
        assert text.startswith(f"rollout {row.rollout_id} segment 0 token ")
        assert "trainer and sampler differ by 0.5" in text
        assert all(torch.equal(before[n], after[n]) for n in before)


def test_ranks_that_have_parted_notice(tmp_path: Path) -> None:
    plan = made_plan(2)

    def parted(ranks: Together) -> str:
        trainer = Trainer(small_model(0), CONFIG, ranks=ranks)
        if ranks.rank == 1:
            with torch.no_grad():
                next(iter(trainer.model.named_parameters()))[1][0, 0].mul_(1.0 + 1e-6)
        with pytest.raises(TrainError) as caught:
            trainer.step(plan)
        return str(caught.value)

    assert set(on_ranks(2, tmp_path, parted)) == {
        "rank 1 and rank 0 hold different weights: the ranks have diverged"
    }


def test_copies_of_a_part_that_have_parted_notice(tmp_path: Path) -> None:
    """Four ranks that hold two copies: ranks 0 and 2 have one half, 1 and 3 the other."""

    def parted(ranks: Together) -> str:
        copies = Sharded(ranks._group, None, 2)
        copies.agree([torch.full((3,), float(ranks.rank % 2))])
        with pytest.raises(TrainError) as caught:
            copies.agree([torch.full((3,), float(ranks.rank % 2 + ranks.rank // 3))])
        return str(caught.value)

    assert set(on_ranks(4, tmp_path, parted)) == {
        "rank 3 and rank 1 hold different weights of the same part: the ranks have diverged"
    }


def test_ranks_take_over_a_checkpoint_that_only_the_first_reaches(tmp_path: Path) -> None:
    made = Trainer(small_model(0), CONFIG)
    made.step(made_plan(2))
    checkpoint.save(made, tmp_path / "c")

    def taken(ranks: Together) -> Named:
        trainer = Trainer(small_model(1), CONFIG, ranks=ranks)
        checkpoint.load_shared(trainer, None if ranks.rank else tmp_path / "c")
        assert trainer.version == made.version
        return {**dict(trainer.model.named_parameters()), **trainer.optimiser.tensors()}

    expected = {**dict(made.model.named_parameters()), **made.optimiser.tensors()}
    for found in on_ranks(3, tmp_path, taken):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_group_listens_at_the_interface_that_has_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # restored after the test
    with pytest.raises(TrainError, match="no network interface here has 203.0.113.1 first: set GLOO_SOCKET"):
        distributed._listen_at("203.0.113.1", needed=True)
    distributed._listen_at("203.0.113.1", needed=False)
    assert not any(os.environ[name] for name in variables)
    distributed._listen_at("127.0.0.3", needed=True)
    assert {os.environ[name] for name in variables} == {"lo"}
    monkeypatch.setenv(variables[0], "mine")
    monkeypatch.setenv(variables[1], "")
    distributed._listen_at("127.0.0.1", needed=True)
    assert [os.environ[name] for name in variables] == ["mine", "lo"]


def test_a_rank_that_does_not_come_is_an_error_not_a_wait(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="meet 2 ranks: another rank died or did not answer"):
        join(0, 2, tmp_path / "store", deadline_s=0.3)


def test_a_rank_that_dies_ends_the_step_of_the_others(tmp_path: Path) -> None:
    def lonely(ranks: Together) -> str:
        ranks.attempt(lambda: 0.0)  # both are connected now
        if ranks.rank == 1:
            return "gone"
        with pytest.raises(TrainError) as caught:
            ranks.attempt(lambda: math.nan)
        return str(caught.value)

    assert on_ranks(2, tmp_path, lonely)[0].startswith("gather from all ranks: another rank died")


@pytest.mark.full
async def test_a_learner_of_two_processes_trains_resumes_and_says_when_one_dies(tmp_path: Path) -> None:
    save_model(small_model(0), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    spec = LearnerSpec(model=tmp_path / "model", train=CONFIG.changed(ranks=2), max_context=128)
    plan = made_plan(2)
    async with Learner.start(spec) as learner:
        await learner.save(tmp_path / "start")
        assert not await learner.written()
        result = await learner.step(plan, score_file(tmp_path / "scores", 1))
        assert len(list((tmp_path / "scores").iterdir())) == 2
        once = learner.weights
        assert result.tokens == plan.tokens
        await learner.load(tmp_path / "start")
        assert learner.weights != once
        await learner.step(plan)
        assert learner.weights == once
        (peer,) = descendants(learner.pid)
        os.kill(peer, signal.SIGKILL)
        with pytest.raises(TrainError, match=r"the learner died \(exit status 1\): .*RankLostError|is gone"):
            await learner.step(plan_step(sampled_groups(small_model(0), version=1), PlanConfig(ranks=2)))
        assert not learner.alive
