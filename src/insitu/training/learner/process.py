"""The learner's process as the controller holds it: started, reached, explained when it dies, ended.

Never imports torch. Called by client.py.
"""

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
"""Characters of the child's standard error that an error line may carry."""
_GENERATION_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """What a learner is started with."""

    model: Path
    """Model folder; its tokenizer files go along into checkpoints."""
    train: TrainConfig = field(default_factory=TrainConfig)
    samples: bool = True
    """It holds an engine; otherwise a server elsewhere samples."""
    max_rows: int = 32
    """Requests that the engine runs at once."""
    max_context: int = 2048
    """Prompt plus sampled tokens of one request."""
    engine_threads: int = 1
    cache_tokens: int = 65536
    """Prompt tokens whose keys and values the engine keeps."""
    log: Path | None = None
    """File for the child's output; None = a temporary one."""
    restarts: int = 0
    """Times that one which is killed while it starts is started again."""
    start_deadline_s: float = 600.0
    """Of a start, and of one save, load, export or publication: what takes longer the larger the model is. A
    step has `train.step_timeout_s`."""
    call_deadline_s: float = _GENERATION_S
    """Of one generation."""
    beside_server: bool = False
    """It takes the GPUs that are least in use, since a server has another one."""
    shares_tensors: bool = False
    """A server maps its tensors (CUDA IPC)."""

    @classmethod
    def of(cls, config: Config, *, model: Path, log: Path | None = None) -> LearnerSpec:
        """The learner of a run's configuration."""
        table = config.train
        # Rollouts that run while the trainer trains wait for its step to end.
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
    """PYTHONPATH under which a child finds this very package."""
    own = str(Path(__file__).parents[3])
    return os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])


class Child:
    """The process and what it says on standard error."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path, log: Path) -> None:
        self.process, self._socket, self._log = process, socket, log
        self.connected: Callable[[], bool] = lambda: False
        self.max_wait_s = 5.0
        """How long the process may take to end by itself."""
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
                    # -P: a folder that happens to be the working directory must not supply modules
                    *(sys.executable, "-P", "-m", "insitu.training.learner.main", *arguments),
                    env=environment | {"PYTHONPATH": _module_path()},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            return cls(process, socket, log)

    @property
    def killed(self) -> bool:
        """It ended by a signal."""
        return (self.process.returncode or 0) < 0

    async def connect(self, deadline_s: float) -> RpcClient:
        """The channel, or EngineError as soon as the child has died."""
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
        """The error itself, or, if the child is dead, how it ended and its last words."""
        if not self.connected():
            # the socket closes a moment before the process can be reaped
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), 2.0)
        code = self.process.returncode
        if code is None:
            return error
        words = self._words()
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return EngineError(f"the learner died ({how}){': ' + words if words else ''}")

    def _words(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._started, self._log.stat().st_size - _TAIL))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return " | ".join(line.strip() for line in lines[-6:])

    def kill_if_cancelled(self) -> None:
        """End it at once when the current task is cancelled: a run that is stopped does not wait for the
        step, or the start, that the child is in."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def end(self) -> None:
        """Wait for the end, and force it when patience is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), self.max_wait_s)
            return
        self._kill()
        await self.process.wait()
