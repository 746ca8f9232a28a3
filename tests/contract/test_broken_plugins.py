"""The contracts catch broken plug-ins: each fault makes the test of the contract that names it fail."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from insitu.engines.base import EngineInfo, Receipt
from insitu.errors import EngineError, TaskError
from insitu.tasks.base import Split
from insitu.tasks.toy import ToySource
from insitu.types import (
    FileEntry,
    Finish,
    Generation,
    IntArray,
    Limits,
    Oracle,
    RequestKey,
    SamplingParams,
    Task,
)
from insitu_lab.testing import EngineContract, TaskSourceContract

VOCAB = 128


class SoundEngine:
    """Sample ids whose logits depend on the id before them; keeps the whole contract."""

    info = EngineInfo(name="sound", max_context_tokens=4096)
    receipt = Receipt(version=0, checksum="x")

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.running.set()
        self.draws = itertools.count()

    def logits(self, last: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.random.default_rng(last).normal(size=VOCAB)

    def random(self, key: RequestKey) -> np.random.Generator:
        digest = hashlib.sha256(f"{key.seed}/{key.rollout_id}/{key.turn}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "big"))

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        if int(ids.max()) >= VOCAB:
            raise EngineError("an id is outside the vocabulary")
        await self.running.wait()
        random, last = self.random(key), int(ids[-1])
        out: list[int] = []
        logprobs: list[float] = []
        finish: Finish = "length"
        while len(out) < params.max_tokens:
            logits = self.logits(last)
            scaled = logits / max(params.temperature, 1e-6)
            chances = np.exp(scaled - scaled.max())
            chances /= chances.sum()
            last = int(random.choice(VOCAB, p=chances)) if params.temperature > 0 else int(logits.argmax())
            out.append(last)
            logprobs.append(float(np.log(chances[last])))
            if last in params.stop_ids:
                finish = "stop"
                break
        return self.reply(out, logprobs, finish)

    def reply(self, ids: list[int], logprobs: list[float], finish: Finish) -> Generation:
        return Generation(
            ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish=finish,
            version_runs=((0, self.receipt.version),),
        )

    async def pause(self) -> None:
        self.running.clear()

    async def resume(self) -> None:
        self.running.set()

    async def close(self) -> None: ...


class DropsALogprob(SoundEngine):
    def reply(self, ids: list[int], logprobs: list[float], finish: Finish) -> Generation:
        return super().reply(ids, logprobs[1:], finish)


class PositiveLogprobs(SoundEngine):
    def reply(self, ids: list[int], logprobs: list[float], finish: Finish) -> Generation:
        return super().reply(ids, [-value for value in logprobs], finish)


class DropsTheStopId(SoundEngine):
    def reply(self, ids: list[int], logprobs: list[float], finish: Finish) -> Generation:
        cut = len(ids) - (finish == "stop")
        return super().reply(ids[:cut], logprobs[:cut], finish)


class WrongVersion(SoundEngine):
    def reply(self, ids: list[int], logprobs: list[float], finish: Finish) -> Generation:
        return replace(super().reply(ids, logprobs, finish), version_runs=((0, 3),))


class IgnoresTheKey(SoundEngine):
    def random(self, key: RequestKey) -> np.random.Generator:
        return np.random.default_rng(next(self.draws))


class AlwaysTheSame(SoundEngine):
    def random(self, key: RequestKey) -> np.random.Generator:
        return np.random.default_rng(0)


class IgnoresThePrompt(SoundEngine):
    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        ids = np.minimum(ids, ids[:1]) if int(ids.max()) < VOCAB else ids
        return await super().generate(ids, params, key)


class AcceptsAnyId(SoundEngine):
    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        return await super().generate(ids % VOCAB, params, key)


class CannotPause(SoundEngine):
    async def pause(self) -> None: ...


class LogprobsOfOtherTemperature(SoundEngine):
    """It samples at the temperature, and reports log-probabilities at 1."""

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        found = await super().generate(ids, params, key)
        path = [int(ids[-1]), *found.ids.tolist()]
        values = []
        for last, chosen in itertools.pairwise(path):
            logits = self.logits(last)
            values.append(float(logits[chosen] - np.log(np.exp(logits).sum())))
        return replace(found, logprobs=np.array(values, np.float32))


class _Engines(EngineContract):
    vocab_size = VOCAB


ENGINE_TESTS = [name for name in dir(EngineContract) if name.startswith("test_")]
EACH_ID = "test_each_id_has_a_logprob"


async def failed_tests(engine: Callable[[], SoundEngine]) -> set[str]:
    """Return the names of the engine contract's tests that fail."""
    found = set()
    for name in ENGINE_TESTS:
        try:
            await getattr(_Engines(), name)(engine(), *([33] if name == EACH_ID else []))
        except (AssertionError, EngineError, pytest.fail.Exception):
            found.add(name)
    return found


