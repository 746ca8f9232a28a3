"""Open any token engine: in a process of its own, or on a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from insitu.chat.renderer import ChatRenderer
from insitu.config import Config
from insitu.engines.base import Engine
from insitu.engines.factory import open_engine
from insitu.errors import ConfigError
from insitu.registry import find


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """An open engine."""

    engine: Engine
    check: Callable[[], Awaitable[None]]
    """Raises when it cannot answer any more; a server may come back, so only a learner's engine raises."""


class LocalEngine(Protocol):
    """An engine that a run starts in a process of its own, by its name in the registry."""

    def check(self, config: Config) -> None:
        """Raise ConfigError where it could not start."""

    def open(
        self, config: Config, log: Path
    ) -> AbstractAsyncContextManager[tuple[Engine, Callable[[], Awaitable[None]]]]:
        """Start it; the second value raises when it cannot answer any more."""


def local_engine(config: Config) -> LocalEngine:
    """Return the configured engine of a run with `engine.in_learner`; raise ConfigError."""
    engine: LocalEngine = find("engines", config.engine.kind)
    return engine


async def _may_come_back() -> None:
    """Do nothing: an unreachable server is an error of each call."""


@asynccontextmanager
async def open_sampler(
    config: Config, renderer: ChatRenderer, log: Path, announce: Callable[[str], None]
) -> AsyncIterator[Sampler]:
    """Open the configured engine; `log` gets a learner's output, `announce` lines for the operator.

    Raises ConfigError, EngineError.
    """
    if config.policy_trouble:  # sft.run in the file of another verb
        raise ConfigError(config.policy_trouble)
    if config.engine.in_learner:
        async with local_engine(config).open(config, log) as (engine, check):
            yield Sampler(engine=engine, check=check)
    else:
        async with open_engine(config, renderer, announce=announce) as engine:
            yield Sampler(engine=engine, check=_may_come_back)
