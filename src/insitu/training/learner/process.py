"""The learner's child process: start, connect, explain its death, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from insitu.config import Config
from insitu.engines.rpc import RpcClient
from insitu.errors import EngineError, boundary
from insitu.training.learner import gpus
from insitu.training.learner.environment import computing
from insitu.training.options import TrainConfig, dump_config

_TAIL = 600
"""Characters of the child's standard error in an error message."""
_GENERATION_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """Arguments of a learner process."""

    model: Path
    """Model folder; its tokenizer files are copied into checkpoints."""
    train: TrainConfig = field(default_factory=TrainConfig)
    samples: bool = True
    """Run an engine; otherwise a server samples."""
    max_rows: int = 32
    """Concurrent requests of the engine."""
    max_context: int = 2048
    """Prompt plus sampled tokens of one request."""
    engine_threads: int = 1
    cache_tokens: int = 65536
    """Prompt tokens in the engine's prefix cache."""
    log: Path | None = None
    """File for the child's output; None = a temporary one."""
    restarts: int = 0
    """Restarts of a child that is killed while it starts."""
    start_deadline_s: float = 600.0
    """Timeout of a start, save, load, export or publication."""
    call_deadline_s: float = _GENERATION_S
    """Timeout of one generation."""
    beside_server: bool = False
    """Use the least used GPUs, since a server uses another one."""
    shares_tensors: bool = False
    """A server maps its tensors (CUDA IPC)."""

    @classmethod
    def of(cls, config: Config, *, model: Path, log: Path | None = None) -> LearnerSpec:
        """Return the learner of a run's configuration."""
        table = config.train
        # asynchronous rollouts wait for the training step to end
        waits_s = table.step_timeout_s if config.collect.max_staleness else 0.0
        return cls(
            model=model,
            train=TrainConfig.of(config),
            samples=config.engine.kind == "embedded",
            max_rows=config.engine.max_rows,
            max_context=config.model.max_context_tokens,
            engine_threads=config.engine.threads,
            log=log,
            restarts=table.restarts,
            start_deadline_s=table.start_timeout_s,
            call_deadline_s=_GENERATION_S + waits_s,
            beside_server=gpus.chooses(config),
            shares_tensors=config.engine.publish == "ipc",
        )


def absolute(path: Path) -> str:
    return str(path.absolute())


def _module_path() -> str:
    """Return the PYTHONPATH under which a child imports this package."""
    own = str(Path(__file__).parents[3])
    return os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])


class Child:
    """A learner process and its standard error."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path, log: Path) -> None:
        self.process, self._socket, self._log = process, socket, log
        self.connected: Callable[[], bool] = lambda: False
        self.max_wait_s = 5.0
        """Time for a clean exit."""
        self._started = log.stat().st_size

    @classmethod
    async def spawn(cls, spec: LearnerSpec, socket: Path, log: Path) -> Child:
        engine = {
            "max_rows": spec.max_rows,
            "max_context": spec.max_context,
            "threads": spec.engine_threads,
            "cache_tokens": spec.cache_tokens,
        }
        arguments = [
            *("--socket", str(socket), "--model", absolute(spec.model), "--parent", str(os.getpid())),
            *("--train", dump_config(spec.train), "--engine", json.dumps(engine) if spec.samples else ""),
        ]
        environment = computing(os.environ, shares_tensors=spec.shares_tensors)
        if spec.beside_server:
            environment |= await asyncio.to_thread(gpus.least_used, environment)
        with boundary(EngineError, "start the learner"):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    # -P: do not import from the working directory
                    *(sys.executable, "-P", "-m", "insitu.training.learner.main", *arguments),
                    env=environment | {"PYTHONPATH": _module_path()},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            return cls(process, socket, log)

    @property
    def killed(self) -> bool:
        """Whether it ended by a signal."""
        return (self.process.returncode or 0) < 0

    async def connect(self, deadline_s: float) -> RpcClient:
        """Return the channel. Raises EngineError as soon as the child has died."""
        dead = asyncio.ensure_future(self.process.wait())
        opened = asyncio.ensure_future(RpcClient.connect(self._socket, deadline_s=deadline_s))
        try:
            await asyncio.wait({dead, opened}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                raise await self.explain(EngineError("the learner did not start"))
            if late := opened.exception():
                raise EngineError(f"{late} (train.start_timeout_s)") from late
            channel = opened.result()
            self.connected = lambda: channel.alive
            return channel
        finally:
            dead.cancel()
            opened.cancel()
            await asyncio.gather(dead, opened, return_exceptions=True)

    async def explain(self, error: EngineError) -> EngineError:
        """Return the error itself, or, if the child is dead, its exit and last output."""
        if not self.connected():
            # the socket closes shortly before the process can be reaped
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), 2.0)
        code = self.process.returncode
        if code is None:
            return error
        words = self._last_output()
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return EngineError(f"the learner died ({how}){': ' + words if words else ''}")

    def _last_output(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._started, self._log.stat().st_size - _TAIL))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return " | ".join(line.strip() for line in lines[-6:])

    def kill_if_cancelled(self) -> None:
        """Kill it when the current task is cancelled: do not wait for its step or start."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def end(self) -> None:
        """Wait for the exit, then kill."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), self.max_wait_s)
            return
        self._kill()
        await self.process.wait()
