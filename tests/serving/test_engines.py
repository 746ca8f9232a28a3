"""`insitu serve` before engines that are servers, and before a provider: fakes here, a real process of
ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import insitu
from insitu.cli import main
from tests.fakes.provider import KEY, serve_provider
from tests.fakes.sglang import serve_sglang
from tests.fakes.vllm import serve_vllm

VOCAB = 448
"""Of the warm start."""


class Serving:
    """`insitu serve --json` and the events it said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of this name. Fails with what the process said instead."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while line := await self.process.stdout.readline():
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name:
                    return event
            raise AssertionError((await self.process.stderr.read()).decode())

    async def ended(self) -> tuple[int | None, str]:
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            said = await self.process.stderr.read()
            return await self.process.wait(), said.decode()


@asynccontextmanager
async def serving(tmp_path: Path, *arguments: str, **env: str) -> AsyncIterator[Serving]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "insitu", "serve", "--json", f"run.dir={tmp_path / 'run'}", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(insitu.__file__).parents[1]), **env},
    )  # fmt: skip
    try:
        yield Serving(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def post(session: dict[str, Any], path: str, body: object) -> tuple[int, Any]:
    head = {"Authorization": f"Bearer {session['secret']}"}
    url = f"{session['address']}/{path}"
    async with aiohttp.ClientSession(headers=head) as http, http.post(url, json=body) as answer:
        return answer.status, await answer.json(content_type=None)


ASK = {"model": "x", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_as_engine(tmp_path: Path, kind: str) -> None:
    async with serve_vllm(VOCAB) if kind == "vllm" else serve_sglang(VOCAB) as fake:
        arguments = [f"engine.kind={kind}", f"engine.urls={fake.url}", "engine.temperature=0.7"]
        async with serving(tmp_path, *arguments) as serve:
            session = await serve.event("session")
            status, reply = await post(session, "v1/chat/completions", ASK)
            assert status == 200
            assert reply["usage"]["completion_tokens"] <= 8
            assert fake.sampler.received[-1].temperature == 0.7
            serve.process.send_signal(signal.SIGINT)
            sealed = await serve.event("sealed")
            assert sealed["captured"] == sealed["trained"] == reply["usage"]["completion_tokens"]
        (stored,) = insitu.open_run(tmp_path / "run").rollouts()
        tokens = stored.tokens()
        assert tokens.ids[tokens.mask].tolist() == fake.sampler.received[-1].ids


@pytest.mark.slow
async def test_an_engine_that_cannot_be_trusted_is_not_served(tmp_path: Path) -> None:
    async with (
        serve_vllm(VOCAB, processed=False) as fake,
        serving(tmp_path, "engine.kind=vllm", f"engine.urls={fake.url}") as serve,
    ):
        code, said = await serve.ended()
        assert code not in (0, None)
        assert "--logprobs-mode processed_logprobs" in said
        assert said.count("\n") == 1


@pytest.mark.slow
async def test_sessions_with_calls_under_way_are_sealed_at_the_same_time(tmp_path: Path) -> None:
    """One after another they would take longer than a stop may."""
    names = [f"serve-{number}" for number in range(6)]
    async with serve_vllm(VOCAB) as fake:
        arguments = ["--sessions", "6", "--agent", "codex", "engine.kind=vllm", f"engine.urls={fake.url}"]
        async with serving(tmp_path, *arguments) as serve:
            sessions = [await serve.event("session") for _ in names]
            await serve.event("ready")
            for session in sessions:
                assert (await post(session, "v1/chat/completions", ASK))[0] == 200
            fake.sampler.token_delay_s = 5.0
            calls = [asyncio.create_task(post(session, "v1/chat/completions", ASK)) for session in sessions]
            async with asyncio.timeout(30):
                while len(fake.sampler.jobs) < len(names):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            serve.process.send_signal(signal.SIGINT)
            sealed = [await serve.event("sealed") for _ in names]
            assert await serve.ended() == (0, "")
            await asyncio.wait(calls)
        assert [session["rollout_id"] for session in sealed] == names
        assert all(session["trained"] > 0 for session in sealed)
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["rewards"].keys() == set(names)


@pytest.mark.slow
async def test_a_server_that_restarts_is_waited_for_and_its_session_lives(tmp_path: Path) -> None:
    """Away for a while, then started again: calls wait, and none of them fails."""
    async with serve_vllm(VOCAB) as fake:
        arguments = ["--agent", "codex", "engine.kind=vllm", f"engine.urls={fake.url}"]
        async with serving(tmp_path, *arguments) as serve:
            session = await serve.event("session")
            await serve.event("ready")
            fake.away = True
            calls = [asyncio.create_task(post(session, "v1/chat/completions", ASK)) for _ in range(6)]
            assert not (await asyncio.wait(calls, timeout=1.0))[0]
            fake.restart()
            fake.away = False
            assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 6
            assert (await post(session, "v1/chat/completions", ASK))[0] == 200
            assert fake.sampler.label == "0"
            serve.process.send_signal(signal.SIGINT)
            sealed = await serve.event("sealed")
            assert sealed["captured"] == sealed["trained"] + sum(sealed["excluded"].values()) > 0


@pytest.mark.slow
async def test_a_server_that_comes_back_with_other_weights_samples_nothing(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake:
        arguments = ["--agent", "codex", "engine.kind=vllm", f"engine.urls={fake.url}"]
        async with serving(tmp_path, *arguments) as serve:
            session = await serve.event("session")
            fake.restart()
            fake.sums = {name: "0" * 64 for name in fake.sums}
            assert (await post(session, "v1/chat/completions", ASK))[0] == 500
            reported = await serve.event("call")
            assert (reported["outcome"], reported["dead"]) == (
                "engine_failed",
                "vllm was started again with other weights",
            )


@pytest.mark.slow
async def test_a_trainer_is_told_where_to_come(tmp_path: Path) -> None:
    arguments = ["engine.kind=external", "engine.key_env=TRAINER_KEY"]
    async with serving(tmp_path, *arguments, TRAINER_KEY="t") as serve:
        line = (await serve.event("waiting"))["line"]
        url, head = line.split()[5], {"Authorization": "Bearer t"}
        async with (
            aiohttp.ClientSession(headers=head) as http,
            http.post(f"{url}/v1/take", json={"wait_s": 5}) as answer,
        ):
            (request,) = (await answer.json())["requests"]
            assert request["rollout_id"] == "probe"


@pytest.mark.slow
async def test_a_provider_is_served_and_its_text_is_recorded(tmp_path: Path) -> None:
    async with serve_provider() as fake:
        arguments = ["engine.kind=upstream", f"engine.urls={fake.url}", "engine.key_env=PROVIDER_KEY"]
        arguments += ["engine.model=big-model", "engine.prices={input=1.0, output=2.5}"]
        async with serving(tmp_path, *arguments, "--agent", "claude_code", PROVIDER_KEY=KEY) as serve:
            session = await serve.event("session")
            assert "big-model" in json.dumps(session["agents"])
            assert KEY not in json.dumps(session)
            assert (await post(session, "v1/messages", {**ASK, "model": "dearer"}))[0] == 404
            assert (await serve.event("call"))["outcome"] == "not_found"
            asked = {**ASK, "model": "big-model"}
            status, reply = await post(session, "v1/messages", asked)
            assert (status, reply["content"][0]["text"]) == (200, "hello")
            reported = await serve.event("call")
            assert (reported["prompt_tokens"], reported["sampled_tokens"]) == (100, 20)
            serve.process.send_signal(signal.SIGINT)
            sealed = await serve.event("sealed")
            assert sealed["cost"] == pytest.approx((100 * 1 + 20 * 2.5) / 1e6)
        (line,) = (tmp_path / "run" / "sessions" / "serve-0.1.jsonl").read_text().splitlines()
        assert json.loads(line)["request"] == asked


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["engine.kind=upstream"], "needs urls"),
        (["engine.kind=vllm", "engine.urls=http://127.0.0.1:9", "engine.start_timeout_s=0"], "not reachable"),
        (["engine.kind=vllm", "engine.urls=nowhere"], "is not an http or https URL"),
        (
            ["engine.kind=vllm", "engine.urls=http://127.0.0.1:9", "engine.max_cost=2"],
            "max_cost has no effect",
        ),
        (["engine.urls=http://127.0.0.1:9"], "urls has no effect with kind = 'embedded'"),
        (["engine.kind=external"], "an external trainer needs a key"),
        (["engine.kind=external", "engine.key_env=NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["engine.kind=upstream", "engine.urls=http://x"], "needs model"),
        (["engine.kind=upstream", "engine.urls=http://x", "engine.model=m", "engine.max_cost=1"], "max_cost"),
        (["engine.kind=vlm"], "did you mean vllm?"),
    ],
)
def test_what_a_person_gets_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(["serve", "--json", f"run.dir={tmp_path / 'run'}", *arguments]) != 0
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.slow
async def test_a_server_that_is_not_there_is_waited_for_aloud_and_not_for_ever(tmp_path: Path) -> None:
    arguments = [
        "engine.kind=vllm",
        "engine.urls=http://127.0.0.1:9",
        "engine.start_timeout_s=3",
    ]
    async with serving(tmp_path, *arguments) as serve:
        waiting = await serve.event("waiting")
        code, said = await serve.ended()
    gone = "vllm at http://127.0.0.1:9 is not reachable for "
    assert waiting["line"].startswith(f"waiting for vllm at http://127.0.0.1:9 (3 s): {gone}")
    assert code == 1
    (line,) = said.splitlines()
    assert line.startswith(f"insitu: {gone}")
    waited = "; waited 3 s for it (engine.start_timeout_s): start it, or leave it out of engine.urls"
    assert line.endswith(waited)