async def test_a_sound_engine_passes() -> None:
    assert await failed_tests(SoundEngine) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "caught"),
    [
        (DropsALogprob, EACH_ID),
        (PositiveLogprobs, EACH_ID),
        (WrongVersion, EACH_ID),
        (DropsTheStopId, "test_the_stop_id_is_kept_and_ends_the_reply"),
        (IgnoresTheKey, "test_the_request_key_seeds_the_draw"),
        (AlwaysTheSame, "test_the_request_key_seeds_the_draw"),
        (IgnoresThePrompt, "test_the_reply_depends_on_the_prompt"),
        (AcceptsAnyId, "test_an_id_outside_the_vocabulary_is_refused"),
        (CannotPause, "test_pause_finishes_running_requests_and_holds_new_ones"),
        (LogprobsOfOtherTemperature, "test_the_start_up_probe"),
    ],
)
async def test_a_broken_engine_is_caught(engine: type[SoundEngine], caught: str) -> None:
    assert caught in await failed_tests(engine)


class SoundSource(ToySource):
    """Four training tasks and two held-out ones."""

    def size(self, split: Split) -> int | None:
        return 4 if split == "train" else 2

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        size = self.size(split) or 1
        if split == "eval" and start + count > size:
            raise TaskError("the eval split has 2 tasks")
        return [super(SoundSource, self).tasks(split, n % size, 1)[0] for n in range(start, start + count)]


class OtherTasksEachTime(SoundSource):
    calls = 0

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        self.calls += 4
        return ToySource.tasks(self, split, start + self.calls, count)


class SameIds(SoundSource):
    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return [replace(task, id="same") for task in super().tasks(split, start, count)]


class StaleHash(SoundSource):
    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return [replace(task, prompt=task.prompt + "!") for task in super().tasks(split, start, count)]


class OneSplit(SoundSource):
    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return super().tasks("train", start, count)


class IgnoresTheStart(SoundSource):
    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return super().tasks(split, 0 if count > 1 else start, count)


class EndsAfterOneEpoch(SoundSource):
    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return super().tasks(split, start, count)[: max(0, 4 - start)]


class NoOracle(SoundSource):
    def oracle(self, task: Task) -> Oracle:
        return Oracle(task_id=task.id)


class ShowsTheSolution(SoundSource):
    def oracle(self, task: Task) -> Oracle:
        shown = max((entry.content for entry in task.files.values()), key=len) + b" " * 40
        shown = task.prompt.encode() if len(shown.strip()) <= 40 else shown
        return replace(super().oracle(task), gold={"a.py": FileEntry(content=shown)})


class NoRow(SoundSource):
    def row(self, task: Task) -> Any:
        return None


SOURCE_TESTS = [name for name in dir(TaskSourceContract) if name.startswith("test_")]


def failed_source_tests(source: type[SoundSource]) -> set[str]:
    found = set()
    for name in SOURCE_TESTS:
        try:
            getattr(TaskSourceContract(), name)(source(Limits()))
        except (AssertionError, TaskError, ValueError, pytest.fail.Exception):
            found.add(name)
    return found


def test_a_sound_source_passes() -> None:
    assert failed_source_tests(SoundSource) == set()


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        (OtherTasksEachTime, "test_tasks_are_deterministic"),
        (SameIds, "test_ids_are_unique"),
        (StaleHash, "test_the_content_hash_is_that_of_the_content"),
        (OneSplit, "test_splits_share_no_task"),
        (OneSplit, "test_the_held_out_split_does_not_repeat"),
        (IgnoresTheStart, "test_a_slice_of_a_split_is_that_part_of_it"),
        (EndsAfterOneEpoch, "test_a_finite_training_split_repeats"),
        (NoOracle, "test_each_task_has_an_oracle"),
        (ShowsTheSolution, "test_no_task_contains_its_solution"),
        (NoRow, "test_rows_are_mappings"),
    ],
)
def test_a_broken_source_is_caught(source: type[SoundSource], caught: str) -> None:
    assert caught in failed_source_tests(source)
