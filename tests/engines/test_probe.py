"""The start-up probe against engines that report honest logprobs and do not sample from them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from insitu.engines import probe
from insitu.engines.base import EngineInfo, PauseMode, Receipt
from insitu.engines.http import stream_seed
from insitu.engines.probe import check_counts, probe_engine
from insitu.errors import EngineError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from tests.fakes.sampler import ChanceModel, FloatRow

VOCAB = 97
PROMPT: IntArray = np.array([1, 2, 3, 4, 5, 6], dtype=np.int32)


class Cheat:
    """An engine in this process that reports log_softmax(logits / T) and draws as `how` says."""

    def __init__(self, how: str) -> None:
        self.how, self.model = how, ChanceModel(VOCAB, "start")
        self.asked, self.prompt_tokens = 0, 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(name="cheat", max_context_tokens=4096)

    @property
    def receipt(self) -> Receipt:
        return Receipt(version=0, checksum="none")

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        self.asked += 1
        self.prompt_tokens += len(ids)
        random = np.random.default_rng(stream_seed(key))
        seen, logprobs, finish = ids.tolist(), [], "length"
        for _ in range(params.max_tokens):
            row = self.model.logprobs(seen, params.temperature)
            token = self.draw(row, seen, random)
            seen.append(token)
            logprobs.append(row[token])
            if token in params.stop_ids:
                finish = "stop"
                break
        return Generation(
            ids=np.array(seen[len(ids) :], dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            finish="stop" if finish == "stop" else "length",
            version_runs=((0, 0),),
        )

    def draw(self, row: FloatRow, seen: list[int], random: np.random.Generator) -> int:
        top = np.argsort(row)[::-1]
        if self.how == "six":
            return int(random.integers(6))
        if self.how == "top-six":
            return int(random.choice(top[:6]))
        if self.how == "top-k":
            share = np.exp(row[top[:3]])
            return int(random.choice(top[:3], p=share / share.sum()))
        if self.how == "hot":
            row = self.model.logprobs(seen, 1.0)
        return int(np.argmax(row + random.gumbel(size=VOCAB)))

    async def pause(self, mode: PauseMode = "wait") -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("how", ["six", "top-six", "top-k", "hot"])
@pytest.mark.parametrize(("budget_s", "few"), [(60.0, False), (0.0, False), (60.0, True)])
async def test_an_engine_that_does_not_sample_from_what_it_reports(
    how: str, temperature: float, budget_s: float, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "BUDGET_S", budget_s)
    with pytest.raises(EngineError, match="does not sample from what it reports") as caught:
        await probe_engine(Cheat(how), PROMPT, vocab_size=VOCAB, temperature=temperature, few=few)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("temperature", [0.4, 0.7, 1.0])
async def test_an_honest_engine_is_accepted_after_a_bounded_number_of_requests(temperature: float) -> None:
    engine = Cheat("honest")
    assert (await probe_engine(engine, PROMPT, vocab_size=VOCAB, temperature=temperature)).pairs
    assert engine.asked < 1500


async def test_a_slow_engine_is_asked_for_less_and_long_prompts_are_computed_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = np.arange(1, 91, dtype=np.int32)
    found = []
    for budget_s in (60.0, 0.0):
        monkeypatch.setattr(probe, "BUDGET_S", budget_s)
        engine = Cheat("honest")
        report = await probe_engine(engine, long, vocab_size=VOCAB)
        found.append((report.draws, engine.asked))
        assert engine.prompt_tokens < 30 * 90 + 2 * probe.SHORT * engine.asked
    assert [draws for draws, _ in found] == [probe.COUNTED, probe.COUNTED_LEAST]
    assert found[1][1] <= found[0][1] - 2 * (probe.COUNTED - probe.COUNTED_LEAST)


@pytest.mark.parametrize("first", ["varied", "certain"])
async def test_a_trainer_that_is_asked_by_hand_is_asked_for_few(first: str) -> None:
    """A prompt whose first token is certain shows nothing of counts and costs little."""
    engine = Cheat("honest")
    likely = engine.model.logprobs
    certain = likely([1], 0.1) * 20

    def logprobs(seen: list[int], temperature: float) -> FloatRow:
        if first == "certain" and seen == PROMPT.tolist():
            row = certain / temperature
            return row - np.log(np.exp(row - row.max()).sum()) - row.max()
        return likely(seen, temperature)

    engine.model.logprobs = logprobs  # type: ignore[method-assign, assignment]
    report = await probe_engine(engine, PROMPT, vocab_size=VOCAB, few=True)
    assert (report.pairs > 0, report.draws) == (True, probe.COUNTED_LEAST)
    most = 76 + 2 * (probe.LEARNT_LEAST + probe.COUNTED_LEAST)
    assert engine.asked <= most + (2 * probe.LEARNT_LEAST if first == "certain" else 0)


async def test_one_whose_ids_show_nothing_is_refused_with_what_it_may_be() -> None:
    engine = Cheat("honest")
    even = 0.01 * np.sin(np.arange(VOCAB))
    engine.model.logprobs = lambda seen, temperature: even - np.log(np.exp(even).sum())  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"at .0.4, 0.7, 1.0. ids are .* untrained"):
        await probe_engine(engine, PROMPT, vocab_size=VOCAB)


def test_honest_counts_pass_and_impossible_ones_do_not() -> None:
    random = np.random.default_rng(5)
    for _, scale in itertools.product(range(150), (0.0, 1.0, 4.0)):
        row = random.normal(scale=scale, size=50)
        share = np.exp(row - np.log(np.exp(row).sum()))
        learnt = {int(i): float(np.log(share[i])) for i in random.choice(50, p=share, size=64)}
        check_counts(learnt, random.choice(50, p=share, size=128).tolist(), 1.0)
    check_counts({3: 0.0}, [3] * 128, 1.0)
    check_counts({3: 0.0}, [3] * 127 + [4], 1.0)
    with pytest.raises(EngineError, match="id 3 "):
        check_counts({3: 0.0}, [4] * 128, 1.0)
