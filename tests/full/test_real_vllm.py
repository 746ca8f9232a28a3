"""A real vLLM server on this CPU, serving the warm start: ids, logprobs, control plane, a whole session.

The oracle of its logprobs is insitu's own Qwen3 forward, on which the trainer's gradient rests.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from vllm_lab import CLOSE, FAMILY, PROMPT, ask, gap, our_logprobs

from insitu.config import WARM_START, load_config
from insitu.engines.factory import open_engine
from insitu.engines.http import HttpOptions
from insitu.engines.probe import probe_engine
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.errors import EngineError
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.types import Ledger, Limits
from insitu_train.embedded.model import load_model, save_model
from insitu_train.plan.step import PlanConfig, PlanRow, StepPlan, pack_rows
from insitu_train.trainer.batch import make_batch
from insitu_train.trainer.scoring_server import ScoringServer
from insitu_train.trainer.served_reference import ServedReference
from tests.fakes.vllm_server import RealVllm, installed_vllm, start_vllm

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(real_vllm: RealVllm) -> AsyncIterator[VllmEngine]:
    async with open_vllm(HttpOptions(url=real_vllm.url, call_deadline_s=120.0)) as engine:
        await ask(engine, 0, 2)
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def restored(engine: VllmEngine, real_vllm: RealVllm) -> AsyncIterator[VllmEngine]:
    """For tests that change the weights: the ones it started with come back."""
    yield engine
    await engine.load(real_vllm.model, engine.receipt.version + 1)


@pytest.fixture(scope="module")
def raw_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    """The warm start as it is, served as vLLM starts by default: raw logprobs, no token route."""
    venv = installed_vllm(Path(__file__).parents[2] / "scripts" / "setup-vllm")
    log = tmp_path_factory.mktemp("raw") / "server.log"
    with start_vllm(venv, WARM_START, log, processed=False, scale_out=False) as server:
        yield server


def changed_copy(source: Path, folder: Path, seed: int) -> Path:
    """The model in `source` with noise on every matrix."""
    model = load_model(source)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.05 * parameter.std())
    folder.mkdir()
    save_model(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((WARM_START / name).read_bytes())
    return folder


UNDER_WAY_S = (0.3, 1.0, 3.0)
"""Times after which a long request may be under way. A slow engine has not begun; the server of a fast one
handles token by token what the engine is ahead, and takes no call before the reply is whole."""


async def until_idle(server: RealVllm) -> None:
    async with asyncio.timeout(60):
        while await asyncio.to_thread(running, server):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def running(server: RealVllm) -> int:
    """Requests that the server's scheduler holds, by its own metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.e+]+)$", text, re.MULTILINE)
    assert counts
    return int(sum(map(float, counts)))


# --------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
async def test_logprobs_are_those_of_our_own_forward(engine: VllmEngine, temperature: float) -> None:
    model = load_model(WARM_START)
    assert engine.server.route == "generate"
    replies = await asyncio.gather(*(ask(engine, turn, 64, temperature=temperature) for turn in range(4)))
    worst = max(gap(model, said, temperature) for said in replies)
    print(f"largest |vLLM - ours| at temperature {temperature}: {worst:.2e}")
    assert worst < CLOSE
    # The test can tell: at another temperature the same ids have other logprobs.
    assert max(gap(model, said, temperature * 1.1) for said in replies) > CLOSE


async def test_it_scores_as_a_teacher(engine: VllmEngine, real_vllm: RealVllm) -> None:
    said = await ask(engine, 20, 48)
    ids = np.concatenate([PROMPT, said.ids]).astype(np.int32)
    row = PlanRow(
        group_id="g", rollout_id="r", segment=0, advantage=0.0, weight=1.0, ids=ids,
        mask=np.arange(len(ids)) >= len(PROMPT),
        logprobs=np.zeros(len(ids), np.float32), versions=np.zeros(len(ids), np.int32),
    )  # fmt: skip
    plan = StepPlan(rows=(row,), batches=pack_rows([row], PlanConfig()), ledger=Ledger(), groups=1)
    teacher = ServedReference(ScoringServer(real_vllm.url, "train.reference", WARM_START, 120.0))
    found = teacher.logprobs(make_batch(plan, plan.batches[0]), 1.0).numpy()
    worst = float(np.abs(found - our_logprobs(load_model(WARM_START), PROMPT, said.ids, 1.0)).max())
    print(f"largest |vLLM's score of a prompt - ours|: {worst:.2e}")
    assert worst < CLOSE


async def test_a_long_prompt_comes_back_exactly(engine: VllmEngine) -> None:
    random = np.random.default_rng(0)
    prompt = np.concatenate([random.integers(3, FAMILY.vocab_size, 3000), PROMPT]).astype(np.int32)
    said = await ask(engine, 10, 16, prompt=prompt)
    assert gap(load_model(WARM_START), said, 1.0, prompt) < CLOSE


