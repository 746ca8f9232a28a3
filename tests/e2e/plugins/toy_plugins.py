"""One plug-in of each kind for the toy tasks; each writes its name to $PLUGINS_SEEN when it runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from insitu import Config, FinishedRollout, Recipe
from insitu.config import model_folder
from insitu.engines.base import EngineInfo, Receipt
from insitu.engines.safetensors_file import read_folder, sums_of, total
from insitu.sandbox.base import Sandbox, SandboxSpec
from insitu.sandbox.local import LocalBackend

ASK = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": sys.stdin.read()}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
"""


def seen(name: str) -> None:
    with Path(os.environ["PLUGINS_SEEN"]).open("a") as file:
        file.write(f"{name}\n")


def agent() -> Recipe:
    """Ask the model once, without tools."""
    seen("agent")
    return Recipe(name="asks_once", command=("python3", "-c", ASK))


def sampler(draws: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    seen("sampler")
    return draws + 1000


async def reward(rollout: FinishedRollout) -> float:
    seen("reward")
    return -1e-4 * sum(len(turn.ids) for turn in rollout.turns) - 1e-6 * len(rollout.transcript)


def advantage(rewards: np.ndarray) -> np.ndarray:
    seen("advantage")
    return rewards - rewards.mean()


class Backend(LocalBackend):
    name = "mine"

    async def create(self, spec: SandboxSpec) -> Sandbox:
        seen("sandbox")
        return await super().create(spec)


def sandbox(config: Config) -> Backend:
    return Backend()


class Engine:
    """Sample in the controller's process, with the weights that the trainer publishes as files."""

    def __init__(self, folder: Path, max_context: int) -> None:
        self._max_context, self._running = max_context, asyncio.Event()
        self._running.set()
        self.info = EngineInfo(name="mine", max_context_tokens=max_context)
        self.receipt = self._read(folder, 0)

    def _read(self, folder: Path, version: int) -> Receipt:
        from insitu_train.embedded.core import EmbeddedCore, EngineOptions
        from insitu_train.embedded.model import load_model

        options = EngineOptions(max_rows=4, max_context=self._max_context)
        self._core = EmbeddedCore(load_model(folder), options, version=version)
        sums = sums_of(read_folder(folder))
        return Receipt(version=version, checksum=total(sums), tensors=sums)

    async def generate(self, ids: Any, params: Any, key: Any) -> Any:
        await self._running.wait()
        done: list[Any] = []
        self._core.submit(ids, params, key, done.append)
        while not done:
            self._core.step()
            await asyncio.sleep(0)
        if isinstance(done[0], Exception):
            raise done[0]
        return done[0]

    async def pause(self) -> None:
        self._running.clear()
        while self._core.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def resume(self) -> None:
        self._running.set()

    async def load(self, folder: Path, version: int, *, mode: str = "wait") -> Receipt:
        seen("engine")
        await self.pause()
        self.receipt = self._read(folder, version)
        await self.resume()
        return self.receipt

    async def version(self) -> int:
        return self.receipt.version

    async def recognise(self) -> Receipt:
        return self.receipt

    async def has_own_head(self) -> bool:
        return False

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def engine(config: Config) -> AsyncIterator[Engine]:
    yield Engine(model_folder(config), config.model.max_context_tokens)
