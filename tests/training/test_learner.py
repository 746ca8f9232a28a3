"""The learner process end to end: sample, train, publish, save, resume; and every way in which it dies."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from train_lab import VOCAB, group, rollout, segment, small_model

from insitu.capture.segments import version_row
from insitu.config import load_config
from insitu.engines.base import Engine
from insitu.engines.replicas import EngineSet
from insitu.errors import EngineError, RecordError, TrainError
from insitu.storage.store import Store
from insitu.types import Group, RequestKey, SamplingParams
from insitu_train.embedded.model import load_model, save_model
from insitu_train.embedded.weights import checksum
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.learner.serialization import decode_plan, encode_plan
from insitu_train.learner.supervisor import LearnerSupervisor
from insitu_train.loop import REFERENCE, START_MODEL, check_start_model, keep_start_model
from insitu_train.options import OptimConfig, TrainConfig, dump_config, parse_config
from insitu_train.plan.step import PlanConfig, plan_digest, plan_step
from insitu_train.scores import read_row, score_file
from insitu_train.weights.files import ExportRequest, OwnPublisher

pytestmark = pytest.mark.slow


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    save_model(small_model(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def spec_of(model: Path, **more: object) -> LearnerSpec:
    train = TrainConfig(optim=OptimConfig(lr=1e-3))
    return LearnerSpec(model=model, train=train, max_rows=8, max_context=128, **more)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Learner]:
    folder = tmp_path_factory.mktemp("model")
    save_model(small_model(), folder)
    (folder / "tokenizer.json").write_text("{}")
    async with Learner.start(spec_of(folder)) as learner:
        yield learner


async def test_a_learner_that_does_not_answer_writes_where_its_threads_are(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("insitu_train.learner.engine.QUIET_S", 0.2)
    file = tmp_path / "learner.log"
    async with Learner.start(spec_of(model_folder, log=file)) as learner, asyncio.timeout(60):
        await learner.engine.pause()
        request = RequestKey(seed=1, rollout_id="a", turn=0)
        calls = [
            asyncio.ensure_future(
                learner.engine.generate(np.arange(9, dtype=np.int32), SamplingParams(max_tokens=2), request)
            )
            for _ in range(3)
        ]
        for _ in range(1000):
            if "most recent call first" in file.read_text():
                break
            await asyncio.sleep(0.05)
        assert "in serve" in file.read_text()  # between two polls as well as in one
        [line] = [r.getMessage() for r in caplog.records if "stacks" in r.getMessage()]
        assert line.startswith("the learner has not answered engine.generate and was last heard")
        assert line.endswith(f"; the stacks of its threads are in {file}")
        await learner.engine.resume()
        assert all(len(made.ids) <= 2 for made in await asyncio.gather(*calls))


async def collect(engine: Engine, step: int) -> list[Group]:
    """Two groups of real samples; the reward is a coin of the rollout's first token."""
    groups = []
    for g in range(2):
        members = []
        for k in range(4):
            name = f"train/{step}/{g}/{k}"
            prompt = np.arange(1, 20 + g, dtype=np.int32) % VOCAB
            params = SamplingParams(max_tokens=6 + k)
            out = await engine.generate(prompt, params, RequestKey(seed=1, rollout_id=name, turn=0))
            assert out.logprobs is not None
            ids = np.concatenate([prompt, out.ids])
            mask = [False] * len(prompt) + [True] * len(out.ids)
            mu = np.concatenate([np.zeros(len(prompt), np.float32), out.logprobs])
            version = int(version_row(out.version_runs, 1)[0])
            members.append(rollout(name, float(k % 2), [segment(name, 0, ids, mask, mu, version)]))
        groups.append(group(f"train/{step}/{g}", members))
    return groups


