"""Whole chat requests that a script takes, and the replies that it delivers, up to graded rollouts."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import insitu
from insitu.config import load_config
from insitu.errors import SetupError
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.progress.plain import PlainView
from insitu.tasks.toy import ToySource
from insitu.types import Limits, Status
from insitu_bridges.external import DeliveryRejected
from insitu_bridges.messages import MessageQueue, serve_messages

KEY = "a script's key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
ASK = {"model": "script", "messages": [{"role": "user", "content": "Hi."}]}


async def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body, headers={**HEADERS, **headers}) as answer,
    ):
        text = await answer.text()
        return answer.status, text if body.get("stream") else await answer.json()


async def taken(queue: MessageQueue) -> dict[str, Any]:
    (request,) = await queue.take(wait_s=10.0)
    return request


async def test_a_request_is_taken_once_and_answered_once() -> None:
    async with serve_messages(KEY) as queue:
        url = f"{queue.url}/v1/chat/completions"
        assert (await post(url, ASK, Authorization="Bearer other"))[0] == 401
        assert await queue.take() == []
        asking = asyncio.create_task(post(url, {**ASK, "name": "request-9"}))
        request = await taken(queue)
        assert request["name"] != "request-9", "what an agent writes names no request"
        assert (request["messages"], await queue.take()) == (ASK["messages"], [])
        call = {"function": {"name": "f", "arguments": {"x": {1}}}}
        for message, why in (
            ({}, "one of them is needed"),
            ({"tool_calls": [{}]}, "a call must be"),
            ({"content": "\ud800"}, "the message is not JSON: str is not valid UTF-8"),
            ({"tool_calls": [call]}, "the message is not JSON: Type is not JSON serializable: set"),
        ):
            with pytest.raises(DeliveryRejected, match=why):
                queue.deliver(request["name"], message)
        queue.deliver(request["name"], {"content": "Hello."})
        status, body = await asking
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello.")
        with pytest.raises(DeliveryRejected, match="is not open"):
            queue.deliver(request["name"], {"content": "Again."})


async def test_calls_are_streamed_and_failures_and_those_who_left_are_told() -> None:
    async with serve_messages(KEY) as queue:
        url = f"{queue.url}/v1/chat/completions"
        asking = asyncio.create_task(post(url, {**ASK, "stream": True}))
        call = {"function": {"name": "bash", "arguments": {"command": "ls"}}}
        queue.deliver((await taken(queue))["name"], {"content": None, "tool_calls": [call]})
        _, events = await asking
        assert '"arguments":"{\\"command\\":\\"ls\\"}"' in events
        assert '"finish_reason":"tool_calls"' in events
        assert events.endswith("data: [DONE]\n\n")
        asking = asyncio.create_task(post(url, ASK))
        queue.fail((await taken(queue))["name"], "no idea")
        status, body = await asking
        assert (status, body["error"]["message"]) == (500, "the script failed: no idea")
        asking = asyncio.create_task(post(url, ASK))
        request = await taken(queue)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(10.0):
            while request["name"] in queue._taken:  # noqa: ASYNC110 - the server sees who left
                await asyncio.sleep(0.01)
        with pytest.raises(DeliveryRejected, match="given up"):
            queue.deliver(request["name"], {"content": "Too late."})
    with pytest.raises(SetupError, match="needs a key"):
        async with serve_messages(""):
            pass


async def play(url: str) -> int:
    """Reply to everything over HTTP, as a script in another process does; return the number of requests."""
    source = ToySource(Limits())
    problems = {p.prompt: p for p in (source.problem(task) for task in source.tasks("eval", 0, 2))}
    count = 0
    while True:
        _, body = await post(f"{url}/v1/take", {"limit": 4, "wait_s": 5})
        for request in body["requests"]:
            count += 1
            said = {message["role"]: message["content"] for message in request["messages"]}
            problem = problems[said["user"]]
            edits = [{"oldText": problem.fault.old, "newText": problem.fault.new}]
            made = {"name": "edit", "arguments": {"path": problem.path, "edits": edits}}
            message: dict[str, Any] = {"content": "done"}
            if "tool" not in said:
                assert {tool["function"]["name"] for tool in request["tools"]} == {"read", "bash", "edit"}
                message = {"tool_calls": [{"function": made}]}
            answer = {"name": request["name"], "message": message}
            assert (await post(f"{url}/v1/deliver", answer))[0] == 200
        if count == 4:
            return count


@pytest.mark.slow
async def test_rollouts_of_a_script_are_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT_KEY", KEY)
    async with serve_messages(KEY) as queue:
        config = load_config(
            None,
            [
                "engine.kind=upstream", "engine.model=script", "engine.key_env=SCRIPT_KEY",
                f"engine.urls={queue.url}", "harness.agent=script", "harness.workers=2", "rollout.count=2",
                f"run.dir={tmp_path / 'run'}",
            ],
        )  # fmt: skip
        playing = asyncio.create_task(play(queue.url))
        await collect_rollouts(config, PlainView(StringIO()), RolloutOptions())
        assert await playing == 4
    rollouts = insitu.open_run(tmp_path / "run").rollouts()
    assert [(one.status, one.reward) for one in rollouts] == [(Status.OK, 1.0)] * 2
