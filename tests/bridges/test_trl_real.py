"""The bridge to TRL with the real package (scripts/test-bridges)."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import multiprocessing
import os
import queue
import statistics
import time
import types
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_lab import rollout, segment
from run_lab import Flavour, make_rollout
from transformers import AutoModelForCausalLM
from trl_cpu import async_args, async_trainer, stand_in_for_cuda, toy_config

from insitu.concurrency import run_all
from insitu.config import WARM_START, dump_toml
from insitu.config.training import LossConfig
from insitu.storage.run_dir import read_store
from insitu.types import Group, Rollout
from insitu_bridges import SourceProcess, task_ids, trl
from insitu_bridges.rows import rows_of
from insitu_bridges.thread import SourceThread
from insitu_train.embedded.model import load_model
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.trainer.trainer import Trainer

# The packages warn about one another.
pytestmark = [pytest.mark.bridge, pytest.mark.filterwarnings("default")]


def test_trl_has_the_extension_points_of_the_bridge() -> None:
    import trl
    from trl.experimental.async_grpo import AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    assert trl.__version__.startswith("1.16.")
    assert {"rollout_worker", "weight_transfer"} <= set(inspect.signature(AsyncGRPOTrainer).parameters)
    assert "rollout_func" in inspect.signature(trl.GRPOTrainer).parameters
    assert [field.name for field in dataclasses.fields(RolloutSample)] == [
        "prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage",
        "model_version", "group_id", "metrics", "enqueued_at",
    ]  # fmt: skip


def heldout(source: SourceThread, tasks: list[str], first_key: int) -> float:
    """Mean reward of one attempt at each task with the weights in the engine."""

    async def run(child: SourceProcess) -> list[Rollout]:
        runs = (child.run(task, first_key + at, evaluation=True) for at, task in enumerate(tasks))
        return await run_all(*runs)

    rewards = [rollout.reward for rollout in source.call(run)]
    assert None not in rewards
    return sum(reward or 0.0 for reward in rewards) / len(rewards)


def test_async_grpo_learns_the_toy_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AsyncGRPOTrainer, its loss and its optimizer; agents in sandboxes; two stand-ins for CUDA functions."""
    stand_in_for_cuda(monkeypatch)
    # Groups with equal rewards are handed over too, so that the logged mean is that of all rollouts.
    config = toy_config(tmp_path / "run", collect={"groups_per_step": 6, "replace_degenerate": 0.0})
    tasks = task_ids(config, 64, split="eval")
    steps = 34
    args = async_args(tmp_path / "trl", max_steps=steps, learning_rate=5e-4, per_device_train_batch_size=48)
    worker = trl.RolloutWorker(config, args)
    began = time.monotonic()
    try:
        before = heldout(worker.source, tasks, 0)
        trainer = async_trainer(args, worker, trl.Transfer(worker))
        stop = worker.stop
        monkeypatch.setattr(worker, "stop", lambda: None)  # its engine is asked once more
        trainer.train()
        after = heldout(worker.source, tasks, 1000)
        monkeypatch.setattr(worker, "stop", stop)
        with read_store(tmp_path / "run") as store:
            rewards = [step.metrics["reward_mean"] for step in store.steps()]
    finally:
        worker.stop()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    write_result(
        "async_grpo",
        {
            "steps": steps,
            "rollouts": len(rewards) * 48,
            "train_before": round(statistics.fmean(rewards[:4]), 3),
            "train_after": round(statistics.fmean(rewards[-8:]), 3),
            "heldout_before": round(before, 3),
            "heldout_after": round(after, 3),
            "heldout_tasks": len(tasks),
            "kl_first": logged[0]["kl"],
            "staleness_max": max(line["sample/staleness_max"] for line in logged),
            "seconds": round(time.monotonic() - began),
        },
    )
    assert logged[0]["kl"] < 1e-6  # the engine's log-probabilities are those of the trainer's model
    assert before <= 0.35
    assert statistics.fmean(rewards[:4]) <= 0.35
    assert statistics.fmean(rewards[-8:]) >= 0.9
    assert after >= 0.9
    with read_store(tmp_path / "run") as store:
        assert store.ledger().balanced