async def test_the_context_limit_is_the_servers(engine: VllmEngine) -> None:
    assert engine.info.max_context_tokens == 4096
    prompt = np.full(4096, 40, dtype=np.int32)
    with pytest.raises(EngineError, match="HTTP 400"):
        await ask(engine, 11, 1, prompt=prompt)


async def test_the_probe_accepts_it(engine: VllmEngine) -> None:
    for temperature in (1.0, 0.7):
        report = await probe_engine(engine, PROMPT, vocab_size=FAMILY.vocab_size, temperature=temperature)
        assert report.pairs >= 3
        assert report.largest_gap < 1e-4
        assert report.repeatable


async def test_the_configuration_opens_it(real_vllm: RealVllm, engine: VllmEngine) -> None:
    config = load_config(overrides=["engine.kind=vllm", f"engine.urls={real_vllm.url}"])
    async with open_engine(config, FAMILY) as opened:
        assert opened.receipt.version == engine.receipt.version
        assert (await ask(opened, 1, 8)).ids.tolist() == (await ask(engine, 1, 8)).ids.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_probe_refuses_raw_logprobs(raw_vllm: RealVllm, temperature: float) -> None:
    async with open_vllm(HttpOptions(url=raw_vllm.url, call_deadline_s=120.0)) as raw:
        assert raw.server.route == "completions"
        # What it reports is right at temperature 1, and only there.
        model = load_model(WARM_START)
        assert gap(model, await ask(raw, 0, 32), 1.0) < CLOSE
        assert gap(model, await ask(raw, 0, 32, temperature=0.7), 1.0) < CLOSE
        assert gap(model, await ask(raw, 0, 32, temperature=0.7), 0.7) > 0.1
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            await probe_engine(raw, PROMPT, vocab_size=FAMILY.vocab_size, temperature=temperature)


# --------------------------------------------------------------------------- control


async def test_cancelling_aborts_at_the_server(engine: VllmEngine, real_vllm: RealVllm) -> None:
    task = asyncio.create_task(ask(engine, 20, 3500))
    await asyncio.sleep(UNDER_WAY_S[1])
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await until_idle(real_vllm)


async def test_the_deadline_aborts_at_the_server(real_vllm: RealVllm, engine: VllmEngine) -> None:
    async with open_vllm(HttpOptions(url=real_vllm.url, call_deadline_s=1.0)) as hasty:
        with pytest.raises(EngineError, match="within 1 s"):
            await ask(hasty, 21, 3500)
    await until_idle(real_vllm)


async def test_pausing_with_abort_ends_what_runs(engine: VllmEngine, real_vllm: RealVllm) -> None:
    ends = []
    for wait_s in UNDER_WAY_S:
        task = asyncio.create_task(ask(engine, 22, 3500))
        await asyncio.sleep(wait_s)
        await engine.pause("abort")
        (end,) = await asyncio.gather(task, return_exceptions=True)
        await engine.resume()
        ends.append(str(end) if isinstance(end, EngineError) else "")
    assert any("aborted" in end for end in ends)
    assert len((await ask(engine, 22, 4)).ids) == 4


async def test_reloaded_weights_are_the_ones_that_sample(
    restored: VllmEngine, real_vllm: RealVllm, tmp_path: Path
) -> None:
    engine = restored
    before = await ask(engine, 30, 48)
    first = engine.receipt
    folder = await asyncio.to_thread(changed_copy, real_vllm.model, tmp_path / "one", 1)
    receipt = await engine.load(folder, first.version + 1)
    assert receipt.version == first.version + 1 == await engine.version()
    assert receipt.checksum != first.checksum
    after = await ask(engine, 30, 48)
    assert after.version_runs == ((0, first.version + 1),)
    assert gap(load_model(folder), after, 1.0) < CLOSE
    assert gap(load_model(WARM_START), after, 1.0) > 10 * CLOSE
    await engine.load(real_vllm.model, first.version + 2)
    again = await ask(engine, 30, 48)
    assert again.ids.tolist() == before.ids.tolist()
    assert gap(load_model(WARM_START), again, 1.0) < CLOSE


async def test_a_request_frozen_over_a_reload_has_two_versions(
    restored: VllmEngine, real_vllm: RealVllm, tmp_path: Path
) -> None:
    """And each token's logprob is the one of its own version's weights, over the whole context."""
    engine = restored
    folder = await asyncio.to_thread(changed_copy, real_vllm.model, tmp_path / "two", 2)
    for wait_s in UNDER_WAY_S:
        held = engine.receipt.version
        task = asyncio.create_task(ask(engine, 40, 3500))
        await asyncio.sleep(wait_s)
        await engine.load(folder, held + 1, mode="keep")
        said = await task
        if len(said.version_runs) > 1:
            break
        await engine.load(real_vllm.model, held + 2)
    else:
        pytest.skip("vLLM takes an update only when the request is whole: its server is behind its engine")
    assert [version for _, version in said.version_runs] == [held, held + 1]
    change = said.version_runs[1][0]
    assert said.logprobs is not None
    old = our_logprobs(load_model(WARM_START), PROMPT, said.ids, 1.0)
    new = our_logprobs(load_model(folder), PROMPT, said.ids, 1.0)
    assert np.abs(old - said.logprobs)[:change].max() < CLOSE
    assert np.abs(new - said.logprobs)[change:].max() < CLOSE


