"""The learner's process as a server of a run that does not train: `engines` embedded and tinker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from insitu.config import Config, model_folder
from insitu.engines.base import LoadingEngine
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec, require_learner


class InLearner:
    """Implements engines.factory.LocalEngine."""

    @staticmethod
    def check(config: Config) -> None:
        """Raise ConfigError with an install hint when a learner could not start."""
        require_learner(config)

    @staticmethod
    @asynccontextmanager
    async def open(
        config: Config, log: Path | None
    ) -> AsyncIterator[tuple[LoadingEngine, Callable[[], Awaitable[None]]]]:
        """Start a learner that only samples; its output goes to `log`. Raises EngineError."""
        async with Learner.start(LearnerSpec.of(config, model=model_folder(config), log=log)) as learner:
            yield learner.engine, learner.check
