"""A training service, by a stand-in for its SDK: the sums of losses, the step, the learner's process."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import collect
from train_lab import sampled_groups, small_model

from insitu.config import load_config
from insitu.engines.replicas import EngineSet
from insitu.errors import ConfigError, EngineError, TrainError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu.types.codec import VALUES
from insitu_train.embedded.model import save_model
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.learner.supervisor import LearnerSupervisor
from insitu_train.options import LossConfig, OptimConfig, PolicyConfig, ServiceOptions, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.scores import read_row
from insitu_train.service.main import Published, SamplingCommands, probe_ids
from insitu_train.service.reduction import Reduction, find_reduction
from insitu_train.service.session import Service, TrainingRun
from insitu_train.service.trainer import HalfDoneError, ServiceTrainer
from insitu_train.trainer.trainer import Trainer
from insitu_train.weights.files import OwnPublisher

SDK = Path(__file__).parents[1] / "fakes" / "tinker_sdk"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service's own folder, with the SDK on the path of this process and of its children."""
    monkeypatch.setenv("FAKE_TINKER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(SDK))
    monkeypatch.syspath_prepend(str(SDK))
    save_model(small_model(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def sdk(folder: Path) -> ModuleType:
    found = importlib.util.find_spec("tinker")
    assert found is not None
    assert found.origin == str(SDK / "tinker.py"), "another SDK is installed"
    return importlib.import_module("tinker")


def options(folder: Path, **more: object) -> ServiceOptions:
    named = {"url": "", "model": str(folder / "model"), "key_env": "", "max_context_tokens": 128}
    return ServiceOptions(**{**named, "rank": 8, "seed": 0, "timeout_s": 20.0, **more})  # type: ignore[arg-type]


def training(folder: Path) -> TrainingRun:
    return Service(options(folder)).train()


def plan_of(loss: LossConfig) -> StepPlan:
    return plan_step(sampled_groups(small_model()), PlanConfig(pull=loss.has_kl_term, token_budget=128))


@pytest.mark.parametrize("loads", ["at any time", "first"])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [("sum", Reduction(length=False, rows=False)), ("skyrl", Reduction(length=True, rows=True))],
)
def test_the_rule_of_a_service_is_measured(
    folder: Path, sdk: ModuleType, rule: str, expected: Reduction, loads: str
) -> None:
    (folder / "rule").write_text(rule)
    if loads == "first":
        (folder / "load-first").touch()
    run = training(folder)
    before = run.logprobs([probe_ids()])[0]
    assert find_reduction(run, probe_ids()) == expected
    assert np.array_equal(run.logprobs([probe_ids()])[0], before), "the probe leaves the weights changed"


def test_an_unknown_rule_is_refused(folder: Path, sdk: ModuleType) -> None:
    (folder / "rule").write_text("root")
    with pytest.raises(EngineError, match=r"depends on the length of a row in an unknown way \(factor 0\.57"):
        find_reduction(training(folder), probe_ids())


LOSSES = [
    LossConfig(),
    LossConfig(loss="ppo_clip"),
    LossConfig(loss="cispo", ratio="trainer", correction="tis"),
    LossConfig(loss="gspo", ratio="trainer"),
    LossConfig(loss="decoupled", correction="mask", correction_level="rollout"),
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sum", "skyrl"])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.loss)
def test_a_step_at_the_service_is_a_local_step(
    folder: Path, sdk: ModuleType, loss: LossConfig, epochs: int, rule: str
) -> None:
    (folder / "rule").write_text(rule)
    config = TrainConfig(
        optim=OptimConfig(lr=1e-3, warmup_steps=0), loss=loss, epochs=epochs, max_logprob_gap=1e-3, threads=1
    )
    plan = plan_of(loss)
    local = Trainer(small_model(), config)
    expected = local.step(plan)
    run = training(folder)
    served = ServiceTrainer(run, config, find_reduction(run, probe_ids()))
    found = served.step(plan)
    for name, tensor in run._client.model.named_parameters():
        other = dict(local.model.named_parameters())[name]
        assert torch.allclose(tensor, other, atol=2e-5), name
    counts = ("version", "optimizer_steps", "tokens", "rows", "mismatched")
    assert [getattr(found, name) for name in counts] == [getattr(expected, name) for name in counts]
    for name in ("loss", "max_logprob_gap", "mismatch_kl", "clip_fraction"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-5), name
    assert found.grad_norm is None
    assert served.version == 1


def test_tokens_that_sampler_and_trainer_disagree_on_change_nothing(folder: Path, sdk: ModuleType) -> None:
    config = TrainConfig(max_logprob_gap=1e-3)
    groups = sampled_groups(small_model(seed=1))
    run = training(folder)
    before = run.logprobs([probe_ids()])[0]
    served = ServiceTrainer(run, config, Reduction(length=False, rows=False))
    with pytest.raises(TrainError, match="trainer and sampler differ by .* no update"):
        served.step(plan_step(groups, PlanConfig()))
    assert served.version == 0
    assert np.array_equal(run.logprobs([probe_ids()])[0], before)
    assert all(p.grad is None for p in run._client.model.parameters())


@pytest.mark.parametrize("call", ["forward_backward", "optim_step"])
def test_a_failure_after_the_gradient_began_is_named(folder: Path, sdk: ModuleType, call: str) -> None:
    run = training(folder)
    served = ServiceTrainer(run, TrainConfig(max_logprob_gap=1e-3), Reduction(length=False, rows=False))
    (folder / f"fail-{call}").touch()
    with pytest.raises(HalfDoneError, match=f"training service: {call}: .*503"):
        served.step(plan_of(LossConfig()))


def test_a_full_service_is_waited_for(folder: Path, sdk: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def refuse(**_: object) -> None:
        raise ValueError("Error code: 400 - {'detail': 'Maximum number of LoRA adapters (2) reached'}")

    service = Service(options(folder, timeout_s=1000.0))
    right = service._service.create_lora_training_client
    monkeypatch.setattr(service._service, "create_lora_training_client", refuse)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            monkeypatch.setattr(service._service, "create_lora_training_client", right)

    assert service.train(sleep).id
    assert len(slept) == 3
    with pytest.raises(EngineError, match="train .*model with LoRA rank 8: .*overloaded"):
        (folder / "fail-create").touch()
        service.train(sleep)


def test_a_service_that_does_not_answer_is_one_line(folder: Path, sdk: ModuleType) -> None:
    with pytest.raises(
        EngineError, match=r"training service: connect to http://x:1 with SDK 0\.9\.0-fake: con"
    ):
        Service(options(folder, url="http://x:1"))


def test_a_missing_sdk_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr("insitu_train.service.session.import_module", missing)
    with pytest.raises(ConfigError, match=r"tinker is not installed: .*\[tinker\]"):
        Service(options(folder))


# --------------------------------------------------------------------------- the process


def spec_of(folder: Path, **more: object) -> LearnerSpec:
    train = TrainConfig(
        optim=OptimConfig(lr=1e-3, warmup_steps=0), policy=PolicyConfig(kind="tinker"), max_logprob_gap=1e-3
    )
    return LearnerSpec(
        model=folder / "model", train=train, service=options(folder, **more), start_deadline_s=200.0
    )


def test_the_key_of_the_timeout_is_that_of_a_generation() -> None:
    overrides = ["engine.kind=tinker", "engine.model=m", "engine.call_timeout_s=7"]
    config = load_config(None, overrides)
    assert LearnerSpec.of(config, model=Path("m")).call_deadline_s == 7.0


async def one(learner: Learner | EngineSet, name: str = "a") -> tuple[list[int], int]:
    engine = learner.engine if isinstance(learner, Learner) else learner
    out = await engine.generate(
        np.arange(1, 12, dtype=np.int32),
        SamplingParams(max_tokens=8),
        RequestKey(seed=3, rollout_id=name, turn=0),
    )
    assert out.logprobs is not None
    return out.ids.tolist(), out.version_runs[0][1]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_process_samples_trains_publishes_saves_and_resumes(folder: Path) -> None:
    async with Learner.start(spec_of(folder)) as learner:
        assert learner.probe_gap < 1e-4
        engine = learner.engine
        assert (engine.info.name, engine.info.max_context_tokens) == ("tinker", 128)
        start = engine.receipt
        assert (start.version, start.checksum) == (0, learner.weights)
        first = await one(learner)
        assert first == await one(learner)
        plan = plan_step(await collect(engine, 1), PlanConfig())
        result = await learner.step(plan, folder / "scores" / "step-00001.bin")
        assert (result.version, result.skipped) == (1, "")
        assert result.max_logprob_gap < 1e-4
        assert (await one(learner))[1] == 0, "nothing is published before publish"
        row = plan.rows[0]
        scores = read_row(folder / "scores", 1, plan.digest, row.rollout_id, row.segment)
        assert np.abs(scores.gap).max() == pytest.approx(result.max_logprob_gap, abs=1e-4)
        assert np.isnan(scores.entropy).all()
        held = await learner.publish(1)
        assert (held.version, held.checksum) == (1, learner.weights)
        assert (await one(learner))[1] == 1
        await learner.save(folder / "step-1")
        after = await learner.step(plan_step(await collect(engine, 2), PlanConfig()))
        assert after.max_logprob_gap < 1e-4
        await learner.publish(2)
        sampled = await one(learner, "b")
    async with Learner.start(spec_of(folder)) as learner:
        await learner.load(folder / "step-1")
        assert learner.version == 1
        await learner.publish(1)
        again = await learner.step(plan_step(await collect(learner.engine, 2), PlanConfig()))
        await learner.publish(2)
        assert again.loss == after.loss
        assert await one(learner, "b") == sampled


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["optim_step", "kill"])
async def test_a_lost_step_is_repeated_from_the_last_checkpoint(folder: Path, fault: str) -> None:
    committed: list[Path] = []

    async def steps(learner: Learner, hurt: bool) -> list[tuple[list[int], int]]:
        committed.clear()
        engine = EngineSet({"learner": learner.engine}, max_wait_s=60.0, restarts=2)
        supervisor = LearnerSupervisor(
            learner,
            OwnPublisher(learner, engine),
            lambda: (committed[-1] if committed else None, []),
            restarts=2,
        )
        engine.check = supervisor.check
        async with engine:
            return await some(learner, engine, supervisor, hurt)

    async def some(
        learner: Learner, engine: EngineSet, supervisor: LearnerSupervisor, hurt: bool
    ) -> list[tuple[list[int], int]]:
        await supervisor.begin()
        made = []
        for step in (1, 2, 3):
            plan = plan_step(await collect(engine, step), PlanConfig())
            if hurt and step == 2 and fault == "optim_step":
                (folder / "fail-optim_step").touch()
            if hurt and step == 2 and fault == "kill":
                os.kill(learner.pid, signal.SIGKILL)
            await supervisor.publish(await supervisor.train(plan))
            await supervisor.save(folder / f"{hurt}-{step}")
            committed.append(folder / f"{hurt}-{step}")
            made.append(await one(engine, f"s{step}"))
        assert supervisor.restarts == int(hurt)
        return made

    async with Learner.start(spec_of(folder)) as learner:
        expected = await steps(learner, hurt=False)
    async with Learner.start(spec_of(folder)) as learner:
        assert await steps(learner, hurt=True) == expected


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_learner_that_only_samples_trains_nothing(folder: Path) -> None:
    async with Learner.start(spec_of(folder, rank=0)) as learner:
        assert (await one(learner))[1] == 0
        with pytest.raises(TrainError, match="only samples"):
            await learner.step(plan_of(LossConfig()))
        (folder / "fail-sample").touch()
        with pytest.raises(EngineError, match="training service: sample: .*503"):
            await one(learner)
        results = await asyncio.gather(*(one(learner, f"r{i}") for i in range(5)))
        assert len({tuple(ids) for ids, _ in results}) > 1


# --------------------------------------------------------------------------- replies of the service


class Request:
    """One sampling request without a socket; `answer` is what it was answered with."""

    open = True
    on_cancel = None

    def __init__(self) -> None:
        key = RequestKey(seed=0, rollout_id="a", turn=0)
        self.arrays = VALUES.pack((np.arange(4, dtype=np.int32), SamplingParams(max_tokens=4), key))
        self.answer: object = None

    def reply(self, meta: object = None, arrays: Any = None) -> None:
        self.answer = VALUES.unpack(Generation, arrays) if arrays else meta or "done"

    def fail(self, error: object) -> None:
        self.answer = error


class Later:
    """A sampler whose requests end when a test says so."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def sample(self, ids: IntArray, params: SamplingParams, seed: int) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


def sampling(sampler: Later) -> SamplingCommands:
    return SamplingCommands(Published(version=3, weights="w", sampler=sampler), 64)  # type: ignore[arg-type]


def sequence(**changed: object) -> SimpleNamespace:
    known = {"tokens": [5, 6], "logprobs": [-1.0, -2.0], "stop_reason": "length"}
    return SimpleNamespace(**{**known, **changed})


@pytest.mark.parametrize(
    ("sequences", "line"),
    [
        ([], "0 sequences where one was asked for"),
        ([sequence(), sequence()], "2 sequences where one was asked for"),
        ([sequence(logprobs=None)], "no logprobs"),
        ([sequence(logprobs=[-1.0])], "1 logprobs for 2 ids"),
        ([sequence(logprobs=[-1.0, float("nan")])], "logprob 1 is nan"),
        ([sequence(logprobs=[-1.0, None])], "logprob 1 is None"),
        ([sequence(logprobs=[-1.0, 0.5])], "which no sampled token can have"),
        ([sequence(tokens=[])], "0 tokens"),
        ([sequence(stop_reason="refusal")], "finish reason 'refusal'"),
    ],
)
def test_what_a_service_must_not_reply_is_refused(sequences: list[object], line: str) -> None:
    sampler, request = Later(), Request()
    sampling(sampler).handlers["engine.generate"](request)  # type: ignore[arg-type]
    sampler.futures[0].set_result(SimpleNamespace(sequences=sequences))
    assert isinstance(request.answer, EngineError)
    assert str(request.answer).startswith("training service")
    assert line in str(request.answer)


def test_a_pause_waits_for_all_requests_and_holds_later_ones() -> None:
    sampler = Later()
    commands = sampling(sampler)
    handlers = commands.handlers
    running, held, pause = [Request(), Request()], Request(), Request()
    for request in running:
        handlers["engine.generate"](request)  # type: ignore[arg-type]
    handlers["engine.pause"](pause)  # type: ignore[arg-type]
    handlers["engine.generate"](held)  # type: ignore[arg-type]
    # Requests end in threads of the SDK.
    threads = [
        Thread(target=future.set_result, args=(SimpleNamespace(sequences=[sequence()]),))
        for future in sampler.futures
    ]
    assert pause.answer is None
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert pause.answer == "done"
    assert len(sampler.futures) == 2, "held until resumed"
    handlers["engine.resume"](Request())  # type: ignore[arg-type]
    sampler.futures[2].set_result(SimpleNamespace(sequences=[sequence()]))
    assert isinstance(held.answer, Generation)
    assert (held.answer.finish, held.answer.version_runs) == ("length", ((0, 3),))
