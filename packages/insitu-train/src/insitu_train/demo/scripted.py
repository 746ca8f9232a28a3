"""An engine without a model: a Python policy returns each reply.

Tokens are demonstrated (no logprobs) unless `sampled`: then each has a made-up logprob derived from its turn
and position, so that shifted or mis-sliced ones are detected. `sent` keeps every prompt and `answers` every
reply, for comparison with the content of the forest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from insitu.engines.base import EngineInfo, Receipt
from insitu.errors import EngineError
from insitu.types import FloatArray, Generation, IntArray, Message, RequestKey, SamplingParams

if TYPE_CHECKING:
    from insitu.chat.renderer import ChatRenderer

Policy = Callable[[IntArray, RequestKey], Message | IntArray]
"""(prompt ids, key) -> the reply as a message, or raw ids to be returned as they are (cut at max_tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request as the engine received it."""

    ids: IntArray = field(repr=False)
    params: SamplingParams
    key: RequestKey


def _made_up_logprobs(turn: int, count: int) -> FloatArray:
    """Logprobs between -5 and 0 of a reply's ids; neighbours in a reply and in turns differ."""
    places = np.arange(count, dtype=np.int64)
    return (-((turn * 7919 + places * 104729) % 9973 + 1) / 2048).astype(np.float32)


class ScriptedEngine:
    """Implements `insitu.engines.base.Engine`."""

    def __init__(
        self,
        renderer: ChatRenderer,
        policy: Policy,
        *,
        sampled: bool = False,
        delay_s: float = 0.0,
        fail: Callable[[RequestKey], EngineError | None] = lambda key: None,
        before: Callable[[RequestKey], Awaitable[None]] | None = None,
        max_context_tokens: int = 1 << 20,
        version: int = 0,
    ) -> None:
        self.sent: list[SentRequest] = []
        self.answers: dict[RequestKey, Generation] = {}
        """What was returned last for each key."""
        self.aborted: list[RequestKey] = []
        """Requests whose coroutine was cancelled."""
        self.in_flight = 0
        self.fail = fail
        """Called before each answer; an error it returns is raised."""
        self.before = before
        """Awaited before each answer, for tests that hold requests back."""
        self.delay_s = delay_s
        self.version = version
        self._renderer = renderer
        self._policy = policy
        self._sampled = sampled
        self._max_context = max_context_tokens
        self._running = asyncio.Event()
        self._running.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def info(self) -> EngineInfo:
        kind = "sampled" if self._sampled else "demonstrated"
        return EngineInfo(name="scripted", max_context_tokens=self._max_context, kind=kind)

    @property
    def receipt(self) -> Receipt:
        return Receipt(version=self.version, checksum="scripted")

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        await self._running.wait()
        self.sent.append(SentRequest(ids=ids.copy(), params=params, key=key))
        self.in_flight += 1
        self._idle.clear()
        try:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.before is not None:
                await self.before(key)
            error = self.fail(key)
            if error is not None:
                raise error
            return self._answer(ids, params, key)
        except asyncio.CancelledError:
            self.aborted.append(key)
            raise
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def _answer(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        reply = self._policy(ids, key)
        new = self._renderer.render_reply(reply) if isinstance(reply, Message) else reply
        stops = np.flatnonzero(np.isin(new, list(params.stop_ids)))
        end = int(stops[0]) + 1 if len(stops) else len(new)
        cut = end > params.max_tokens
        new = new[: min(end, params.max_tokens)].astype(np.int32)
        logprobs = None
        if self._sampled:
            logprobs = _made_up_logprobs(key.turn, len(new))
        answer = Generation(
            ids=new,
            logprobs=logprobs,
            finish="length" if cut or not len(stops) else "stop",
            version_runs=((0, self.version),),
        )
        self.answers[key] = answer
        return answer

    async def pause(self) -> None:
        self._running.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        self._running.clear()
