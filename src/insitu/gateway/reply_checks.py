"""Checks of each generation, besides those of the engine clients and the forest."""

from __future__ import annotations

from insitu.chat.renderer import ChatRenderer
from insitu.engines.base import Engine
from insitu.engines.response_checks import CONSTANT, WARM
from insitu.errors import EngineError, EngineUnavailable
from insitu.types import FloatArray, Generation


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
