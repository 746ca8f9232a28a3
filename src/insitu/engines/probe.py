"""Start-up probe: rejects an engine whose ids, logprobs or versions are wrong.

It uses only `Engine.generate`. Whether logprobs are those of the sampled distribution shows only at two
temperatures: with p(T) = softmax(logits / T), the difference of two ids' logprobs times T is the same at
every T, while logprobs taken before the temperature ("raw") do not change with T. At T = 1 the two are equal,
so the probe always uses other temperatures too. Whether the ids are drawn from the reported distribution
shows only in counts: later draws must match the logprobs of earlier ones. Nearly all requests are for one
token after a few, many at once. A slow engine is asked for fewer draws once `BUDGET_S` are over: only larger
deviations from the reported distribution show then (`check_counts`). Raises EngineError with one line.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from insitu.concurrency import run_all
from insitu.engines.base import Engine
from insitu.errors import EngineError
from insitu.types import FloatArray, Generation, IntArray, RequestKey, SamplingParams

TOLERANCE = 0.1
"""Tolerance of a logprob, relative to its size or absolute below 1, for bfloat16 engines."""
CLEAR = 0.1
"""Nats by which raw and processed logprobs must differ before a comparison counts."""
DRAWS = 8
LEARNT, COUNTED, AT_ONCE = 64, 128, 64
"""First tokens at a temperature: drawn to learn ids and probabilities, drawn to count them, and at once."""
LEARNT_LEAST, COUNTED_LEAST = 32, 64
"""The same of a trainer that is asked by hand; a slow engine is counted by the latter too."""
BUDGET_S = 8.0
SHORT = 8
"""Tokens of the prompts of one-token requests: without a prefix cache each is computed in full."""
SURE = 24.0
"""Nats against a count before it is no accident. An honest engine passes this with a probability of
2 * exp(-24) < 1e-10 per comparison at most (Chernoff, for every count), and there are at most 65 at each of
two temperatures for each prompt: less than 1e-7 in all."""
PROMPTS = 3
"""Prompts tried for a first token that is not certain."""
TINY = 1e-6
VARIED = 0.3
"""Nats per token below which a prompt's first token is too certain to show much."""
ROUNDS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeReport:
    """Result of the probe, for the log."""

    version: int
    tokens: int
    """Sampled while probing."""
    pairs: int
    """Comparisons at two temperatures that could distinguish raw from processed logprobs."""
    largest_gap: float
    """Worst deviation from the temperature law, in nats over max(1, |difference of logprobs|)."""
    repeatable: bool
    """The same request key gave the same ids."""
    draws: int
    """Least number of draws counted at a temperature."""


Seen = Mapping[float, Mapping[int, float]]
"""Temperature -> id -> logprob of that id as first token of one prompt."""