@pytest.mark.asyncio(loop_scope="module")
async def test_sample_train_publish_and_resume_with_the_same_bits(learner: Learner, tmp_path: Path) -> None:
    assert learner.probe_gap < 1e-4
    base = learner.engine.receipt.version
    sums = [learner.engine.receipt.checksum]
    for step in range(3):
        plan = plan_step(await collect(learner.engine, step), PlanConfig())
        scores = score_file(tmp_path / "scores", step)
        result = await learner.step(plan, scores)
        assert read_row(scores.parent, step, plan.digest, plan.rows[-1].rollout_id, 0).entropy.all()
        assert (result.version, result.skipped) == (base + step + 1, "")
        assert 0 < result.max_logprob_gap < 1e-4  # the engine's own code against the trainer's
        assert learner.engine.receipt.version == base + step
        assert learner.weights != sums[-1]
        receipt = await learner.publish(result.version)
        assert learner.engine.receipt == receipt
        assert (receipt.version, receipt.checksum) == (base + step + 1, learner.weights)
        sums.append(learner.engine.receipt.checksum)
        if step == 0:
            await learner.save(tmp_path / "one")
            assert not await learner.written()
    assert len(set(sums)) == 4
    async with Learner.start(spec_of(tmp_path / "one")) as other:
        assert other.engine.receipt.checksum == sums[1]  # a checkpoint is a model folder
        await other.load(tmp_path / "one")
        await other.publish(other.version)
        assert (other.engine.receipt.version, other.engine.receipt.checksum) == (base + 1, sums[1])
        for step in (1, 2):
            # without scores
            result = await other.step(plan_step(await collect(other.engine, step), PlanConfig()))
            await other.publish(result.version)
        assert other.engine.receipt.checksum == sums[3]
    assert (tmp_path / "one" / "tokenizer.json").exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_run_knows_the_model_it_began_with(learner: Learner, tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        check_start_model(store, learner)
        keep_start_model(store, learner)
        assert store.meta()[START_MODEL] == learner.weights
        keep_start_model(store, learner)
        store.set_meta(REFERENCE, "of another teacher")
        with pytest.raises(RecordError, match="another reference policy or teacher than the run began with"):
            keep_start_model(store, learner)
        store.set_meta(START_MODEL, "0" * 64)
        for again in (check_start_model, keep_start_model):
            with pytest.raises(RecordError, match=r"is not the start model of the run .* expected 000000"):
                again(store, learner)


@pytest.mark.asyncio(loop_scope="module")
async def test_refusals_cross_the_channel_and_leave_the_learner_alive(
    learner: Learner, tmp_path: Path
) -> None:
    groups = await collect(learner.engine, 0)
    before = learner.engine.receipt
    skipped = await learner.step(plan_step(groups, PlanConfig(min_groups=3)))
    assert skipped.skipped == "2 useful groups of 2; 3 are needed"
    liar = groups[0].rollouts[0]
    (s,) = liar.trajectory.segments
    mu = s.logprobs.copy()
    mu[19] -= 0.01
    lie = segment(liar.id, 0, s.ids, s.mask, mu, before.version)
    bent = rollout(liar.id, liar.reward, [lie])
    groups[0] = group(groups[0].id, [bent, *groups[0].rollouts[1:]])
    with pytest.raises(TrainError, match=r"^rollout train/0/0/0 segment 0 token 19: .* differ by 0\.01 in"):
        await learner.step(plan_step(groups, PlanConfig()))
    with pytest.raises(TrainError, match="load checkpoint"):
        await learner.load(tmp_path / "nothing")
    assert learner.engine.receipt == before
    good = plan_step(await collect(learner.engine, 1), PlanConfig())
    assert (await learner.step(good)).version == before.version + 1
    with pytest.raises(TrainError, match=f"version {before.version} is not the trainer's"):
        await learner.publish(before.version)
    await learner.publish(before.version + 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_in_flight_are_finished_before_the_weights_change(learner: Learner) -> None:
    version = learner.engine.receipt.version
    plan = plan_step(await collect(learner.engine, 0), PlanConfig())
    prompt = np.arange(30, dtype=np.int32)

    async def sample(turn: int) -> int:
        key = RequestKey(seed=0, rollout_id="x", turn=turn)
        out = await learner.engine.generate(prompt, SamplingParams(max_tokens=60), key)
        assert len(out.version_runs) == 1
        return out.version_runs[0][1]

    running = [asyncio.create_task(sample(i)) for i in range(6)]
    await asyncio.sleep(0)
    result = await learner.step(plan)
    assert result.version == version + 1
    assert await sample(8) == version
    await learner.publish(result.version)
    assert await asyncio.gather(*running) == [version] * 6
    assert await sample(9) == version + 1


async def test_a_killed_learner_fails_everything_that_waits_with_one_line(
    model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "learner.log"
    async with Learner.start(spec_of(model_folder, log=log)) as learner:
        await learner.check()
        plan = plan_step(await collect(learner.engine, 0), PlanConfig())
        with log.open("a") as file:
            file.write("last words\n")
        os.kill(learner.pid, signal.SIGSTOP)
        key = RequestKey(seed=0, rollout_id="x", turn=0)
        prompt = np.arange(30, dtype=np.int32)
        waiting = asyncio.create_task(learner.engine.generate(prompt, SamplingParams(max_tokens=60), key))
        stepping = asyncio.create_task(learner.step(plan))
        await asyncio.sleep(0.05)
        os.kill(learner.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match=r"^the learner died \(killed by signal 9\): last words$"):
                await waiting
            with pytest.raises(TrainError, match=r"^train.step: the learner died \(killed by signal 9\)"):
                await stepping
            with pytest.raises(TrainError, match="the learner died"):
                await learner.save(tmp_path / "c")
            with pytest.raises(EngineError, match=r"^the learner died \(killed by signal 9\)"):
                await learner.check()


async def test_a_learner_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"died \(exit status 1\): EngineError: load model"):
        async with Learner.start(spec_of(tmp_path / "none")):
            pytest.fail("it started")


@pytest.mark.full
async def test_a_learner_that_hangs_meets_a_deadline_and_is_ended(model_folder: Path) -> None:
    async with Learner.start(spec_of(model_folder, call_deadline_s=0.3)) as learner:
        pid = learner.pid
        os.kill(pid, signal.SIGSTOP)
        key = RequestKey(seed=0, rollout_id="x", turn=0)
        with pytest.raises(EngineError, match=r"did not answer engine.generate within 0.3 s"):
            await learner.engine.generate(np.arange(3, dtype=np.int32), SamplingParams(max_tokens=2), key)
        learner._child.max_wait_s = 0.3
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_cancelled_run_does_not_wait_for_the_step_of_its_learner(model_folder: Path) -> None:
    asked = asyncio.Event()
    pids: list[int] = []

    async def run() -> None:
        async with Learner.start(spec_of(model_folder)) as learner:
            pids.append(learner.pid)
            os.kill(learner.pid, signal.SIGSTOP)
            asked.set()
            await learner.step(plan_step([], PlanConfig()))

    task = asyncio.ensure_future(run())
    await asked.wait()
    await asyncio.sleep(0.1)
    await _cancelled_within(task, 2.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


async def test_a_cancelled_start_does_not_wait_for_its_learner(model_folder: Path) -> None:
    async def run() -> None:
        async with Learner.start(spec_of(model_folder)):
            pytest.fail("it started")

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0.2)
    await _cancelled_within(task, 2.0)


async def _cancelled_within(task: asyncio.Task[None], seconds: float) -> None:
    began = asyncio.get_running_loop().time()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() - began < seconds


@pytest.mark.full
async def test_a_step_that_takes_too_long_names_the_key(model_folder: Path) -> None:
    spec = spec_of(model_folder)
    spec = replace(spec, train=spec.train.changed(step_timeout_s=0.3), start_deadline_s=60.0)
    async with Learner.start(spec) as learner:
        os.kill(learner.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TrainError, match=r"within 0.3 s \(train.step_timeout_s\)"):
                await learner.step(plan_step([], PlanConfig()))
        finally:
            os.kill(learner.pid, signal.SIGCONT)


@pytest.mark.full
async def test_a_start_that_takes_too_long_names_the_key(model_folder: Path) -> None:
    with pytest.raises(EngineError, match=r"after 0.01 s: .* \(train.step_timeout_s\)$"):
        async with Learner.start(replace(spec_of(model_folder), start_deadline_s=0.01)):
            pytest.fail("it started")


def test_deadlines_are_those_of_the_configuration(model_folder: Path) -> None:
    texts = ["train.step_timeout_s=8000"]
    made = LearnerSpec.of(load_config(None, texts), model=model_folder)
    assert (made.start_deadline_s, made.train.step_timeout_s, made.call_deadline_s) == (8000.0, 8000.0, 300.0)
    ahead = LearnerSpec.of(load_config(None, [*texts, "collect.max_staleness=1"]), model=model_folder)
    assert ahead.call_deadline_s == 8300.0, "a request waits for the step that runs"
    assert parse_config(dump_config(made.train)) == made.train


PARENT = """
import asyncio, sys
from pathlib import Path
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
async def main():
    async with Learner.start(LearnerSpec(model=Path(sys.argv[1]), max_context=128)) as learner:
        print(learner.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_the_learner_dies_with_its_parent(model_folder: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_folder)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # it cannot notice the closed socket by itself
        parent.kill()
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        signal.sigtimedwait([], 0.05)
    pytest.fail("the learner outlived its parent")


def test_a_plan_survives_the_wire_and_a_changed_one_is_refused() -> None:
    ids, mask = [1, 2, 3, 4], [False, False, True, True]
    members = [rollout(f"g/0/{k}", float(k), [segment(f"g/0/{k}", 0, ids, mask, [-1.5] * 4)]) for k in (0, 1)]
    plan = plan_step([group("g/0", members)], PlanConfig())
    arrays = encode_plan(plan)
    again = decode_plan(arrays)
    assert plan_digest(again) == plan.digest
    assert again.ledger == plan.ledger
    assert again.batches == plan.batches
    with pytest.raises(TrainError, match="wrong checksum"):
        decode_plan({**arrays, "<f4": arrays["<f4"] * 2})
    with pytest.raises(TrainError, match="read a plan: malformed StepPlan: KeyError"):
        decode_plan({**arrays, "value": np.frombuffer(b"[{}, [1]]", np.uint8)})
    config = TrainConfig(optim=OptimConfig(lr=0.5, betas=(0.8, 0.9)), epochs=3)
    assert parse_config(dump_config(config)) == config


def test_the_controllers_side_never_imports_torch() -> None:
    modules = (
        *("insitu_train.learner.client", "insitu_train.learner.serialization", "insitu_train.options"),
        *("insitu_train.plan.step", "insitu_train.plan.advantage"),
    )
    imports = ", ".join(modules)
    code = f"import {imports}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.full
async def test_a_learner_without_an_engine_trains_and_publishes_nowhere(
    model_folder: Path, tmp_path: Path
) -> None:
    mask, mu = [False, False, True], [0.0, 0.0, -3.0]
    names = [f"g/0/{k}" for k in (0, 1)]
    members = [
        rollout(name, float(k), [segment(name, 0, [1, 2, 3 + k], mask, mu)]) for k, name in enumerate(names)
    ]
    plan = plan_step([group("g/0", members)], PlanConfig(min_groups=1))
    loose = TrainConfig(optim=OptimConfig(lr=1e-3), max_logprob_gap=100.0)
    async with Learner.start(LearnerSpec(model=model_folder, samples=False, train=loose)) as learner:
        before = learner.weights
        with pytest.raises(EngineError, match="has no engine"):
            _ = learner.engine
        assert (await learner.step(plan)).version == learner.version == 1
        assert learner.weights != before
        with pytest.raises(TrainError, match="no engine to publish to"):
            await learner.publish(1)
        await learner.save(tmp_path / "one")
        assert not await learner.written()
        trained = learner.weights
        with pytest.raises(TrainError, match="version 0 is not the trainer's"):
            await learner.export(ExportRequest(folder=tmp_path / "v0", version=0))
        whole = await learner.export(ExportRequest(folder=tmp_path / "v1", version=1))
        small = ExportRequest(folder=tmp_path / "v2", version=1, dtype="bfloat16", own_head=True)
        cast = await learner.export(small)
        assert cast.tensors["lm_head.weight"] == cast.tensors["model.embed_tokens.weight"]
        assert cast.sent_bytes < whole.sent_bytes
        names = (await learner.transfer("describe", version=1))["names"]
        sums = (await learner.transfer("sums", groups=[[name] for name in names]))["sums"]
        assert dict(zip(names, sums, strict=True)) == whole.tensors
        for do in ("share", "unique_id"):
            with pytest.raises(TrainError, match="need the trainer's weights on a GPU"):
                await learner.transfer(do)
        await learner.transfer("release")
    async with Learner.start(LearnerSpec(model=model_folder, samples=False, train=loose)) as again:
        assert (again.version, again.weights) == (0, before)
        await again.load(tmp_path / "one")
        assert (again.version, again.weights) == (1, trained)
    read = load_model(tmp_path / "v1")
    assert checksum(read) == trained
    config = json.loads((tmp_path / "v2" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["dtype"]) == (False, "bfloat16")
    assert (tmp_path / "v2" / "tokenizer.json").exists()


async def test_requests_at_a_killed_learner_are_made_again_and_draw_the_same(model_folder: Path) -> None:
    prompt, said = np.arange(30, dtype=np.int32), list[str]()

    async def sample(engine: EngineSet, name: str) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        key = RequestKey(seed=0, rollout_id=name, turn=0)
        made = await engine.generate(prompt, SamplingParams(max_tokens=60), key)
        return made.ids.tolist(), made.version_runs

    async with Learner.start(spec_of(model_folder)) as learner:
        engine = EngineSet({"learner": learner.engine}, max_wait_s=math.inf, restarts=1)
        publisher = OwnPublisher(learner, engine)
        supervisor = LearnerSupervisor(learner, publisher, lambda: (None, []), restarts=1, say=said.append)
        engine.check = supervisor.check
        async with engine, asyncio.timeout(120):
            await supervisor.begin()
            before = [await sample(engine, name) for name in "abc"]
            os.kill(learner.pid, signal.SIGSTOP)
            running = [asyncio.create_task(sample(engine, name)) for name in "abc"]
            await asyncio.sleep(0.05)
            os.kill(learner.pid, signal.SIGKILL)
            assert await asyncio.gather(*running) == before
            assert said == ["the learner died (killed by signal 9); restarting it (1 of 1)"]
            os.kill(learner.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=r"^the learner died \(killed by signal 9\)"):
                await sample(engine, "d")
