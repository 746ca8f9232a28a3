"""What other trainers' own code computes from converted rows: insitu's advantages and gradients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from peer_code import prime_types, taken
from played import AGENTS, played_group
from row_lab import rollout, segment

from insitu.config.training import LossConfig
from insitu.types import Group, Ledger, Rollout, Status
from insitu_bridges.rows import GroupRows, rows_of
from insitu_bridges.slime import rewards, to_samples
from insitu_bridges.to_openenv import to_openenv
from insitu_bridges.to_prime import to_prime
from insitu_bridges.to_skyrl import to_skyrl
from insitu_bridges.to_tinker import datums, to_tinker
from insitu_bridges.to_verifiers import to_verifiers
from insitu_bridges.to_verl import to_verl
from insitu_lab.open_renderer import Splitter, open_renderer
from insitu_train.plan.step import PlanConfig, plan_step

pytestmark = pytest.mark.bridge
REDUCERS = ("token", "rollout", "constant", "group")
LOSS = LossConfig(loss="dppo")
Live = dict[tuple[str, int], Any]
"""Log-probabilities of each row under the trainer's policy, by rollout and row: what gradients are of."""


def member(name: str, reward: float | None, rows: int, lengths: Sequence[int], **more: Any) -> Rollout:
    """A rollout whose rows have these numbers of trained tokens."""
    made = rollout(name, reward, rows, **more)
    segments = tuple(
        segment(name, at, trained=length) for at, length in zip(range(rows), lengths, strict=True)
    )
    tokens = sum(lengths)
    lost = made.status is Status.INFRA_FAILED
    ledger = Ledger(
        captured=tokens, trained=0 if lost else tokens, excluded={"infra": tokens} if lost else {}
    )
    return replace(made, trajectory=replace(made.trajectory, segments=segments, ledger=ledger))


def groups() -> list[Group]:
    """Several rows, one lost, one over the caps, one that was cut off, one at the mean, equal rewards."""
    made = [
        [(1.0, (3, 5)), (0.0, (4,)), (0.25, (2, 2, 7)), (None, (3,))],
        [(1.0, (2,)), (0.0, (30,)), (0.5, (6, 1)), (0.5, (3,))],
        [(0.0, (4,)), (1.0, (5,)), (1.0, (3, 3)), (0.0, (8,))],
        [(1.0, (2,)), (1.0, (2,)), (1.0, (9, 1)), (1.0, (1,))],
    ]
    found = []
    for number, members in enumerate(made):
        rollouts = []
        for slot, (reward, lengths) in enumerate(members):
            status = Status.INFRA_FAILED if reward is None else Status.OK
            status = Status.TRUNCATED if (number, slot) == (2, 3) else status
            name = f"train/1/{number}/{slot}"
            rollouts.append(member(name, reward, len(lengths), lengths, status=status))
        found.append(Group(id=f"train/1/{number}", task_id=f"task{number}", rollouts=tuple(rollouts)))
    return found


PLAN = PlanConfig(max_row_tokens=20, truncated="mask")


def own_gradients(rows: Sequence[GroupRows], live: Live) -> dict[tuple[str, int], Any]:
    """Gradients of insitu's loss of the planned rows."""
    import torch

    from insitu_train.loss.losses import LossInputs, token_loss

    total = torch.zeros((), dtype=torch.float64)
    for row in (row for group in rows for row in group.rows):
        at = torch.from_numpy(row.mask)
        logps = live[row.rollout_id, row.segment][: len(row.ids)][at]
        inputs = LossInputs(
            mu=torch.from_numpy(row.logprobs[row.mask].astype(np.float64)),
            advantage=torch.full((len(logps),), row.advantage, dtype=torch.float64),
        )
        total = total + row.weight * token_loss(logps, inputs, LOSS).loss.sum()
    return gradients(total, live)


def gradients(loss: Any, live: Live) -> dict[tuple[str, int], Any]:
    for tensor in live.values():
        tensor.grad = None
    loss.backward()
    return {key: tensor.grad.clone() for key, tensor in live.items() if tensor.grad is not None}


def check_equal(theirs: Mapping[Any, Any], ours: Mapping[Any, Any]) -> None:
    import torch

    assert len(ours) > 1
    assert sum(float(grad.abs().sum()) for grad in ours.values()) > 0
    for key in ours.keys() | theirs.keys():
        assert torch.allclose(theirs[key], ours[key], rtol=1e-9, atol=1e-15), key


