"""Open any token engine: in a learner process that does not train, or on a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, model_folder
from insitu.engines.base import Engine
from insitu.engines.factory import open_engine
from insitu.errors import ConfigError
from insitu.training.learner.client import Learner
from insitu.training.learner.process import LearnerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """An open engine."""

    engine: Engine
    check: Callable[[], Awaitable[None]]
    """Raises when it cannot answer any more; a server may come back, so only a learner's engine raises."""


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
        async with Learner.start(LearnerSpec.of(config, model=model_folder(config), log=log)) as learner:
            yield Sampler(engine=learner.engine, check=learner.check)
    else:
        async with open_engine(config, renderer, announce=announce) as engine:
            yield Sampler(engine=engine, check=_may_come_back)