class _Probe:
    """One probe of one engine: counts what it samples, numbers its requests."""

    def __init__(
        self, engine: Engine, prompt: IntArray, vocab_size: int, deadline_s: float, *, few: bool
    ) -> None:
        self._engine, self._prompt, self._vocab = engine, prompt, vocab_size
        self._deadline_s, self._few = deadline_s, few
        self._numbers = itertools.count()
        self.tokens = self.pairs = 0
        self.gap = 0.0
        self.draws = COUNTED
        self._ends = time.monotonic() + BUDGET_S

    async def sample(
        self, prompt: IntArray, max_tokens: int, temperature: float, *, stop: frozenset[int] = frozenset()
    ) -> Generation:
        key = RequestKey(seed=0, rollout_id="probe", turn=next(self._numbers))
        return await self.with_key(prompt, max_tokens, temperature, key, stop=stop)

    async def with_key(
        self,
        prompt: IntArray,
        max_tokens: int,
        temperature: float,
        key: RequestKey,
        *,
        stop: frozenset[int] = frozenset(),
    ) -> Generation:
        """One request, with everything checked that one reply can show."""
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_ids=stop)
        try:
            async with asyncio.timeout(self._deadline_s):
                reply = await self._engine.generate(prompt, params, key)
        except TimeoutError as error:
            raise _refusal(f"no answer within {self._deadline_s:g} s") from error
        self.tokens += len(reply.ids)
        _check_one(reply, params, self._vocab, self._engine.receipt.version)
        return reply

    async def many(self, prompt: IntArray, temperature: float, count: int = DRAWS) -> list[Generation]:
        return await run_all(*(self.sample(prompt, 1, temperature) for _ in range(count)))

    # ----------------------------------------------------------------------- the checks

    async def lengths(self) -> bool:
        """max_tokens is honoured, one logprob per id and not all equal; True when a key repeats its ids."""
        key = RequestKey(seed=1, rollout_id="probe", turn=0)
        long = await self.with_key(self._prompt, 16, 1.0, key)
        if len(long.ids) != 16 or long.finish != "length":
            raise _refusal(f"{len(long.ids)} tokens and finish {long.finish}, asked for 16 without a stop id")
        probs = _logprobs(long)
        if bool((probs == probs[0]).all()):
            raise _refusal(f"all logprobs are equal ({probs[0]:g}): they are not those of the ids")
        again = await self.with_key(self._prompt, 16, 1.0, key)
        return bool(np.array_equal(long.ids, again.ids))

    async def stop_kept(self) -> None:
        """Check that the stop id ends the reply and is its last id."""
        for _ in range(ROUNDS):
            key = RequestKey(seed=2, rollout_id="probe", turn=next(self._numbers))
            free = await self.with_key(self._prompt, 8, 1.0, key)
            stop = frozenset(int(i) for i in free.ids)
            ended = await self.with_key(self._prompt, 8, 1.0, key, stop=stop)
            if ended.finish == "stop":
                return
        raise _refusal("no reply ended at a stop id, though the stop ids were ones it samples")

    async def temperatures(self, wanted: float) -> None:
        """Logprobs follow the temperature law. Looks at prompts until three comparisons could tell."""
        levels = sorted({1.0, wanted if abs(wanted - 1.0) > 0.1 else 0.7, 0.4})
        for prompt in self._prompts():
            seen: dict[float, dict[int, float]] = {}
            for temperature in levels:
                seen[temperature] = _first_tokens(await self.many(prompt, temperature), temperature)
            self._compare(seen)
            if self.pairs >= 3:
                return
        if not self.pairs:
            raise _refusal(
                f"too little tells of what distribution its logprobs are: at {levels} ids are nearly certain,"
                " or as even as those of an untrained model or of one that does not get the temperature"
            )

    async def sampling(self, wanted: float) -> None:
        """Check that ids follow the logprobs, at the rollouts' temperature and at a colder or hotter one."""
        learnt = LEARNT_LEAST if self._few else LEARNT
        for prompt in itertools.islice(self._prompts(), PROMPTS):
            varied = 0
            for temperature in (wanted, 0.4 if wanted > 0.5 else 1.0):
                draws = await self.many(prompt, temperature, learnt)
                reported = _first_tokens(draws, temperature)
                if self._few and _surprise(draws) <= VARIED:
                    continue  # its ids are nearly certain, and are those that it reports so
                while len(draws) < learnt + self._wanted():
                    draws += await self.many(prompt, temperature, AT_ONCE)
                self.draws = min(self.draws, len(draws) - learnt)
                _first_tokens(draws, temperature)
                check_counts(reported, [int(reply.ids[0]) for reply in draws[learnt:]], temperature)
                varied += _surprise(draws) > VARIED
            if varied:
                return

    def _wanted(self) -> int:
        brief = self._few or time.monotonic() > self._ends
        return COUNTED_LEAST if brief else COUNTED

    def _prompts(self) -> Iterator[IntArray]:
        """Yield the prompt's end, then parts of its begin with random ids, which are harder to predict."""
        yield self._prompt[-SHORT:]
        random = np.random.default_rng(0)
        for count in range(1, ROUNDS):
            tail = random.choice(self._prompt, size=min(count, 4))
            head = self._prompt[: max(1, min(SHORT, len(self._prompt) // (count + 1)))]
            yield np.concatenate([head, tail]).astype(np.int32)

    def _compare(self, seen: Seen) -> None:
        for low, high in itertools.combinations(sorted(seen), 2):
            both = sorted(seen[low].keys() & seen[high].keys())
            for token in both:
                self._one(seen[low][token], seen[high][token], low, high)
            for a, b in itertools.combinations(both, 2):
                self._two(seen[low][a] - seen[low][b], seen[high][a] - seen[high][b], low, high)

    def _one(self, cold: float, hot: float, low: float, high: float) -> None:
        """Compare one id: a probability above one half gains from cooling, least with a single other id."""
        odds = math.expm1(-hot)
        if not 0 < odds < 1:
            return
        gain = -math.log1p(odds ** (high / low)) - hot
        if gain > CLEAR:
            if cold < hot + gain / 2:
                raise _raw(low, high)
            self.pairs += 1

    def _two(self, cold: float, hot: float, low: float, high: float) -> None:
        """Compare two ids: their logprob difference grows by high / low when cooled; raw ones stay."""
        law = hot * high / low
        expected_change, gap = abs(law - hot), abs(cold - law)
        if expected_change > CLEAR * max(1.0, abs(law)):
            self.gap = max(self.gap, gap / max(1.0, abs(law)))
            if gap > expected_change / 2:
                raise _raw(low, high)
            self.pairs += 1


def _check_one(reply: Generation, params: SamplingParams, vocab_size: int, version: int) -> None:
    count = len(reply.ids)
    if not 0 < count <= params.max_tokens:
        raise _refusal(f"{count} tokens where 1 to {params.max_tokens} were asked for")
    if int(reply.ids.min()) < 0 or int(reply.ids.max()) >= vocab_size:
        raise _refusal(
            f"an id outside the vocabulary of {vocab_size}: is model.path the model that it serves?"
        )
    probs = _logprobs(reply)
    if len(probs) != count or not bool(np.isfinite(probs).all()) or bool((probs > 0).any()):
        raise _refusal(f"{len(probs)} logprobs for {count} ids, or some that no probability has")
    stops = np.flatnonzero(np.isin(reply.ids, list(params.stop_ids)))
    if (reply.finish == "stop") != bool(stops.size) or (stops.size and int(stops[0]) != count - 1):
        raise _refusal(f"finish {reply.finish}, but stop ids at {stops.tolist()} of {count} tokens")
    if [start for start, _ in reply.version_runs[:1]] != [0]:
        raise _refusal("no weight version for its tokens")
    if any(number != version for _, number in reply.version_runs):
        raise _refusal(f"tokens of versions {list(reply.version_runs)}, while it holds version {version}")


def _first_tokens(draws: Sequence[Generation], temperature: float) -> dict[int, float]:
    """Id -> logprob. One id must always have the same one, and together they are at most certain."""
    found: dict[int, float] = {}
    for reply in draws:
        token, logprob = int(reply.ids[0]), float(_logprobs(reply)[0])
        held = found.setdefault(token, logprob)
        if abs(held - logprob) > TOLERANCE * max(1.0, abs(held)):
            raise _refusal(f"logprobs {held:g} and {logprob:g} for the same id after the same prompt")
    total = math.fsum(math.exp(value) for value in found.values())
    if total > 1 + TOLERANCE:
        raise _refusal(f"probabilities of different ids add up to {total:.3f} at temperature {temperature:g}")
    return found


def check_counts(reported: Mapping[int, float], drawn: Sequence[int], temperature: float) -> None:
    """Raise EngineError if `drawn` is no sample of a distribution with the `reported` id -> logprob.

    `reported` must not have been derived from `drawn`: then each count is binomial, and so is that of all the
    ids together, which detects an engine that draws from fewer ids than it reports.
    """
    counts = Counter(drawn)
    groups = [({token}, math.exp(value)) for token, value in reported.items()]
    groups.append((set(reported), math.fsum(share for _, share in groups)))
    for ids, share in groups:
        seen = sum(counts[token] for token in ids) / len(drawn)
        if len(drawn) * _divergence(seen, min(share, 1.0)) > SURE:
            what = f"id {min(ids)}" if len(ids) == 1 else f"{len(ids)} ids"
            raise _refusal(
                f"{what} with a reported probability of {share:.3g} at temperature {temperature:g} made up "
                f"{seen:.3g} of {len(drawn)} draws: it does not sample from what it reports"
            )


def _divergence(seen: float, share: float) -> float:
    """Return the Kullback-Leibler divergence of two biased coins, in nats.

    Shares are clamped to [TINY, 1 - TINY]: rounded logprobs would make a single stray draw impossible.
    """
    share = min(max(share, TINY), 1 - TINY)
    parts = ((seen, share), (1 - seen, 1 - share))
    return math.fsum(p * math.log(p / q) for p, q in parts if p > 0)


def _surprise(draws: Sequence[Generation]) -> float:
    """Return the mean of minus the logprobs of first tokens, in nats."""
    return -math.fsum(float(_logprobs(reply)[0]) for reply in draws) / len(draws)


def _logprobs(reply: Generation) -> FloatArray:
    if reply.logprobs is None:
        raise _refusal("no logprobs")
    return reply.logprobs


def _refusal(why: str) -> EngineError:
    return EngineError(f"the engine was refused by the start-up probe: {why}")


def _raw(low: float, high: float) -> EngineError:
    return _refusal(
        f"its logprobs at temperatures {low:g} and {high:g} are not those of the distribution it samples "
        "from (vLLM: start the server with --logprobs-mode processed_logprobs)"
    )


async def probe_engine(
    engine: Engine,
    prompt: IntArray,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    deadline_s: float = 120.0,
    few: bool = False,
) -> _ProbeReport:
    """Sample some hundred tokens after `prompt` and check what can be checked.

    `temperature` is the one rollouts will use; `deadline_s` bounds each request; `few`: ask for less, which
    shows larger deviations only. Raises EngineError.
    """
    if engine.info.kind != "sampled":
        raise _refusal(f"it is {engine.info.kind}, so nothing of it can be trained by its logprobs")
    probe = _Probe(engine, prompt, vocab_size, deadline_s, few=few)
    repeatable = await probe.lengths()
    await probe.stop_kept()
    await probe.temperatures(temperature)
    await probe.sampling(temperature)
    return _ProbeReport(
        version=engine.receipt.version,
        tokens=probe.tokens,
        pairs=probe.pairs,
        largest_gap=probe.gap,
        repeatable=repeatable,
        draws=probe.draws,
    )