def live_logprobs(rows: Sequence[GroupRows]) -> Live:
    import torch

    random = np.random.default_rng(5)
    found: Live = {}
    for row in (row for group in rows for row in group.rows):
        moved = np.where(row.mask, row.logprobs + random.normal(0, 0.2, len(row.ids)), 0.0)
        found[row.rollout_id, row.segment] = torch.tensor(np.minimum(moved, -1e-3), requires_grad=True)
    return found


def prime_loss() -> Any:
    """prime-rl's `compute_loss` with its default loss."""
    import torch

    names = (
        "LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl",
        "default_loss_fn", "compute_loss",
    )  # fmt: skip
    space = {"torch": torch, "Tensor": torch.Tensor, "dataclass": dataclass, "field": field, "Any": Any}
    space |= {name: _Anything() for name in ("Float", "Bool", "Int")} | {"__name__": __name__}
    found = taken("INSITU_PRIME_SRC", "src/prime_rl/trainer/rl/loss.py", names, **space)
    config = SimpleNamespace(
        dppo_mask_high=LOSS.clips[1], dppo_mask_low=LOSS.clips[0], adv_tau=1.0, kl_tau=LOSS.dppo_tau
    )

    def loss(live: Sequence[Any], samples: Sequence[Any]) -> Any:
        """samples: (mask, log-probabilities, advantages, weights) of each row, as prime-rl decoded them."""
        as_double = [[torch.tensor(each, dtype=torch.float64) for each in sample[1:]] for sample in samples]
        masks = [torch.tensor(sample[0], dtype=torch.bool) for sample in samples]
        scale = sum(int((mask & (more[2] != 0)).sum()) for mask, more in zip(masks, as_double, strict=True))
        total, _ = found["compute_loss"](
            live, [one[0] for one in as_double], None, [one[1] for one in as_double], masks,
            [one[2] for one in as_double], None, None,
            lambda inputs: found["default_loss_fn"](inputs, config), scale, 1, 1,
        )  # fmt: skip
        return total

    return loss


class _Anything:
    """Stands for a type of arrays: `Float[Tensor, " seq"]`."""

    def __getitem__(self, item: Any) -> Any:
        return Any


@pytest.mark.parametrize("reducer", REDUCERS)
def test_prime_rls_loss_has_our_gradient(reducer: str) -> None:
    msgspec = pytest.importorskip("msgspec")
    prime, loss = prime_types(), prime_loss()
    rows = rows_of(groups(), PLAN.changed(reducer=reducer, constant_tokens=7))
    wire = msgspec.msgpack.encode(to_prime(rows).payload)
    samples = [
        (one.loss_mask, one.inference_logprobs, one.advantages, one.rl_weights)
        for one in msgspec.msgpack.Decoder(list[prime.MicroBatch]).decode(wire)
    ]
    live = live_logprobs(rows)
    check_equal(gradients(loss(list(live.values()), samples), live), own_gradients(rows, live))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    folder = tmp_path_factory.mktemp("open") / "model"
    renderer, splitter = open_renderer(folder), Splitter(folder / "tokenizer.json", seed=2)
    found = []
    for number, agent in enumerate(AGENTS[:3]):
        group = asyncio.run(played_group(agent, renderer, splitter))
        name = f"train/00001/{number:03d}"
        members = [_renamed(one, f"{name}/{slot:02d}") for slot, one in enumerate(group.rollouts)]
        found.append(replace(group, id=name, rollouts=tuple(members)))
    return found


def _renamed(one: Rollout, name: str) -> Rollout:
    segments = tuple(replace(each, rollout_id=name) for each in one.trajectory.segments)
    return replace(one, id=name, trajectory=replace(one.trajectory, segments=segments))


