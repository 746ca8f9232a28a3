"""One gateway, one session, one scripted engine, one HTTP client, for the gateway's tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp

from insitu.chat.template import TemplateRenderer
from insitu.gateway.backend import CallReport
from insitu.gateway.request import GatewayConfig
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend, TokenSession
from insitu.types import IntArray, Limits, Message, RequestKey, ToolCall, Trajectory
from insitu_lab.exactness import training_faults
from insitu_train.demo.scripted import ScriptedEngine

ASK = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "Fix f."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


def said(text: str) -> Message:
    return Message(role="assistant", text=text)


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="", name=name, arguments=arguments)


def chunks_of(raw: bytes) -> list[dict[str, Any]]:
    """JSON of all data events but [DONE]."""
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


class Rig:
    """Answers call n with script[n]; the last entry repeats."""

    def __init__(
        self,
        renderer: TemplateRenderer,
        script: Sequence[Message | IntArray],
        *,
        unix: Path | None = None,
        limits: Limits | None = None,
        config: GatewayConfig | None = None,
        log_line: Callable[[str], None] = str,
        **engine: Any,
    ) -> None:
        self.script = list(script)
        engine.setdefault("sampled", True)
        self._renderer, self._engine_options = renderer, engine
        self._unix, self._config = unix, config or GatewayConfig()
        self._log_line = log_line
        self._limits = limits or Limits(max_calls=32, max_call_tokens=512, max_context_tokens=100_000)
        self._stack = AsyncExitStack()
        self.reports: list[CallReport] = []

    def _policy(self, ids: IntArray, key: RequestKey) -> Message | IntArray:
        return self.script[min(key.turn, len(self.script) - 1)]

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self.engine = ScriptedEngine(self._renderer, self._policy, **self._engine_options)
        self.gateway = await enter(
            Gateway(
                TokenBackend(self.engine, self._renderer),
                self._config,
                self.reports.append,
                log_line=self._log_line,
            )
        )
        if self._unix is None:
            listener = await enter(self.gateway.listen_tcp())
            self.origin = f"http://127.0.0.1:{listener.port}"
            connector: aiohttp.BaseConnector = aiohttp.TCPConnector()
        else:
            await enter(self.gateway.listen_unix(self._unix))
            self.origin = "http://gateway"
            connector = aiohttp.UnixConnector(str(self._unix))
        self.http = await enter(aiohttp.ClientSession(connector=connector))
        session = self.gateway.open_session("r/0", seed=7, limits=self._limits, listener=self._unix)
        assert isinstance(session, TokenSession)
        self.session = session
        self.base = f"{self.origin}/s/{self.session.public_id}/v1"
        self.auth = {"Authorization": f"Bearer {self.session.secret}"}
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def sealed(self) -> Trajectory:
        """What the session gives to training, after a check that it is what the engine gave."""
        trajectory = await self.session.seal(1.0)
        answers = {key.turn: answer for key, answer in self.engine.answers.items()}
        assert list(training_faults(trajectory, answers)) == []
        return trajectory

    async def post(self, body: object, **headers: str) -> tuple[int, Any]:
        """(status, decoded JSON) of one chat completion."""
        url = f"{self.base}/chat/completions"
        async with self.http.post(url, json=body, headers={**self.auth, **headers}) as response:
            return response.status, await response.json()

    async def stream(self, body: object) -> bytes:
        """Raw bytes of one streamed chat completion."""
        url = f"{self.base}/chat/completions"
        async with self.http.post(url, json=body, headers=self.auth) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            return await response.read()
