"""Sessions of OpenEnv for TRL's harness worker: insitu runs the agent, TRL samples at its own server.

`engine.kind` is "vllm" at that server, whose weights TRL changes and whose versions TRL counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

from insitu.config import Config
from insitu.errors import ConfigError, TrainError
from insitu_bridges.rows import rows_alone
from insitu_bridges.thread import SourceThread
from insitu_bridges.to_openenv import training_trace
from insitu_bridges.trl.rollout_func import task_id
from insitu_bridges.trl.weights import SourceOwner
from insitu_bridges.versions import Need, check
from insitu_train.plan.step import PlanConfig

TRACE = Need(("openenv.core.harness:TrainingTrace",), ("schema_version", "turns"), complete=True)
RESULT = Need(("openenv.core.harness:VerifyResult",), ("env_reward", "done"), complete=True)


class HarnessSession:
    """One rollout; has the methods of an OpenEnv ResourceSession that owns its loop."""

    def __init__(self, source: Callable[[], SourceThread], plan: PlanConfig, task: str, key: int) -> None:
        """Start nothing: the agent begins with the session's first use."""
        self._plan = plan
        self._start: Callable[[], Future[Any]] = lambda: source().submit(lambda child: child.run(task, key))
        self._closed = False

    @cached_property
    def _running(self) -> Future[Any]:
        if self._closed:
            raise TrainError("the session was closed before its agent began")
        running = self._start()
        if self._closed:  # meanwhile: the first session opens the source
            running.cancel()
        return running

    def initial_messages(self) -> list[Any]:
        """Start the agent, which has its own prompt."""
        _ = self._running
        return []

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        raise TrainError(f"the agent has its own tools: {name} is not called from outside")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Return 0 when the rollout is graded. Raises TimeoutError, and what ended the source."""
        self._running.result(timeout_s)
        return 0

    def fetch_training_trace(self) -> Any:
        """Return the TrainingTrace of the finished rollout."""
        from openenv.core.harness import TrainingTrace

        return TrainingTrace(**training_trace(rows_alone(self._running.result(0), self._plan)))

    def verify(self, transcript: Any, final_state: Any = None) -> Any:
        """Return the VerifyResult; its reward is None when the rollout was not graded."""
        from openenv.core.harness import VerifyResult

        return VerifyResult(env_reward=self._running.result(0).reward, done=True)

    def close(self) -> None:
        """End the agent if it is still running."""
        self._closed = True
        if "_running" in vars(self):
            self._running.cancel()


class SessionFactory(SourceOwner):
    """Makes sessions: `HarnessRolloutWorker(harness_session_factory=partial(SessionFactory, config))`.

    Prompts are ids of tasks (`insitu_bridges.task_ids`).
    """

    def __init__(self, config: Config | Path | str, sampling: Mapping[str, Any] | None = None) -> None:
        """Check the sampling parameters of the trainer; the source is opened with the first session.

        Raises ConfigError for parameters that the engine does not sample with, and for an OpenEnv without the
        classes of a session.
        """
        super().__init__(config)
        check("openenv", TRACE, RESULT)
        self._keys = itertools.count()
        neutral = {"top_p": 1.0, "top_k": (0, -1), "min_p": 0.0, "repetition_penalty": 1.0}
        neutral["temperature"] = self.config.engine.temperature
        for name, value in (sampling or {}).items():
            allowed = neutral.get(name, value)
            if value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
                raise ConfigError(f"{name} {value} of the trainer: insitu samples with {allowed}")

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> HarnessSession:
        """Return a session for the task with this id; its first use starts the agent."""
        return HarnessSession(lambda: self.source, self._plan, task_id(task), next(self._keys))
