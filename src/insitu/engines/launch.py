"""Engine servers that a run starts, restarts when they die, and ends.

    async with launched(config) as urls: ...

Each is the child of a keeper (`keeper.py`), which ends it with all its processes when this process ends,
however it does. A server that died comes back with the weights of its start; `replicas.py` gives it the
run's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson

from insitu.concurrency import run_all
from insitu.config import Config, model_folder
from insitu.engines.http import EngineHttp, HttpOptions, open_http
from insitu.engines.safetensors_file import model_assets, read_folder, write_tensors
from insitu.engines.server_command import (
    Placement,
    ServerCommand,
    interpreter,
    place,
    present_gpus,
    server_command,
)
from insitu.engines.vllm_control import ties_embeddings
from insitu.errors import EngineError, EngineUnavailable, boundary
from insitu.storage.files import last_lines

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parents[2]
POLL_S = 0.5
RESTART_S = 1.0
"""Before a server that died is started again."""
LIVED_S = 600.0
"""A server that served so long starts with a new count of restarts."""
END_S = 10.0
"""Time for the keepers to end their servers, which takes them `keeper.GRACE_S`."""
_LOG_BYTES = 1 << 20
_CAUSE = re.compile(r"\b\w*(?:Error|Exception): +\S.{0,600}")
"""What a program raised: the first of a log is the cause, those that follow come of it."""
_HARMLESS = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")


class _ServerProcess:
    """One server process and its log."""

    def __init__(
        self, name: str, url: str, argv: Sequence[str], command: ServerCommand, log_file: Path
    ) -> None:
        self.name, self.url, self._argv, self._command = name, url, argv, command
        self.log_file = log_file
        self._from = 0
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"VLLM_NO_USAGE_STATS": "1", **self._command.environment}
        with boundary(EngineError, f"start {self.name}"):
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with self.log_file.open("ab") as output:
                self._from = output.tell()
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "insitu.engines.keeper", *self._argv),
                    env={**os.environ, **variables, "PYTHONPATH": path},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )

    async def until_healthy(self, http: EngineHttp, ends: float) -> None:
        """Return when it answers; raise EngineError with its last lines if it ends, or is late."""
        while True:
            with contextlib.suppress(EngineUnavailable):
                await http.get("/health", deadline_s=5.0)
                return
            if self.process.returncode is not None:
                raise EngineError(
                    f"{self.name} did not start (exit status {self.process.returncode}: {self.first_error()})"
                )
            if time.monotonic() >= ends:
                raise EngineError(
                    f"{self.name} did not answer in time (engine.start_timeout_s): {self.last_lines()}"
                )
            await asyncio.sleep(POLL_S)

    def end(self) -> str:
        """Return how it ended, with its last lines."""
        return f"exit status {self.process.returncode}: {self.last_lines()}"

    def last_lines(self) -> str:
        """Return the last lines since its start, and where the others are."""
        return f"{last_lines(self.log_file, self._from)} ({self.log_file})"

    def first_error(self) -> str:
        """Return the first error since its start, else its last lines, and where the others are."""
        with self.log_file.open("rb") as file:
            file.seek(self._from)
            lines = file.read(_LOG_BYTES).decode(errors="replace").splitlines()
        found = (_CAUSE.search(line) for line in lines if not _HARMLESS.search(line))
        cause = next(filter(None, found), None)
        return self.last_lines() if cause is None else f"{cause[0].strip()} ({self.log_file})"

    async def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self.process.wait()
                return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        await self.process.wait()


@asynccontextmanager
async def launched(config: Config, say: Callable[[str], None] = log.warning) -> AsyncIterator[list[str]]:
    """Run the configured servers inside the context; yield their URLs once all answer.

    `say` gets a line when they are started and when one dies. Raises ConfigError when they do not fit the
    GPUs, EngineError with the last lines of a server that does not start.
    """
    table = config.engine
    python, placement = await asyncio.to_thread(_checked, config)
    model = await asyncio.to_thread(_start_model, config, on_cpu=not placement.servers[0])
    servers = []
    for number, (gpus, port) in enumerate(zip(placement.servers, _free_ports(table.replicas), strict=True)):
        command = server_command(config, str(model), cpu=not gpus, port=port, gpus=gpus, number=number)
        servers.append(
            _ServerProcess(
                f"{table.kind} server {number}",
                f"http://127.0.0.1:{port}",
                [python, "-m", command.module, *command.arguments],
                command,
                Path(config.run.dir) / "logs" / f"engine-{number}.log",
            )
        )
    say(f"starting {len(servers)} {table.kind} servers on {_places(placement.servers)}")
    started: list[_ServerProcess] = []
    keepers: list[asyncio.Task[None]] = []
    try:
        for server in servers:
            await server.start()
            started.append(server)
        ends = time.monotonic() + table.start_timeout_s
        async with AsyncExitStack() as stack:
            options = [HttpOptions(url=one.url, retries=0) for one in servers]
            pools = [await stack.enter_async_context(open_http(one, table.kind)) for one in options]
            await run_all(*(one.until_healthy(pool, ends) for one, pool in zip(servers, pools, strict=True)))
        keepers = [asyncio.create_task(_keep(one, config.train.restarts, say)) for one in servers]
        yield [server.url for server in servers]
    finally:
        for task in keepers:
            task.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in started))


def _checked(config: Config) -> tuple[str, Placement]:
    return interpreter(config), place(config, present_gpus())


def _places(servers: Sequence[Sequence[str]]) -> str:
    return "; ".join(f"GPU {', '.join(gpus)}" if gpus else "the CPU" for gpus in servers)


async def _keep(server: _ServerProcess, restarts: int, say: Callable[[str], None]) -> None:
    """Start a server again whenever it ends, `restarts` times in a row."""
    deaths = 0
    while True:
        began = time.monotonic()
        await server.process.wait()
        deaths = 1 if time.monotonic() - began > LIVED_S else deaths + 1
        if deaths > restarts:
            say(f"{server.name} died {deaths} times and is not restarted (train.restarts): {server.end()}")
            return
        say(f"{server.name} died ({server.end()}); restarting it ({deaths} of {restarts})")
        await asyncio.sleep(RESTART_S)
        await server.start()


def _start_model(config: Config, *, on_cpu: bool) -> Path:
    """Return the model folder for a server; for vLLM on a CPU a copy with an output head of its own.

    There vLLM packs its matrices and would keep a tied head through every update.
    """
    model = model_folder(config).absolute()
    if not on_cpu or config.engine.kind != "vllm" or config.publishes_adapters or not ties_embeddings(model):
        return model
    folder = Path(config.run.dir).absolute() / "weights" / "start"
    with boundary(EngineError, f"write {folder}"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tensors = read_folder(model)
        write_tensors(
            folder / "model.safetensors",
            {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]},
        )
        described = orjson.loads((model / "config.json").read_bytes())
        (folder / "config.json").write_bytes(orjson.dumps({**described, "tie_word_embeddings": False}))
        for path in model_assets(model):
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    return folder


def _free_ports(count: int) -> list[int]:
    """Return free loopback ports."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
