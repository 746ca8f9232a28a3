"""The sampler: exact, and the same bits whatever else runs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from insitu.errors import EngineError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.embedded.model import Qwen3, initialise

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

CONFIG = ModelConfig(vocab_size=203, hidden_size=64, num_hidden_layers=3, head_dim=16, intermediate_size=96)
OPTIONS = EngineOptions(max_rows=16, max_context=512)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Qwen3:
    model = initialise(CONFIG, 0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(5)
    return model


class Job:
    """One request and where its result lands."""

    def __init__(self, ids: IntArray, params: SamplingParams, name: str, turn: int = 0) -> None:
        self.ids, self.params = ids, params
        self.key = RequestKey(seed=7, rollout_id=name, turn=turn)
        self.result: Generation | EngineError | None = None

    def submit(self, core: EmbeddedCore) -> int:
        return core.submit(self.ids, self.params, self.key, self._done)

    def _done(self, result: Generation | EngineError) -> None:
        assert self.result is None, "answered twice"
        self.result = result

    @property
    def bits(self) -> tuple[bytes, bytes, str]:
        assert isinstance(self.result, Generation)
        assert self.result.logprobs is not None
        assert self.result.ids.dtype == np.int32
        assert self.result.logprobs.dtype == np.float32
        return self.result.ids.tobytes(), self.result.logprobs.tobytes(), self.result.finish


def make_jobs(n: int = 40) -> list[Job]:
    """Prompts of 1..400 tokens, many sharing prefixes of awkward lengths, mixed parameters."""
    rng = np.random.default_rng(1)
    trunk = rng.integers(0, CONFIG.vocab_size, 400).astype(np.int32)
    jobs = []
    for i in range(n):
        own = rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 60))).astype(np.int32)
        ids = np.concatenate([trunk[: int(rng.integers(0, 330)) if i % 4 else 0], own])
        temperature = (1.0, 0.7, 1.3, 0.0)[i % 4]
        stops = frozenset({3, 50, 100}) if i % 3 == 0 else frozenset()
        params = SamplingParams(max_tokens=int(rng.integers(1, 40)), temperature=temperature, stop_ids=stops)
        jobs.append(Job(ids, params, f"r{i}"))
    return jobs


def run(core: EmbeddedCore, jobs: Iterable[Job], burst: int = 1000, rng: random.Random | None = None) -> None:
    """Submit `burst` jobs before each few steps until all have ended."""
    waiting = list(jobs)
    for _ in range(20_000):
        for job in waiting[:burst]:
            job.submit(core)
        del waiting[:burst]
        for _ in range(rng.randint(0, 4) if rng else 1):
            if core.busy:
                core.step()
        if not waiting and not core.busy:
            return
    raise AssertionError("the core does not come to an end")


@pytest.fixture(scope="module")
def alone(model: Qwen3) -> list[tuple[bytes, bytes, str]]:
    """Each request on its own, in an engine that has seen nothing else and caches nothing."""
    core = EmbeddedCore(model, replace(OPTIONS, cache_tokens=0))
    jobs = make_jobs()
    for job in jobs:
        run(core, [job])
    return [job.bits for job in jobs]


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        replace(OPTIONS, cache_tokens=0),
        replace(OPTIONS, prefill_tiles=1),
        replace(OPTIONS, prefill_tiles=3, cache_tokens=320),
        replace(OPTIONS, max_context=1024),
        replace(OPTIONS, max_rows=32),
    ],
    ids=["plain", "no-cache", "one-tile", "small-cache", "long-context", "many-rows"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_company_order_cache_and_chunks_change_no_bit(
    model: Qwen3, alone: list[tuple[bytes, bytes, str]], options: EngineOptions, seed: int
) -> None:
    core, jobs, rng = EmbeddedCore(model, options), make_jobs(), random.Random(seed)
    order = list(range(len(jobs)))
    rng.shuffle(order)
    run(core, [jobs[i] for i in order], burst=rng.choice([1, 3, 40]), rng=rng)
    assert [job.bits for job in jobs] == alone


def test_a_cache_hit_changes_no_bit(model: Qwen3, alone: list[tuple[bytes, bytes, str]]) -> None:
    core = EmbeddedCore(model, OPTIONS)
    run(core, make_jobs())
    before = core.stats.prefilled
    jobs = make_jobs()
    run(core, reversed(jobs))
    assert core.stats.prefilled == before, "every tile was held"
    assert [job.bits for job in jobs] == alone


def test_a_prefix_read_once_for_all_changes_no_bit(model: Qwen3) -> None:
    """All running requests share 300 tokens, then 0 to 130 of their own."""
    trunk = np.random.default_rng(2).integers(0, CONFIG.vocab_size, 300).astype(np.int32)

    def jobs() -> list[Job]:
        rng = np.random.default_rng(3)
        made = []
        for i in range(24):
            own = rng.integers(0, CONFIG.vocab_size, int(rng.integers(0, 130))).astype(np.int32)
            params = SamplingParams(max_tokens=int(rng.integers(5, 40)))
            made.append(Job(np.concatenate([trunk, own]), params, f"t{i}"))
        return made

    core, apart = EmbeddedCore(model, OPTIONS), EmbeddedCore(model, replace(OPTIONS, cache_tokens=0))
    together, single = jobs(), jobs()
    run(core, together, burst=4)
    for job in single:
        run(apart, [job])
    assert core.stats.shared > 10
    assert apart.stats.shared == 0
    assert [job.bits for job in together] == [job.bits for job in single]


def test_what_was_sampled_is_kept_for_the_next_call_with_the_same_bits(model: Qwen3) -> None:
    results = []
    for options in (OPTIONS, replace(OPTIONS, cache_tokens=0), replace(OPTIONS, max_rows=32)):
        core = EmbeddedCore(model, options)
        held = np.arange(140, dtype=np.int32)
        bits = []
        for turn in range(4):
            job = Job(held, SamplingParams(max_tokens=50), "k", turn)
            run(core, [job])
            assert isinstance(job.result, Generation)
            held = np.concatenate([held, job.result.ids, np.arange(9, dtype=np.int32)])
            bits.append(job.bits)
        results.append(bits)
    assert results[0] == results[1] == results[2]
    assert core.keeps_sampled
    assert core.stats.prefilled < 144 + 3 * (3 * 16)


def test_aborted_neighbours_change_no_bit(model: Qwen3, alone: list[tuple[bytes, bytes, str]]) -> None:
    core, jobs = EmbeddedCore(model, OPTIONS), make_jobs()
    rng = random.Random(5)
    for job in jobs:
        job.submit(core)
        noise = Job(job.ids[::-1].copy(), SamplingParams(max_tokens=200), "noise")
        number = noise.submit(core)
        for _ in range(rng.randint(0, 3)):
            core.step()
        core.abort(number)
        assert isinstance(noise.result, Generation)
    while core.busy:
        core.step()
    assert [job.bits for job in jobs] == alone


def test_ends_of_earlier_requests_change_no_bit(model: Qwen3) -> None:
    """The later a request comes, the longer it runs: pages move as the earlier ones end."""

    def jobs() -> list[Job]:
        return [
            Job(
                np.arange(i, 150 + 20 * i, dtype=np.int32) % 203,
                SamplingParams(max_tokens=5 + 4 * i),
                f"m{i}",
            )
            for i in range(16)
        ]

    core, apart = EmbeddedCore(model, OPTIONS), EmbeddedCore(model, replace(OPTIONS, cache_tokens=0))
    together, single = jobs(), jobs()
    run(core, together)
    for job in single:
        run(apart, [job])
    assert [job.bits for job in together] == [job.bits for job in single]


def test_new_prompts_hold_running_requests_up_for_a_few_passes_only(model: Qwen3) -> None:
    core = EmbeddedCore(model, replace(OPTIONS, prefill_tiles=1))
    first = Job(np.arange(5, dtype=np.int32), SamplingParams(max_tokens=100), "f")
    first.submit(core)
    while core.stats.decoded < 10:
        core.step()
    for i in range(4):
        Job(np.full(400, i, np.int32), SamplingParams(max_tokens=1), f"n{i}").submit(core)
    for _ in range(24):
        core.step()
    assert core.stats.decoded == 10 + 24 // 4


def test_same_prompt_with_other_keys_draws_other_tokens(model: Qwen3) -> None:
    core = EmbeddedCore(model, OPTIONS)
    ids = np.arange(20, dtype=np.int32)
    params = SamplingParams(max_tokens=20)
    jobs = [Job(ids, params, "a", 0), Job(ids, params, "a", 1), Job(ids, params, "b", 0)]
    run(core, jobs)
    assert len({job.bits for job in jobs}) == 3


# ---------------------------------------------------------------- the right numbers


def test_logprobs_equal_the_trainers_full_forward_over_long_conversations(model: Qwen3) -> None:
    """Multi-turn: each prompt is everything so far plus a new observation, as an agent sends it."""
    core = EmbeddedCore(model, OPTIONS)
    rng = np.random.default_rng(0)
    worst = 0.0
    for rollout in range(4):
        temperature = (1.0, 0.6)[rollout % 2]
        held = rng.integers(0, CONFIG.vocab_size, 37).astype(np.int32)
        spans: list[tuple[int, Generation]] = []
        for turn in range(6):
            params = SamplingParams(max_tokens=45, temperature=temperature)
            job = Job(held, params, f"r{rollout}", turn)
            run(core, [job])
            assert isinstance(job.result, Generation)
            spans.append((len(held), job.result))
            held = np.concatenate(
                [held, job.result.ids, rng.integers(0, CONFIG.vocab_size, 25).astype(np.int32)]
            )
        with torch.no_grad():
            row = torch.from_numpy(held[None].astype(np.int64))
            logits = model.logits(model.hidden(row[0, :0], row))[0]
            full = torch.log_softmax(logits / np.float32(temperature), -1).numpy()
        for start, generation in spans:
            wanted = full[np.arange(start - 1, start - 1 + len(generation.ids)), generation.ids]
            worst = max(worst, float(np.abs(wanted - generation.logprobs).max()))
    assert worst <= 1e-4


def test_greedy_takes_the_most_likely_token(model: Qwen3) -> None:
    core = EmbeddedCore(model, OPTIONS)
    ids = np.arange(50, dtype=np.int32)
    job = Job(ids, SamplingParams(max_tokens=12, temperature=0.0), "g")
    run(core, [job])
    assert isinstance(job.result, Generation)
    row = torch.from_numpy(np.concatenate([ids, job.result.ids]).astype(np.int64))[None]
    with torch.no_grad():
        wanted = model.logits(model.hidden(row[0, :0], row))[0].argmax(-1)[49:-1]
    assert wanted.tolist() == job.result.ids.tolist()


def test_sampled_frequencies_follow_the_models_probabilities() -> None:
    """Chi-square of 4,000 first tokens over a vocabulary of 16, at a temperature of 1.5."""
    small = initialise(replace(CONFIG, vocab_size=16, num_hidden_layers=1), 1)
    with torch.no_grad():
        small.model.embed_tokens.weight.mul_(8)
    core = EmbeddedCore(small, replace(OPTIONS, max_rows=64, max_context=64))
    ids = np.array([1, 2, 3], np.int32)
    n = 4000
    jobs = [Job(ids, SamplingParams(max_tokens=1, temperature=1.5), f"r{i}") for i in range(n)]
    run(core, jobs)
    counts = np.zeros(16)
    for job in jobs:
        assert isinstance(job.result, Generation)
        counts[job.result.ids[0]] += 1
    with torch.no_grad():
        row = torch.from_numpy(ids[None].astype(np.int64))
        logits = small.logits(small.hidden(row[0, :0], row))[0, -1]
    expected = torch.softmax(logits.double() / 1.5, -1).numpy() * n
    assert expected.max() / expected.min() > 2, "a flat distribution would prove little"
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert chi < 37.7, "p < 0.001 at 15 degrees of freedom"


# ---------------------------------------------------------------- the ends of a request


def test_stop_id_is_kept_and_ends_the_request(model: Qwen3) -> None:
    core = EmbeddedCore(model, OPTIONS)
    ids = np.arange(30, dtype=np.int32)
    free = Job(ids, SamplingParams(max_tokens=30), "s")
    run(core, [free])
    assert isinstance(free.result, Generation)
    stop = int(free.result.ids[10])
    first = free.result.ids.tolist().index(stop)
    stopped = Job(ids, SamplingParams(max_tokens=30, stop_ids=frozenset({stop})), "s")
    run(core, [stopped])
    assert isinstance(stopped.result, Generation)
    assert stopped.result.finish == "stop"
    assert stopped.result.ids.tolist() == free.result.ids.tolist()[: first + 1]
    assert stopped.result.version_runs == ((0, 0),)


def test_max_tokens_and_the_context_end_a_request_as_length(model: Qwen3) -> None:
    core = EmbeddedCore(model, OPTIONS)
    short = Job(np.array([5], np.int32), SamplingParams(max_tokens=3), "m")
    full = Job(np.zeros(500, np.int32), SamplingParams(max_tokens=100), "f")
    last = Job(np.zeros(511, np.int32), SamplingParams(max_tokens=100), "l")
    run(core, [short, full, last])
    lengths = []
    for job in (short, full, last):
        assert isinstance(job.result, Generation)
        assert job.result.finish == "length"
        lengths.append(len(job.result.ids))
    assert lengths == [3, 12, 1]


@pytest.mark.parametrize(
    ("ids", "params", "line"),
    [
        (np.zeros(512, np.int32), SamplingParams(max_tokens=1), "context overflow: a prompt of 512 tokens"),
        (np.zeros(0, np.int32), SamplingParams(max_tokens=1), "a prompt needs ids"),
        (np.array([203], np.int32), SamplingParams(max_tokens=1), "between 0 and 202"),
        (np.array([-1], np.int32), SamplingParams(max_tokens=1), "between 0 and 202"),
        (np.array([1], np.int32), SamplingParams(max_tokens=0), "max_tokens=0"),
        (np.array([1], np.int32), SamplingParams(max_tokens=1, temperature=-1.0), "temperature=-1.0"),
        (np.array([1], np.int32), SamplingParams(max_tokens=1, temperature=float("nan")), "temperature=nan"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    model: Qwen3, ids: IntArray, params: SamplingParams, line: str
) -> None:
    core = EmbeddedCore(model, OPTIONS)
    with pytest.raises(EngineError, match=line):
        Job(ids, params, "x").submit(core)
    assert not core.busy


def test_abort_works_in_every_phase_and_frees_the_slot(model: Qwen3) -> None:
    core = EmbeddedCore(model, replace(OPTIONS, prefill_tiles=1))
    jobs = [Job(np.full(100, i, np.int32), SamplingParams(max_tokens=300), f"a{i}") for i in range(18)]
    numbers = [job.submit(core) for job in jobs]
    for _ in range(12):
        core.step()
    assert core.running == 16
    kept = jobs[1]
    for job, number in zip(jobs, numbers, strict=True):
        if job is not kept:
            assert core.abort(number)
            assert not core.abort(number)
            assert isinstance(job.result, Generation)
            assert job.result.finish == "abort"
    assert isinstance(jobs[0].result, Generation)
    assert 0 < len(jobs[0].result.ids) < 300
    assert core.running == 1
    assert core.cache.used == 1, "pages of requests that end are free"
    while core.busy:
        core.step()
    assert isinstance(kept.result, Generation)
    assert kept.result.finish == "length"


def test_broken_weights_give_an_error_not_tokens(model: Qwen3) -> None:
    broken = initialise(CONFIG, 0)
    core = EmbeddedCore(broken, OPTIONS)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        EmbeddedCore(broken, OPTIONS)
    core.refresh(1)
    job = Job(np.arange(20, dtype=np.int32), SamplingParams(max_tokens=5), "n")
    run(core, [job])
    assert isinstance(job.result, EngineError)
    assert "not finite" in str(job.result)
    broken.load_state_dict(model.state_dict())
    core.refresh(2)
    again = Job(np.arange(20, dtype=np.int32), SamplingParams(max_tokens=5), "n")
    run(core, [again])
    assert isinstance(again.result, Generation)


# ---------------------------------------------------------------- cache and weights


def test_the_cache_is_bounded_and_the_least_recent_goes_first(model: Qwen3) -> None:
    """Nine pages; each prompt leaves one."""
    core = EmbeddedCore(model, replace(OPTIONS, max_rows=4, max_context=256, cache_tokens=128))
    one = SamplingParams(max_tokens=1)
    prompts = [np.full(129, i, np.int32) for i in range(10)]
    for ids in (*prompts[:8], prompts[0], *prompts[8:]):
        run(core, [Job(ids, one, "c")])
    assert (len(core.cache), core.cache.used) == (8 * 8, 0)
    assert core.cache.evicted == 2
    before = core.stats.prefilled
    run(core, [Job(prompts[0], one, "c")])
    assert core.stats.prefilled == before, "the most recently used prompt is held whole"
    run(core, [Job(prompts[1], one, "c")])
    assert core.stats.prefilled == before + 128


def test_a_tile_whose_page_is_given_up_for_its_copy_is_computed_again(model: Qwen3) -> None:
    prompts = [np.random.default_rng(n).integers(0, 200, 60).astype(np.int32) for n in range(9)]
    small = EmbeddedCore(model, replace(OPTIONS, max_rows=4, max_context=256, cache_tokens=128))
    plain = EmbeddedCore(model, replace(OPTIONS, max_rows=4, max_context=256, cache_tokens=0))
    for count in range(2, 10):
        for order in ([*range(count), 0, 0], [0, *range(count), 0]):
            for turn, n in enumerate(order):
                jobs = [Job(prompts[n], SamplingParams(max_tokens=6), f"{count} {n}", turn) for _ in range(2)]
                for job, core in zip(jobs, (small, plain), strict=True):
                    job.submit(core)
                    while core.busy:
                        core.step()
                assert jobs[0].bits == jobs[1].bits, (count, turn, n)


def test_requests_in_flight_share_the_work_on_a_common_prefix(model: Qwen3) -> None:
    core = EmbeddedCore(model, OPTIONS)
    ids = np.arange(161, dtype=np.int32)
    jobs = [Job(ids, SamplingParams(max_tokens=4), f"s{i}") for i in range(16)]
    run(core, jobs)
    assert core.stats.prefilled == 160


def test_an_update_that_fails_midway_leaves_nothing_to_sample_with(monkeypatch: pytest.MonkeyPatch) -> None:
    model = initialise(CONFIG, 0)
    core = EmbeddedCore(model, OPTIONS)
    whole = dict(model.tensors())
    monkeypatch.setattr(model, "tensors", lambda: {k: v for k, v in whole.items() if ".2." not in k})
    with pytest.raises(EngineError):
        core.refresh(1)
    job = Job(np.arange(9, dtype=np.int32), SamplingParams(max_tokens=2), "a")
    with pytest.raises(EngineError, match="failed midway"):
        job.submit(core)
    monkeypatch.undo()
    core.refresh(1)
    run(core, [job])
    assert core.receipt.version == 1


def test_new_weights_void_the_cache_and_change_the_receipt() -> None:
    model = initialise(CONFIG, 0)
    core = EmbeddedCore(model, OPTIONS, version=4)
    ids = np.arange(100, dtype=np.int32)
    params = SamplingParams(max_tokens=10)
    before = Job(ids, params, "w")
    run(core, [before])
    old = core.receipt
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.7)
    unpublished = Job(ids, params, "w")
    run(core, [unpublished])
    assert unpublished.bits == before.bits, "the engine samples from what was published"
    new = core.refresh(5)
    assert (old.version, new.version, core.receipt) == (4, 5, new)
    assert old.checksum != new.checksum
    after, fresh = Job(ids, params, "w"), Job(ids, params, "w")
    run(core, [after])
    run(EmbeddedCore(model, OPTIONS), [fresh])
    assert after.bits == fresh.bits != before.bits
    assert isinstance(after.result, Generation)
    assert after.result.version_runs == ((0, 5),)


def test_weights_are_not_swapped_under_a_running_request(model: Qwen3) -> None:
    core = EmbeddedCore(model, OPTIONS)
    job = Job(np.arange(10, dtype=np.int32), SamplingParams(max_tokens=5), "w")
    job.submit(core)
    core.step()
    core.pause()
    with pytest.raises(EngineError, match="pause first"):
        core.refresh(1)
    late = Job(np.arange(10, dtype=np.int32), SamplingParams(max_tokens=5), "late")
    late.submit(core)
    while core.busy:
        core.step()
    assert isinstance(job.result, Generation)
    assert late.result is None
    core.refresh(1)
    core.resume()
    run(core, [])
    assert isinstance(late.result, Generation)
    assert late.result.version_runs == ((0, 1),)
