"""A user's engine: what its code raises becomes an EngineError, and its replies are checked."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from insitu.engines.base import Engine, TracksSessions
from insitu.engines.response_checks import RawReply, checked
from insitu.errors import EngineError, user_code
from insitu.types import Generation, IntArray, RequestKey, SamplingParams


class GuardedEngine:
    """A user's engine, whose errors and wrong replies are EngineErrors; implements what it implements."""

    def __init__(self, engine: Engine, kind: str) -> None:
        self._engine, self._name = engine, f"engine.kind {kind}"

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if not inspect.iscoroutinefunction(value):
            return value

        async def guarded(*args: Any, **options: Any) -> Any:
            with user_code(EngineError, f"{self._name}: {name}"):
                return await value(*args, **options)

        return guarded

    def release(self, session: str) -> None:
        """Pass the end of a session on to an engine that keeps something for each."""
        if isinstance(self._engine, TracksSessions):
            self._engine.release(session)

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Return the engine's reply, checked as that of a server."""
        with user_code(EngineError, f"{self._name}: generate"):
            reply = await self._engine.generate(ids, params, key)
            scripted = self._engine.info.kind == "demonstrated"
            if not isinstance(reply, Generation) or (reply.logprobs is None) != scripted:
                wanted = "without" if scripted else "with"
                raise EngineError(f"{self._name}: generate returned no Generation {wanted} logprobs")
            raw = RawReply(
                ids=np.asarray(reply.ids).tolist(),
                logprobs=None if scripted else np.asarray(reply.logprobs, dtype=np.float64).tolist(),
                experts=reply.experts,
                finish=reply.finish,
                version_runs=reply.version_runs,
            )
            return checked(raw, ids, params, self._name, demonstrated=scripted)