@pytest.mark.parametrize("reducer", REDUCERS)
def test_prime_rls_loss_of_verifiers_traces_has_our_gradient(
    reducer: str, played: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through prime-rl's own reading of traces, of those that are trained."""
    trace = pytest.importorskip("verifiers.v1.trace")
    prime, loss = prime_types(), prime_loss()
    names = ("iter_trainable_branches", "_loss_weights", "trace_to_samples")
    space = {"TrainingSample": prime.TrainingSample, "_encode_routed_experts": lambda experts, count: None}
    space |= {"get_logger": lambda: logging.getLogger("prime"), "vf": SimpleNamespace(Trace=Any)}
    file = "src/prime_rl/orchestrator/trajectories.py"
    to_their_samples = taken("INSITU_PRIME_SRC", file, names, **space)["trace_to_samples"]
    rows = rows_of(played, PlanConfig(reducer=reducer))
    live = live_logprobs(rows)
    ids = {(row.rollout_id, tuple(row.ids)): row.segment for group in rows for row in group.rows}
    order, samples = [], []
    for record in to_verifiers(rows).payload:
        if record["info"]["insitu"]["used"]:
            continue
        made = trace.WireTrace.model_validate(record)
        for branch in made.branches:
            for name in ("multi_modal_data", "routed_experts", "reference_logprobs"):
                if not hasattr(type(branch), name):  # verifiers 0.4 no longer has all of them
                    monkeypatch.setattr(type(branch), name, None, raising=False)
        for one in to_their_samples(made):
            key = next(k for k in ids if k[0] == made.id and tuple(one.token_ids[: len(k[1])]) == k[1])
            end = len(key[1])
            order.append(live[made.id, ids.pop(key)])
            samples.append((one.mask[:end], one.logprobs[:end], one.advantages[:end], one.rl_weights[:end]))
    assert not ids
    check_equal(gradients(loss(order, samples), live), own_gradients(rows, live))


def expected(rows: Sequence[GroupRows]) -> dict[str, float]:
    """insitu's advantage of each rollout that a trainer with its own gets."""
    return {item.rollout.id: item.advantage or 0.0 for group in rows for item in group.scored}


def padded(values: Sequence[Sequence[float]]) -> Any:
    import torch

    longest = max(map(len, values))
    return torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in values], dtype=torch.float64)


def check_advantages(found: Any, masks: Any, names: Sequence[str], rows: Sequence[GroupRows]) -> None:
    """Compare the advantages of tokens [rows, tokens] with insitu's."""
    ours = expected(rows)
    assert set(names) == set(ours)
    assert len(names) > len(ours), "some rollouts have several rows"
    assert any(not mask.any() for mask in masks), "one is only part of the baseline"
    for values, mask, name in zip(found, masks, names, strict=True):
        assert np.allclose(values[mask.bool()], ours[name], atol=1e-6), name
        assert not values[~mask.bool()].any()


class Batch:
    """What verl's functions use of its DataProto."""

    def __init__(self, batch: dict[str, Any], uid: Any) -> None:
        self.batch, self.non_tensor_batch = batch, {"uid": uid}

    def __len__(self) -> int:
        return len(self.non_tensor_batch["uid"])

    def select_idxs(self, at: list[int]) -> Batch:
        return Batch({name: each[at] for name, each in self.batch.items()}, self.non_tensor_batch["uid"][at])


def test_verls_advantages_are_ours() -> None:
    from collections import defaultdict

    import torch

    core = taken(
        "INSITU_VERL_SRC", "verl/trainer/ppo/core_algos.py", {"compute_grpo_outcome_advantage"},
        torch=torch, np=np, defaultdict=defaultdict, Optional=Any, AlgoConfig=Any,
    )  # fmt: skip
    kinds = SimpleNamespace(GAE="gae", GRPO="grpo")
    algorithms = SimpleNamespace(**core, AdvantageEstimator=kinds)
    one = taken(
        "INSITU_VERL_SRC", "verl/trainer/ppo/ray_trainer.py", {"compute_advantage"},
        core_algos=algorithms, AdvantageEstimator=kinds,
    )["compute_advantage"]  # fmt: skip
    several = taken(
        "INSITU_VERL_SRC", "verl/trainer/ppo/v1/utils.py", {"compute_advantage_for_multi_trajectories"},
        core_algos=algorithms, compute_advantage=one, torch=torch,
    )["compute_advantage_for_multi_trajectories"]  # fmt: skip
    rows = rows_of(groups(), PLAN)
    items = [item for group in rows for item in group.scored]
    outputs = [
        (item, at, out)
        for item, made in zip(items, to_verl(rows).payload, strict=True)
        for at, out in enumerate(made)
    ]
    mask = padded([out["response_mask"] for *_, out in outputs])
    score = torch.zeros_like(mask)
    for number, (*_, out) in enumerate(outputs):
        score[number, len(out["response_ids"]) - 1] = out["reward_score"]
    keys = [f"{item.group_id}_{item.rollout.id}_{at}" for item, at, _ in outputs]
    data = Batch(
        {"response_mask": mask, "token_level_rewards": score},
        np.array([item.group_id for item, *_ in outputs]),
    )
    made = several(data, keys, "grpo", norm_adv_by_std_in_grpo=False)
    check_advantages(made.batch["advantages"], mask, [item.rollout.id for item, *_ in outputs], rows)