async def test_context_that_is_kept_over_an_update_is_used_and_named(
    restored: VllmEngine, real_vllm: RealVllm, tmp_path: Path
) -> None:
    """Keys and values of the old weights below tokens of the new ones: neither model's logprobs alone."""
    held = restored.receipt.version
    folder = await asyncio.to_thread(changed_copy, real_vllm.model, tmp_path / "two", 2)
    prompt = np.tile(PROMPT, 1 + 1500 // len(PROMPT))[:1500].astype(np.int32)
    options = HttpOptions(url=real_vllm.url, call_deadline_s=120.0, context_versions=1)
    async with open_vllm(options) as keeping:
        await keeping.load(real_vllm.model, held + 1, mode="keep")
        first = await ask(keeping, 50, 8, prompt=prompt)
        assert first.version_runs == ((0, held + 1),)
        await keeping.load(folder, held + 2, mode="keep")
        kept = await ask(keeping, 51, 8, prompt=prompt)
        assert kept.version_runs == ((0, held + 1),)
        assert (kept.times.cached or 0) > 1000
        await keeping.load(folder, held + 3, mode="keep")
        fresh = await ask(keeping, 52, 8, prompt=prompt)
        assert fresh.version_runs == ((0, held + 3),)
        assert (fresh.times.cached or 0) == 0
    assert gap(load_model(folder), fresh, 1.0, prompt) < CLOSE
    new, old = (gap(load_model(one), kept, 1.0, prompt) for one in (folder, WARM_START))
    print(f"kept context: {new:.2g} from the new weights alone, {old:.2g} from the old ones")
    assert min(new, old) > CLOSE


async def test_weights_that_a_cpu_server_would_mix_are_refused(raw_vllm: RealVllm) -> None:
    """It packs the output head, and a reload of tied weights leaves the packed one as it was."""
    async with open_vllm(HttpOptions(url=raw_vllm.url, call_deadline_s=120.0)) as raw:
        with pytest.raises(EngineError, match="would keep the old output head"):
            await raw.load(WARM_START, 1)
        assert gap(load_model(WARM_START), await ask(raw, 0, 32), 1.0) < CLOSE


# --------------------------------------------------------------------------- the whole path


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


async def test_a_session_over_the_gateway_is_trainable_to_the_bit(engine: VllmEngine) -> None:
    """Chat completions, streamed and not; what is exported has the logprobs of our forward."""
    limits = Limits(max_context_tokens=4096, max_call_tokens=48)
    async with Gateway(TokenBackend(engine, FAMILY)) as gateway, gateway.listen_tcp() as listener:
        session = gateway.open_session("real/0", seed=3, limits=limits, temperature=0.7)
        url = f"http://127.0.0.1:{listener.port}/s/{session.public_id}/v1/chat/completions"
        head = {"Authorization": f"Bearer {session.secret}"}
        messages: list[Any] = [
            {"role": "system", "content": "You fix code."},
            {"role": "user", "content": "Fix the file mod.py."},
        ]
        async with aiohttp.ClientSession(headers=head) as http:
            for turn in range(4):
                body = {"messages": messages, "tools": TOOLS, "stream": turn % 2 == 1}
                async with http.post(url, json=body) as answer:
                    assert answer.status == 200
                    raw = await answer.read()
                message = _message(raw, streamed=turn % 2 == 1)
                messages.append(message)
                for call in message.get("tool_calls") or []:
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "x = 1\n"})
                if not message.get("tool_calls"):
                    messages.append({"role": "user", "content": "Go on."})
        trajectory = await session.seal(5.0)
    assert trajectory.ledger.balanced
    assert trajectory.ledger.captured == sum(len(turn.ids) for turn in trajectory.turns) > 0
    assert trajectory.ledger.trained == trajectory.ledger.captured
    model = load_model(WARM_START)
    for segment in trajectory.segments:
        at = np.flatnonzero(segment.mask)
        ours = our_logprobs(model, segment.ids[:1], segment.ids[1:], 0.7)
        assert np.abs(ours[at - 1] - segment.logprobs[at]).max() < CLOSE
        assert set(segment.versions[at].tolist()) == {engine.receipt.version}


def _message(raw: bytes, *, streamed: bool) -> dict[str, Any]:
    """The assistant message as an agent would echo it."""
    if not streamed:
        message: dict[str, Any] = json.loads(raw)["choices"][0]["message"]
        return message
    text, calls = "", {}
    for line in raw.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += part.get("id") or ""
                call["name"] += part["function"].get("name") or ""
                call["arguments"] += part["function"].get("arguments") or ""
    message = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for _, c in sorted(calls.items())
        ]
    return message
