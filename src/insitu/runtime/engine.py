"""Open any token engine: one that the run starts, a server, or another trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from insitu.chat.renderer import ChatRenderer
from insitu.config import Config
from insitu.engines.base import Engine
from insitu.engines.factory import open_engine
from insitu.engines.replicas import EngineSet, may_come_back
from insitu.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """An open engine."""

    engine: Engine
    check: Callable[[], Awaitable[None]]
    """Raises when it cannot answer any more; a server may come back, so only a learner's engine raises."""


@asynccontextmanager
async def open_sampler(
    config: Config, renderer: ChatRenderer, log: Path, announce: Callable[[str], None]
) -> AsyncIterator[Sampler]:
    """Open the configured engine; `log` gets a learner's output, `announce` lines for the operator.

    Raises ConfigError, EngineError.
    """
    if config.policy_trouble:  # sft.run in the file of another verb
        raise ConfigError(config.policy_trouble)
    async with open_engine(config, renderer, announce=announce, output=log) as engine:
        yield Sampler(engine=engine, check=engine.check if isinstance(engine, EngineSet) else may_come_back)