def test_skyrls_advantages_are_ours() -> None:
    from collections import defaultdict

    import torch

    core = taken(
        "INSITU_SKYRL_SRC", "skyrl/backends/skyrl_train/utils/ppo_utils.py",
        {"compute_grpo_outcome_advantage"}, torch=torch, np=np, defaultdict=defaultdict,
    )["compute_grpo_outcome_advantage"]  # fmt: skip

    def estimate(index: Any, grpo_norm_by_std: bool, **given: Any) -> Any:
        return core(
            given["token_level_rewards"], given["response_mask"], index, grpo_norm_by_std=grpo_norm_by_std
        )

    method = taken(
        "INSITU_SKYRL_SRC", "skyrl/train/trainer.py", {"compute_advantages_and_returns"},
        torch=torch, np=np, logger=logging.getLogger("skyrl"),
        ppo_utils=SimpleNamespace(compute_advantages_and_returns=estimate),
    )["compute_advantages_and_returns"]  # fmt: skip
    rows = rows_of(groups(), PLAN)
    out = to_skyrl(rows).payload
    mask = padded(out["loss_masks"])
    score = torch.zeros_like(mask)
    for number, (ids, reward) in enumerate(zip(out["response_ids"], out["rewards"], strict=True)):
        score[number, len(ids) - 1] = reward
    algorithm = SimpleNamespace(advantage_estimator="grpo", gamma=1.0, lambd=1.0, grpo_norm_by_std=False)
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(
            generator=SimpleNamespace(step_wise_trajectories=True),
            trainer=SimpleNamespace(algorithm=algorithm),
        ),
        all_metrics={},
    )
    data = _Input(rewards=score, response_mask=mask, loss_mask=mask, values=None)
    data.metadata = {
        "is_last_step": out["is_last_step"], "avg_response_length": 1.0,
        "uids": [one["instance_id"] for one in out["trajectory_ids"]],
    }  # fmt: skip
    made = method(trainer, data)
    names = [item.rollout.id for group in rows for item in group.scored for _ in item.given]
    check_advantages(made["advantages"], mask, names, rows)


class _Input(dict[str, Any]):
    """What SkyRL's trainer uses of its TrainingInputBatch."""

    metadata: dict[str, Any]

    def to(self, device: str) -> _Input:
        return self


