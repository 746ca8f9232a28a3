"""Checks of each generation, besides those of the engine clients and the forest, and ids of its calls.

Engines sample without stop strings: the ids are cut after the first one that completes the string in the
visible text, never within reasoning or a call, and the agent gets the text before the string. The ledger
counts the rest (`after_stop`), so ids, logprobs and the text sent back later agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from insitu.chat.renderer import ChatRenderer, ParsedCall, ParsedReply
from insitu.engines.base import Engine
from insitu.engines.response_checks import CONSTANT, WARM
from insitu.errors import EngineError, EngineUnavailable
from insitu.types import FloatArray, Generation, IntArray, ToolCall, ToolSpec


class ReplyChecks:
    """Checks the generations of one session."""

    def __init__(self, engine: Engine, renderer: ChatRenderer, temperature: float) -> None:
        self._engine, self._renderer, self._temperature = engine, renderer, temperature
        self._zeros = 0
        """Number of ids so far if all have logprob 0; -1 when one had another."""

    def check(self, generation: Generation, max_tokens: int) -> None:
        """Raise EngineError for an invalid generation."""
        count = len(generation.ids)
        if generation.finish == "abort":
            raise EngineError("engine aborted the request")
        if not count:  # even an end is a token: nothing was sampled, and a retry may succeed
            raise EngineUnavailable("engine returned no token")
        if count > max_tokens:
            raise EngineError(f"engine returned {count} tokens where 1 to {max_tokens} were asked for")
        if int(generation.ids.min()) < 0 or int(generation.ids.max()) >= self._renderer.vocab_size:
            raise EngineError("engine returned an id outside the renderer's vocabulary")
        held = self._engine.receipt.version
        if any(version > held for _, version in generation.version_runs):
            raise EngineError(f"engine claims a version newer than its receipt {held}")
        if generation.logprobs is not None and self._temperature >= WARM:
            self._check_zeros(generation.logprobs)

    def _check_zeros(self, logprobs: FloatArray) -> None:
        """Refuse a session whose logprobs are all 0, as engines.response_checks does for one reply."""
        if self._zeros < 0:
            return
        if bool(logprobs.any()):
            self._zeros = -1
            return
        self._zeros += len(logprobs)
        if self._zeros >= CONSTANT:
            raise EngineError(
                f"all {self._zeros} logprobs of this session are 0: they are not those of the ids"
            )


def cut_at_stop(
    renderer: ChatRenderer, generation: Generation, stops: Sequence[str], tools: Sequence[ToolSpec] = ()
) -> tuple[Generation, ParsedReply, str]:
    """Return the kept generation, its parsed reply, and the stop string, which is not part of the text."""
    parsed = renderer.parse(generation.ids, tools)
    ends = [parsed.text.find(stop) + len(stop) for stop in stops if stop in parsed.text]
    if not ends:
        return generation, parsed, ""
    count = _completing(renderer, generation.ids, parsed, parsed.text[: min(ends)], tools)
    generation = replace(
        generation,
        ids=generation.ids[:count],
        logprobs=None if generation.logprobs is None else generation.logprobs[:count],
        finish="stop",
        version_runs=tuple(run for run in generation.version_runs if run[0] < count),
        experts=None
        if (known := generation.experts) is None
        else known[: len(known) + count - len(generation.ids)],
    )
    parsed = renderer.parse(generation.ids, tools)
    found = min((parsed.text.find(stop), stop) for stop in stops if stop in parsed.text)
    return generation, replace(parsed, text=parsed.text[: found[0]]), found[1]


def _completing(
    renderer: ChatRenderer, ids: IntArray, whole: ParsedReply, visible: str, tools: Sequence[ToolSpec]
) -> int:
    """Return how many ids produce the text `visible`, a prefix of the whole text.

    An open call parses as text until it closes, so a prefix of the ids may have text that the whole reply
    does not have. But once the text of a prefix begins like the whole text, so does that of every longer
    prefix, which allows bisection.
    """
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if renderer.parse(ids[:middle], tools).text.startswith(visible):
            high = middle
        else:
            low = middle + 1
    while low < len(ids):
        part = renderer.parse(ids[:low], tools)
        # An open call may spell the very text that follows it; then only the prefix is malformed.
        if part.text.startswith(visible) and part.malformed <= whole.malformed:
            break
        low += 1
    return low


def mint_call_id(seed: int, rollout_id: str, turn: int, index: int) -> str:
    """Return the wire id of a tool call: a function of its place in the run, so that runs repeat."""
    name = f"{seed}\0{rollout_id}\0{turn}\0{index}".encode()
    return "call_" + hashlib.blake2b(name, digest_size=12).hexdigest()


def minted(seed: int, rollout_id: str, turn: int, calls: Sequence[ParsedCall]) -> tuple[ToolCall, ...]:
    """Return the calls of a reply with their wire ids."""
    return tuple(
        ToolCall(id=mint_call_id(seed, rollout_id, turn, i), name=call.name, arguments=call.arguments)
        for i, call in enumerate(calls)
    )
