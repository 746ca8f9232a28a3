"""The engine behind every gateway of the comparison: a vLLM server's routes with answers made beforehand.

Started as `python -m benchmarks._peer_engine MODEL`; prints its port as a JSON line and ends with its stdin.
`/v1/chat/completions` gives a tool call with the prompt's ids, 300 sampled ids and their logprobs; the ids of
a conversation go on from those of its last call, as a server that renders the conversation would say.
`/inference/v1/generate` gives ids and logprobs alone. Answers take no time worth measuring.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from benchmarks import _corpus
from benchmarks._gateway_process import PreparedEngine
from insitu.chat.template import TemplateRenderer
from insitu.engines.vllm import FRESH

BYTES_PER_TOKEN = 3.5


class CannedEngine:
    """Handlers of the routes."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        engine = PreparedEngine(renderer, variants=8)
        self._replies = []
        for ids, _ in engine.prepared:
            parsed = renderer.parse(ids)
            call = parsed.calls[0]
            content = [_logprob(at, i) for at, i in enumerate(ids.tolist())]
            said = {"text": parsed.text, "name": call.name, "arguments": call.arguments}
            self._replies.append((ids.tolist(), content, said))
        self._answered = 0
        self._talks: dict[str, tuple[list[int], int]] = {}
        """By first message: the ids so far, and the bytes they stand for."""

    def _next(self) -> tuple[list[int], list[dict[str, Any]], dict[str, str]]:
        self._answered += 1
        return self._replies[self._answered % len(self._replies)]

    async def chat(self, request: web.Request) -> web.Response:
        raw = await request.read()
        asked = orjson.loads(raw)
        ids, content, said = self._next()
        prompt = self._prompt(asked, len(raw))
        function = {"name": said["name"], "arguments": said["arguments"]}
        call = {"id": f"call_{self._answered}", "type": "function", "function": function}
        message = {"role": "assistant", "content": said["text"], "tool_calls": [call]}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": content},
            "finish_reason": "tool_calls",
            "token_ids": ids,
        }
        answer = {
            "id": f"chatcmpl-{self._answered}",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "prompt_token_ids": prompt,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            },
        }
        self._talks[self._key(asked)] = ([*prompt, *ids], len(raw))
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    def _key(self, asked: dict[str, Any]) -> str:
        return str(asked["messages"][0].get("content"))

    def _prompt(self, asked: dict[str, Any], size: int) -> list[int]:
        """The ids held, and new ones for what the body has more; what was sampled is among the former."""
        held, seen = self._talks.get(self._key(asked), ([], 0))
        new = max(1, int((size - seen) / BYTES_PER_TOKEN) - (len(self._replies[0][0]) if held else 0))
        return [*held, *(1000 + i % 5000 for i in range(new))]

    async def generate(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        ids, content, _ = self._next()
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "weight_versions": [{"version": FRESH, "start": 0, "end": len(ids)}],
        }
        answer: dict[str, Any] = {"request_id": str(self._answered), "choices": [choice]}
        if asked.get("return_token_ids"):
            answer["prompt_token_ids"] = asked["token_ids"]
        return web.Response(body=orjson.dumps(answer), content_type="application/json")


def _logprob(at: int, token: int) -> dict[str, Any]:
    """Of one sampled token, as vLLM lists it; they differ, or engines that invent them would not be found."""
    logprob = -0.25 - at % 7 / 64
    return {
        "token": f"token_id:{token}",
        "token_id": token,
        "logprob": logprob,
        "bytes": None,
        "top_logprobs": [],
    }


async def models(request: web.Request) -> web.Response:
    card = {"id": "m", "object": "model", "created": 0, "owned_by": "bench", "max_model_len": 10**7}
    return web.json_response({"object": "list", "data": [card]})


async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def serve(folder: Path) -> None:
    engine = CannedEngine(_corpus.load(folder))
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(
        [
            web.post("/v1/chat/completions", engine.chat),
            web.post("/inference/v1/generate", engine.generate),
            web.get("/v1/models", models),
            web.get("/health", health),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(orjson.dumps({"port": runner.addresses[0][1]}).decode(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