def test_grpo_trains_with_rollout_func(tmp_path: Path) -> None:
    """Three steps of GRPOTrainer; each call samples with the weights of its step."""
    import trl as package
    from datasets import Dataset

    config = toy_config(tmp_path / "run", harness={"agent": "script", "workers": 4, "mode": "warm"})
    rollouts = trl.rollout_func(config)
    seen: list[dict[str, list[Any]]] = []

    def recorded(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        seen.append(rollouts(prompts, trainer))
        return seen[-1]

    args = package.GRPOConfig(
        output_dir=str(tmp_path / "trl"), max_steps=3, per_device_train_batch_size=8, num_generations=8,
        learning_rate=1e-3, temperature=1.0, report_to="none", use_cpu=True, bf16=False, logging_steps=1,
        save_strategy="no", beta=0.0,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": task_ids(config, 8)})
    began = time.monotonic()
    try:
        trainer = package.GRPOTrainer(
            model=str(WARM_START),
            reward_funcs=trl.reward,
            args=args,
            train_dataset=prompts,
            rollout_func=recorded,
        )
        start = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        seconds = time.monotonic() - began
        moved = sum(not weight.equal(start[name]) for name, weight in trainer.model.named_parameters())
    finally:
        rollouts.close()
    with read_store(tmp_path / "run") as store:
        stored = [store.rollout(name) for out in seen for name in out["rollout_id"]]
        assert store.ledger().trained > 0
    versions = [int(r.tokens().versions.max()) for r in stored]
    assert versions == [0] * 8 + [1] * 8 + [2] * 8
    assert [reward for out in seen for reward in out["env_reward"]] == [r.reward for r in stored]
    write_result(
        "rollout_func", {"steps": 3, "rollouts": 24, "seconds": round(seconds, 1), "tensors_changed": moved}
    )
    assert moved > 0


def test_the_page_shows_code_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/bridges.md about GRPO, with a model of this machine on its CPU."""
    import trl as package

    page = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    block = next(code for code in blocks if "trl.rollout_func(" in code)
    block = block.replace('model="model"', f"model={str(WARM_START)!r}")
    monkeypatch.chdir(tmp_path)
    Path("insitu.toml").write_text(dump_toml(toy_config(tmp_path / "run")))
    on_cpu = functools.partial(package.GRPOConfig, use_cpu=True, bf16=False, report_to="none")
    monkeypatch.setattr(package, "GRPOConfig", on_cpu)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/bridges.md", "exec"), names)
    assert names["trainer"].state.global_step == 3


def synthetic_groups() -> list[Group]:
    """Rollouts of one or two rows with tool gaps, whose stored log-probabilities are off by up to 0.5."""
    model = AutoModelForCausalLM.from_pretrained(WARM_START, dtype=torch.float32)
    rng = np.random.default_rng(0)
    size = model.config.vocab_size
    made = []
    for number in range(3):
        base = rng.integers(5, size, 6)
        rollouts = []
        for slot in range(4):
            name = f"train/1/{number}/{slot}"
            rows = []
            for index in range(1 + slot % 2):
                ids = np.concatenate([base, rng.integers(5, size, 20)]).astype(np.int32)
                mask = np.zeros(26, np.bool_)
                mask[8:15] = mask[19:26] = True
                with torch.no_grad():
                    logits = model(torch.from_numpy(ids).long()[None]).logits[0, :-1]
                known = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(ids[1:, None]).long())[:, 0]
                off = known.numpy() + rng.uniform(-0.5, 0.5, 25)
                logprobs = np.where(mask, np.append(0.0, np.minimum(off, 0.0)), 0.0).astype(np.float32)
                plain = segment(name, index)
                rows.append(
                    replace(plain, ids=ids, mask=mask, logprobs=logprobs, versions=np.zeros(26, np.int32))
                )
            one = rollout(name, float(rng.normal()), len(rows))
            trained = 14 * len(rows)
            ledger = replace(one.trajectory.ledger, captured=trained, trained=trained)
            path = replace(one.trajectory, segments=tuple(rows), ledger=ledger)
            rollouts.append(replace(one, trajectory=path))
        made.append(Group(id=f"train/1/{number}", task_id="t", rollouts=tuple(rollouts)))
    return made


def test_gradients_are_those_of_insitu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's compute_loss on the bridge's rows, insitu's trainer on its own plan of the same rollouts."""
    stand_in_for_cuda(monkeypatch)
    mine = load_model(WARM_START)
    found = synthetic_groups()
    plan_config = PlanConfig(reducer="rollout")
    plan = plan_step(found, plan_config)
    config = TrainConfig(loss=LossConfig(loss="ppo_clip", clip=(0.2, 0.2)), max_logprob_gap=100.0)
    Trainer(mine, config).gradients(plan)
    scale = sum(row.weight * int(row.mask.sum()) for row in plan.rows)
    ours = {name: p.grad / scale for name, p in mine.named_parameters() if p.grad is not None}

    samples = trl.to_samples(rows_of(found, plan_config)).payload
    args = async_args(tmp_path / "trl", max_steps=1, per_device_train_batch_size=len(samples))
    worker = types.SimpleNamespace(
        rollout_buffer=queue.Queue(), metrics_queue=queue.Queue(), check_health=print
    )
    trainer = async_trainer(args, worker, types.SimpleNamespace())
    for sample in samples * 2:  # the data loader reads one micro-batch ahead
        worker.rollout_buffer.put(sample)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, batch).backward()
    theirs = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert theirs.keys() == ours.keys()
    apart = sum(float(((theirs[name] - ours[name]) ** 2).sum()) for name in ours) ** 0.5
    relative = apart / sum(float((ours[name] ** 2).sum()) for name in ours) ** 0.5
    write_result("gradients", {"rows": len(samples), "tensors": len(ours), "relative_difference": relative})
    assert relative <= 1e-5


def write_result(name: str, result: dict[str, Any]) -> None:
    """Add figures to the file that INSITU_BRIDGE_RESULTS names, for benchmarks/results."""
    print(name, result)
    if path := os.environ.get("INSITU_BRIDGE_RESULTS"):
        text = Path(path).read_text(encoding="utf-8")
        Path(path).write_text(json.dumps({**json.loads(text or "{}"), name: result}) + "\n", encoding="utf-8")


class Ready:
    """A source whose one rollout is finished."""

    def __init__(self, one: Rollout) -> None:
        self._one = one

    def submit(self, make: Any) -> Future[Rollout]:
        done: Future[Rollout] = Future()
        done.set_result(self._one)
        return done


def test_the_harness_worker_makes_a_row_of_each_segment(tmp_path: Path) -> None:
    """TRL's own session loop, without its vLLM client, on a rollout with a branch and a sub-agent."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import openenv_harness

    config = toy_config(tmp_path / "run")
    several = make_rollout(Flavour(), "train", 1, 0, 0, solved=True)
    ungraded = replace(several, reward=None)
    tokenizer = AutoTokenizer.from_pretrained(WARM_START)
    tokenizer.response_schema = {"type": "object"}
    for one in (several, ungraded):

        def factory(sampling: Any = None, one: Rollout = one) -> trl.SessionFactory:
            made = trl.SessionFactory(config, sampling=sampling)
            made.__dict__["source"] = Ready(one)
            return made

        loop = openenv_harness._HarnessRolloutLoop(
            harness_session_factory=factory, model_name=str(WARM_START),
            dataset=Dataset.from_dict({"prompt": ["unused"]}), reward_funcs=[], eos_token_ids=[2],
            metrics_queue=queue.Queue(), processing_class=tokenizer, rollout_buffer=queue.Queue(),
            model_version_value=multiprocessing.Value("i", 0),
            heartbeat_value=multiprocessing.Value("d", 0.0),
            failed_event=multiprocessing.Event(), exception_info_queue=multiprocessing.Queue(),
            num_generations=2, max_inflight_tasks=2,
        )  # fmt: skip
        loop._stop_event = asyncio.Event()
        result, metrics = loop._run_session([{"role": "user", "content": "toy-1"}], 7)
        loop._loop.close()
        rows, reward = result[2], result[-1]
        assert reward == one.reward
        assert metrics["tally"]
        for row, expected in zip(rows, one.trajectory.segments, strict=True):
            end = len(expected.mask) - int(expected.mask[::-1].argmax())
            assert list(row.input_ids) == expected.ids[:end].tolist()
            assert [bool(each) for each in row.completion_mask] == expected.mask[:end].tolist()
