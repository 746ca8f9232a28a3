"""An engine server that is a process of its own and can be killed -9: vLLM's routes before a small model.

    python -m benchmarks._engine_process MODEL_FOLDER PORT

The routes are those of tests/fakes/vllm.py; what samples behind them is the embedded engine's core, so that
tokens and log-probabilities are a model's and reloaded weights are weights. It differs from vLLM in one way:
calls under way end before it pauses, also where they are to be frozen. It ends with its owner, whose end it
reads from its stdin. Caller: chaos, which starts and restarts it, as an operator does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch

from insitu.engines.safetensors_file import read_folder
from insitu.errors import EngineError
from insitu.types import Generation, RequestKey, SamplingParams
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.embedded.model import Qwen3, load_model
from tests.fakes.sampler import FakeSampler, Job
from tests.fakes.vllm import FakeVllm, listening
from tests.fakes.weight_folders import served_sums

MODULE = "benchmarks._engine_process"
START_S = 60.0
CONTEXT = 4096


class ModelSampler(FakeSampler):
    """Jobs go to a core of the embedded engine; `drive` must run meanwhile."""

    def __init__(self, model: Qwen3) -> None:
        super().__init__(model.vocab_size, label="default")
        self._model = model
        self.context = min(CONTEXT, model.max_positions)
        self._core = EmbeddedCore(model, EngineOptions(max_context=self.context, threads=1))
        self._numbers: dict[str, int] = {}
        self._work = asyncio.Event()

    async def drive(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._core.busy:
                self._core.step()
                await asyncio.sleep(0)

    async def run(self, job: Job) -> Job:
        await self._admitting.wait()
        made: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

        def done(result: Generation | EngineError) -> None:
            if made.done():
                return
            if isinstance(result, EngineError):
                made.set_exception(result)
            else:
                made.set_result(result)

        params = SamplingParams(
            max_tokens=job.max_tokens, temperature=job.temperature, stop_ids=frozenset(job.stop_ids)
        )
        key = RequestKey(seed=job.seed, rollout_id="", turn=0)
        self._numbers[job.name] = self._core.submit(np.array(job.prompt, np.int32), params, key, done)
        self.jobs.append(job)
        self._work.set()
        try:
            found = await made
        finally:
            self._core.abort(self._numbers.pop(job.name))
            self.jobs.remove(job)
        job.ids, job.finish = found.ids.tolist(), found.finish
        job.processed = [] if found.logprobs is None else found.logprobs.tolist()
        job.labels = [self.label] * len(job.ids)
        return job

    def abort(self, names: Collection[str] | None) -> int:
        known = [name for name in self._numbers if names is None or name in names]
        return sum(self._core.abort(self._numbers[name]) for name in known)

    async def pause(self, mode: str) -> None:
        await super().pause("wait" if mode == "keep" else mode)

    def load(self, folder: Path) -> None:
        with torch.no_grad():
            for mine, new in zip(self._model.parameters(), load_model(folder).parameters(), strict=True):
                mine.copy_(new)
        self._core.refresh(0)


class EngineProcess:
    """The server as its owner has it: at one port through all its lives."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Begin a life, with the weights of the model folder; does not wait until it answers."""
        command = [sys.executable, "-m", MODULE, str(self._model), str(self._port)]
        with self._log.open("ab") as out:
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)

    def answering(self) -> None:
        """Return when it does. Raises EngineError."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/v1/models", timeout=5):
                return
            time.sleep(0.05)
        raise EngineError(f"the engine did not answer within {START_S:g} s; its words are in {self._log}")

    def kill(self) -> None:
        """kill -9, if it lives."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait()
            if self._child.stdin is not None:
                self._child.stdin.close()
            self._child = None


def served(folder: Path) -> tuple[FakeVllm, ModelSampler]:
    """Routes with a model folder behind them."""
    sampler = ModelSampler(load_model(folder))
    fake = FakeVllm(sampler.model.vocab_size, max_model_len=sampler.context)
    fake.sampler, fake.sums = sampler, served_sums(read_folder(folder))
    return fake, sampler


async def serve(folder: Path, port: int) -> None:
    """Until the process ends."""
    fake, sampler = served(folder)
    async with listening(fake.app(), port):
        await sampler.drive()


def main(argv: list[str]) -> int:
    """MODEL_FOLDER PORT"""

    def until_alone() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=until_alone, daemon=True).start()
    asyncio.run(serve(Path(argv[0]), int(argv[1])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
