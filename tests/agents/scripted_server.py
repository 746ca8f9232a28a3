"""A real OpenAI-compatible server on a unix socket that plays scripted replies and keeps the requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

Step = tuple[str, Mapping[str, Any]] | str
"""A tool call (name, arguments) or a final text."""
Script = Callable[[int, Sequence[Mapping[str, Any]]], Step | None]
"""(number of assistant messages so far, messages) -> step; None answers with HTTP 400."""

READ_EDIT_CHECK: tuple[Step, ...] = (
    ("read", {"path": "app.py"}),
    ("edit", {"path": "app.py", "edits": [{"oldText": "a + b", "newText": "a * b"}]}),
    ("bash", {"command": "python3 check.py"}),
    "Fixed the operator.",
)


def play(steps: Sequence[Step]) -> Script:
    return lambda turn, _messages: steps[min(turn, len(steps) - 1)]


class ScriptedServer:
    def __init__(self, path: Path, script: Script) -> None:
        self.path = path
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.secrets: list[str] = []
        self.paths: list[str] = []
        self.raw_arguments: list[str] = []
        """Sent instead of the script's own arguments, one per tool call, while they last."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if request.method != "POST":
            return web.json_response({"object": "list", "data": []})
        body = await request.json()
        self.requests.append(body)
        self.secrets.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        step = self.script(turn, body["messages"])
        if step is None:
            return web.json_response({"error": {"message": "the budget is spent", "type": "x"}}, status=400)
        message: dict[str, Any] = {"role": "assistant", "content": step if isinstance(step, str) else None}
        if not isinstance(step, str):
            arguments = self.raw_arguments.pop(0) if self.raw_arguments else json.dumps(step[1])
            function = {"name": step[0], "arguments": arguments}
            message["tool_calls"] = [
                {"index": 0, "id": f"call_{turn}", "type": "function", "function": function}
            ]
        finish = "stop" if isinstance(step, str) else "tool_calls"
        usage = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}
        head: dict[str, Any] = {"id": f"c{turn}", "created": 1, "model": "policy"}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            head |= {"object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(head)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta, reason in ((message, None), ({}, finish)):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            if reason:
                chunk["usage"] = usage
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
