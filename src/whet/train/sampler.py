"""Any token engine, opened: in a learner process of ours that does not train, or a server.

Never imports torch. Callers: serve, evaluate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from whet.config import Config, model_folder
from whet.engine.base import Engine
from whet.engine.open import open_engine
from whet.render.family import Family
from whet.train.client import Learner, LearnerSpec


@asynccontextmanager
async def open_sampler(
    config: Config, family: Family, log: Path, announce: Callable[[str], None]
) -> AsyncIterator[Engine]:
    """The configured engine. `log` gets what a learner says; `announce` a line that the operator needs before
    a server can answer. Raises ConfigError, EngineError."""
    if config.engine.kind == "embedded":
        async with Learner.start(LearnerSpec.of(config, model=model_folder(config), log=log)) as learner:
            yield learner.engine
    else:
        async with open_engine(config, family, announce=announce) as engine:
            yield engine
