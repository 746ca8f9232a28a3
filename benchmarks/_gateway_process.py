"""The gateway under test, alone in its process, with an engine that answers at once.

Started by the benchmarks as `python -m benchmarks._gateway_process MODEL [DELAY_MS | URL of a vLLM server]`;
takes a JSON command a line on stdin and answers with one, so that its CPU time and memory are its own:
{"open": n} gives n sessions, {"mark": 1} what was used so far, {"seal": 1} the ledgers' sum of all sessions,
with "id" that of one. EOF ends it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks import _corpus
from insitu.chat.codec import Codec
from insitu.chat.model_files import read_folder
from insitu.chat.renderer import ChatRenderer
from insitu.chat.template import template_renderer
from insitu.engines.base import Engine, EngineInfo, Receipt
from insitu.engines.http import HttpOptions, open_http
from insitu.engines.vllm import VllmEngine, VllmServer
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.gateway.token_backend import TokenBackend
from insitu.types import (
    Generation,
    IntArray,
    Limits,
    Message,
    RequestKey,
    SamplingParams,
    ToolCall,
)

SAMPLED = 300
"""Tokens of a reply, as in the measurements of others."""
ROOMY = Limits(
    wall_s=1e6, max_calls=10**9, max_call_tokens=4096, max_session_tokens=10**9, max_context_tokens=10**7
)


class PreparedEngine:
    """Answers every request at once with ids and logprobs made beforehand: a tool call of SAMPLED tokens."""

    def __init__(self, renderer: ChatRenderer, delay_ms: float = 0.0, variants: int = 64) -> None:
        """With a delay each answer takes a random time up to it."""
        self._delay_s = delay_ms / 1e3
        self._chance = random.Random(0)
        self.info = EngineInfo(name="prepared", max_context_tokens=10**7)
        self.receipt = Receipt(version=0, checksum="prepared")
        self.calls = 0
        lines = _corpus.cycle(_corpus.sources(), 99)
        self.prepared = [self._reply(renderer, lines.__next__, i) for i in range(variants)]
        """Replies as (ids, logprobs)."""

    def _reply(self, renderer: ChatRenderer, line: Callable[[], str], index: int) -> tuple[IntArray, Any]:
        text = ""
        while True:
            arguments = orjson.dumps({"path": f"src/part_{index}.py", "content": text}).decode()
            call = ToolCall(id="", name="write", arguments=arguments)
            said = Message(role="assistant", text="I write the next part.", tool_calls=(call,))
            ids = renderer.render_reply(said)
            if len(ids) >= SAMPLED:
                break
            text += line()
        logprobs = np.full(len(ids), -math.log(renderer.vocab_size), dtype=np.float32)
        return ids, logprobs

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        if self._delay_s:
            await asyncio.sleep(self._delay_s * self._chance.random())
        sampled, logprobs = self.prepared[self.calls % len(self.prepared)]
        self.calls += 1
        return Generation(ids=sampled, logprobs=logprobs, finish="stop", version_runs=((0, 0),))

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class ClockedCodec(Codec):
    """A Codec that adds up the CPU time in which the tokenizer turns text into ids and ids into text."""

    cpu_ns = 0

    def _run(self, text: str) -> list[int]:
        start = time.thread_time_ns()
        try:
            return super()._run(text)
        finally:
            self.cpu_ns += time.thread_time_ns() - start

    def decode(self, ids: IntArray) -> str:
        start = time.thread_time_ns()
        try:
            return super().decode(ids)
        finally:
            self.cpu_ns += time.thread_time_ns() - start


class Served:
    """One gateway and what the benchmark asks of it."""

    def __init__(self, gateway: Gateway, codec: ClockedCodec, port: int) -> None:
        self._gateway, self._codec, self._port = gateway, codec, port
        self._sessions: list[Session] = []
        self._opened = 0

    async def answer(self, command: Mapping[str, Any]) -> Mapping[str, object]:
        if "open" in command:
            return {"port": self._port, "sessions": [self._open() for _ in range(command["open"])]}
        if "seal" in command:
            return await self._seal(command.get("id"))
        return self._mark(collect="collect" in command)

    def _open(self) -> dict[str, str]:
        session = self._gateway.open_session(f"bench/{self._opened}", seed=0, limits=ROOMY)
        self._opened += 1
        self._sessions.append(session)
        path = f"/s/{session.public_id}/v1/chat/completions"
        return {"id": session.public_id, "secret": session.secret, "path": path}

    def _mark(self, collect: bool) -> Mapping[str, object]:
        cpu_s = time.process_time()  # before the sweep below, which no call asked for
        if collect:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        return {
            "cpu_s": cpu_s,
            "tokenizer_s": self._codec.cpu_ns / 1e9,
            "rss_bytes": resident_bytes(),
            "tasks": len(asyncio.all_tasks()),
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names only
            "calls": sum(session.stats.calls for session in self._sessions),
            "defects": self._gateway.counters.defects,
        }

    async def _seal(self, name: str | None) -> Mapping[str, object]:
        """Seal one session or all; their sums. `held` counts every token the forests hold."""
        chosen = [s for s in self._sessions if name in (None, s.public_id)]
        self._sessions = [s for s in self._sessions if s not in chosen]
        total = {"captured": 0, "trained": 0, "held": 0}
        excluded: dict[str, int] = {}
        balanced, error = True, ""
        for session in chosen:
            done = await session.seal(5.0)
            error = error or session.stats.infra_error
            total["captured"] += done.ledger.captured
            total["trained"] += done.ledger.trained
            total["held"] += sum(len(t.ids) + len(t.context_ids) for t in done.turns)
            balanced &= done.ledger.balanced
            for reason, count in done.ledger.excluded.items():
                excluded[reason] = excluded.get(reason, 0) + count
        return {**total, "balanced": balanced, "excluded": excluded, "error": error}


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def engine_at(where: str, renderer: ChatRenderer) -> AsyncIterator[Engine]:
    """The prepared engine in this process, with a delay in ms, or the server at a URL."""
    if not where.startswith("http"):
        yield PreparedEngine(renderer, float(where))
        return
    server = VllmServer(model="m", max_context_tokens=10**7, route="generate", weights=None)
    async with open_http(HttpOptions(url=where), "the prepared server") as http:
        yield VllmEngine(http, server, Receipt(version=0, checksum="prepared"))


async def serve(folder: Path, where: str = "0") -> None:
    files = read_folder(folder)
    codec = ClockedCodec(files.tokenizer_json, files.renderer.control_tokens)
    renderer = template_renderer(files, codec)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with (
        engine_at(where, renderer) as engine,
        Gateway(TokenBackend(engine, renderer)) as gateway,
        gateway.listen_tcp() as listener,
    ):
        served = Served(gateway, codec, listener.port)
        while line := await lines.readline():
            sys.stdout.buffer.write(orjson.dumps(await served.answer(orjson.loads(line))) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), *sys.argv[2:]))