def test_trls_advantages_of_openenv_traces_are_ours(
    played: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's worker divides by the group's standard deviation, as `train.advantage = "grpo"` does."""
    worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    monkeypatch.setattr(worker, "logger", logging.getLogger("trl"))
    cut = [
        replace(group, rollouts=(replace(group.rollouts[0], status=Status.TRUNCATED), *group.rollouts[1:]))
        for group in played
    ]
    rows = rows_of(cut, PlanConfig(advantage="grpo", truncated="mask"))
    payload = to_openenv(rows).payload
    loop = SimpleNamespace(
        reward_funcs=[], reward_func_names=["reward"], _env_reward_types=[], _provides_rollout_reward=True
    )
    kind = next(each for each in vars(worker).values() if hasattr(each, "_score_group"))
    for group in rows:
        members = [one for one in payload if one["group_id"] == group.id]
        count = len(members)
        row = SimpleNamespace(input_ids=[1, 2], completion_mask=[0, 1], old_log_probs=[0.0, -1.0])
        given = worker.RolloutGroup(
            prompts=[[]] * count, reward_kwargs={}, completions=[[]] * count, completions_ids=[[]] * count,
            completions_sequences=[[row]] * count, tool_call_counts=[0] * count,
            tool_failure_counts=[0] * count, model_version=0, group_id=0, env_rewards=[None] * count,
            rollout_rewards=[one["env_reward"] for one in members],
        )  # fmt: skip
        made = asyncio.run(kind._score_group(loop, given))
        ours = [item.advantage for item in group.scored]
        assert [one.advantage for one in made] == pytest.approx(ours, abs=1e-6)
        assert [bool(one["trace"]["turns"]) for one in members] == [False, True, True]


def test_slimes_advantages_are_ours() -> None:
    """`rewards`, which slime's conversion calls (test_slime.py), on the Samples of all rollouts."""
    rows = rows_of(groups(), PLAN)
    payload = to_samples(rows).payload
    samples = [SimpleNamespace(**{**row, "status": SimpleNamespace(value=row["status"])}) for row in payload]
    _, found = rewards(SimpleNamespace(advantage_estimator="grpo"), samples)
    ours = expected(rows)
    names = [row["metadata"]["insitu_rollout"] for row in payload]
    assert set(ours) <= set(names)
    for name, value in zip(names, found, strict=True):
        assert value == pytest.approx(ours.get(name, 0.0)), name


def test_tinkers_cookbook_makes_the_same_datums() -> None:
    """The cookbook's own conversion of the same calls with our advantages, which are its own."""
    tinker = pytest.importorskip("tinker")
    import torch

    folder = "tinker_cookbook"
    shift = taken(
        "INSITU_COOKBOOK_SRC", f"{folder}/supervised/common.py",
        {"create_rightshifted_model_input_and_leftshifted_targets"}, tinker=tinker,
    )  # fmt: skip
    names = {
        "_is_prefix",
        "_flat_ob_token_len",
        "_flat_ob_to_model_input",
        "_flatten_chunks",
        "trajectory_to_data",
    }
    space = {
        "tinker": tinker,
        "torch": torch,
        "TensorData": tinker.TensorData,
        "FlatObElem": Any,
        "FlatOb": Any,
    }
    space |= {"PARSE_ERROR_MASKED_METRIC_KEY": "masked", "ProvenanceSpan": Any, **shift}
    found = taken("INSITU_COOKBOOK_SRC", f"{folder}/rl/data_processing.py", names, **space)
    centred = taken(
        "INSITU_COOKBOOK_SRC", f"{folder}/rl/data_processing.py", {"compute_advantages"}, torch=torch
    )["compute_advantages"]
    rows = rows_of(groups(), PLAN)
    trained = [row for group in rows for row in group.rows]
    payload = to_tinker(rows).payload
    for row, datum, plain in zip(trained, datums(payload), payload, strict=True):
        first, end = int(row.mask.argmax()), len(row.ids)
        action = SimpleNamespace(
            tokens=row.ids[first:].tolist(), logprobs=row.logprobs[first:].tolist(), sequence_id=None
        )
        step = SimpleNamespace(
            ob=tinker.ModelInput.from_ints(row.ids[:first].tolist()), ac=action, metrics={}
        )
        trajectory = SimpleNamespace(transitions=[step])
        [theirs] = found["trajectory_to_data"](
            trajectory, row.advantage * row.weight, include_provenance=False
        )
        assert row.mask[first:end].all()
        assert datum.model_input.to_ints() == theirs.model_input.to_ints()
        assert set(datum.loss_fn_inputs) == set(theirs.loss_fn_inputs) - {"mask"}, "its loop removes the mask"
        for name, values in datum.loss_fn_inputs.items():
            assert np.array_equal(np.float32(values.data), np.float32(theirs.loss_fn_inputs[name].data)), name
        assert plain["mask"].tolist() == theirs.loss_fn_inputs["mask"].data
    for group in rows:
        given = [item.rollout.reward for item in group.scored]
        [theirs] = centred([SimpleNamespace(get_total_rewards=lambda given=given: given)])
        assert theirs.tolist() == pytest.approx([item.advantage for item in group.scored])


def test_the_groups_have_what_shifts_other_trainers() -> None:
    plan = plan_step(groups(), PLAN)
    reasons = set(plan.exclusion_reasons.values())
    assert reasons >= {"", "infra", "overlong", "truncated", "zero_advantage", "degenerate"}
