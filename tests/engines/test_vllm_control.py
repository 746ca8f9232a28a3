"""New weights for a vLLM server: what is refused before, what is proven after, and what waits meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from insitu.engines.http import HttpOptions
from insitu.engines.safetensors_file import read_folder, read_tensors, sums_of, write_manifest, write_tensors
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.errors import EngineError
from insitu.types import Generation, RequestKey, SamplingParams
from tests.fakes.vllm import FakeVllm, serve_vllm
from tests.fakes.weight_folders import chance_folder, chance_tensors

VOCAB = 40
PROMPT = np.arange(5, 12, dtype=np.int32)
EMBED = "model.embed_tokens.weight"


def options(fake: FakeVllm, **more: Any) -> HttpOptions:
    return HttpOptions(url=fake.url, **{"call_deadline_s": 10.0, "control_deadline_s": 2.0, **more})


async def ask(engine: VllmEngine, max_tokens: int = 8, turn: int = 0) -> Generation:
    key = RequestKey(seed=1, rollout_id="r", turn=turn)
    return await engine.generate(PROMPT, SamplingParams(max_tokens=max_tokens), key)


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not happened():  # noqa: ASYNC110 - a test
            await asyncio.sleep(0.005)


def published(folder: Path, seed: str, version: int) -> Path:
    chance_folder(folder, seed)
    write_manifest(folder, version, sums_of(read_folder(folder)))
    return folder


async def test_the_receipt_names_every_tensor(tmp_path: Path) -> None:
    folder = published(tmp_path, "one", 1)
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        receipt = await engine.load(folder, 1)
        assert receipt.tensors == sums_of(chance_tensors("one"))
        assert receipt == engine.receipt


def flip(path: Path) -> None:
    """The last byte, which is one of a tensor's."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def other_sum(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace(orjson.loads(text)["tensors"][EMBED], "0" * 64))


REFUSED = {
    "a tensor changed": (lambda f: flip(f / "model.safetensors"), "has not the checksum it was published"),
    "half a file": (
        lambda f: _cut(f / "model.safetensors", 900),
        "not a complete safetensors|bytes that its shape",
    ),
    "an empty file": (lambda f: _cut(f / "model.safetensors", 0), "is not a complete safetensors file"),
    "a manifest that lies": (lambda f: other_sum(f / "weights.json"), "checksum is not that of its tensors"),
    "half a manifest": (lambda f: _cut(f / "weights.json", 40), r"weights\.json"),
    "another version": (lambda f: _relabel(f, 2), "holds version 2, not version 1"),
    "a tensor more": (lambda f: _add(f, "model.extra.weight"), "model.extra.weight was published and feeds"),
    "a tensor less": (lambda f: _drop(f, "model.layers.0.self_attn.k_proj.weight"), "would receive none"),
}


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _relabel(folder: Path, version: int) -> None:
    write_manifest(folder, version, sums_of(read_folder(folder)))


def _add(folder: Path, name: str) -> None:
    held = {n: t for n, t in chance_tensors("one").items()}
    write_tensors(folder / "model.safetensors", {**held, name: held["model.norm.weight"]})
    _relabel(folder, 1)


def _drop(folder: Path, name: str) -> None:
    held = {n: t for n, t in chance_tensors("one").items() if n != name}
    write_tensors(folder / "model.safetensors", held)
    _relabel(folder, 1)


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_not_whole_is_refused_before_anything_stops(what: str, tmp_path: Path) -> None:
    spoil, said = REFUSED[what]
    folder = published(tmp_path / "a", "one", 1)
    spoil(folder)
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        with pytest.raises(EngineError, match=said) as caught:
            await engine.load(folder, 1)
        assert "\n" not in str(caught.value)
        assert not fake.sampler.paused
        assert (await ask(engine)).version_runs == ((0, 0),)
        assert (await engine.load(published(tmp_path / "b", "two", 1), 1)).version == 1


async def test_a_parameter_that_kept_its_old_weights_is_named(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        await engine.load(chance_folder(tmp_path / "a", "one"), 1)
        fake.skips = "model.layers.1.self_attn.qkv_proj.weight"
        with pytest.raises(EngineError, match=r"layers\.1\.self_attn\.qkv_proj\.weight still has its old"):
            await engine.load(chance_folder(tmp_path / "b", "two"), 2)
        with pytest.raises(EngineError, match="its weights are unknown"):
            await ask(engine)
        fake.skips = ""
        await engine.load(tmp_path / "b", 2)
        assert (await ask(engine)).version_runs == ((0, 2),)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.qkv_proj.weight", EMBED])
async def test_a_parameter_that_held_what_was_published_must_hold_it_again(name: str, tmp_path: Path) -> None:
    """A sum that is neither the old one nor the new is no proof, whatever the server answered."""
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        await engine.load(chance_folder(tmp_path / "a", "one"), 1)
        fake.spoils = name
        for said in ("has other weights than were published", "still has its old weights"):
            with pytest.raises(EngineError, match=f"{name} {said}"):
                await engine.load(chance_folder(tmp_path / "b", "two"), 2)
        with pytest.raises(EngineError, match="its weights are unknown"):
            await ask(engine)
        fake.spoils = ""
        await engine.load(tmp_path / "b", 2)
        assert (await ask(engine)).version_runs == ((0, 2),)


async def test_the_first_update_must_reach_what_the_server_was_started_with(tmp_path: Path) -> None:
    """It held the published bytes before; and where one layer's norm holds them, so must the others'."""
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        fake.spoils = EMBED
        with pytest.raises(EngineError, match="embed_tokens.weight has other weights than were published"):
            await engine.load(chance_folder(tmp_path / "a", "start"), 1)
        fake.spoils = "model.layers.1.input_layernorm.weight"
        with pytest.raises(EngineError, match=r"layers\.1\.input_layernorm\.weight has other weights"):
            await engine.load(chance_folder(tmp_path / "b", "two"), 1)


async def test_a_server_that_holds_its_tensors_in_another_form_need_only_change_them(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        fake.shards = True
        for version, seed in enumerate(["one", "two", "three"], 1):
            await engine.load(chance_folder(tmp_path / seed, seed), version)
        fake.skips = EMBED
        with pytest.raises(EngineError, match="embed_tokens.weight still has its old"):
            await engine.load(chance_folder(tmp_path / "four", "four"), 4)


@pytest.mark.parametrize("route", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/weight_checker"])
async def test_a_server_that_never_answers_meets_a_deadline(route: str, tmp_path: Path) -> None:
    folder = chance_folder(tmp_path, "one")
    async with serve_vllm(VOCAB) as fake:
        hasty = options(fake, call_deadline_s=0.3, control_deadline_s=0.3)
        async with open_vllm(hasty) as engine:
            fake.hangs = {route}
            async with asyncio.timeout(5):
                with pytest.raises(EngineError, match=f"did not answer {route} within 0.3 s"):
                    await engine.load(folder, 1, mode="keep")
            fake.hangs = set()
            await engine.load(folder, 1, mode="keep")
            assert (await ask(engine)).version_runs == ((0, 1),)


async def test_a_call_that_comes_during_an_update_waits_for_the_new_weights(tmp_path: Path) -> None:
    folder = chance_folder(tmp_path, "one")
    async with serve_vllm(VOCAB, token_delay_s=0.005) as fake, open_vllm(options(fake)) as engine:
        early = asyncio.create_task(ask(engine, 60))
        await until(lambda: fake.sampler.jobs and len(fake.sampler.jobs[0].ids) > 3)
        loading = asyncio.create_task(engine.load(folder, 1, mode="keep"))
        await until(lambda: fake.sampler.paused or loading.done())
        late = asyncio.create_task(ask(engine, 5, turn=1))
        receipt = await loading
        assert [v for _, v in (await early).version_runs] == [0, 1]
        assert (await late).version_runs == ((0, receipt.version),)


async def test_context_is_kept_over_updates_until_it_is_too_old(tmp_path: Path) -> None:
    """Tokens bear the oldest weights that their context was computed with."""
    folders = [published(tmp_path / f"v{version}", f"v{version}", version) for version in range(5)]
    async with serve_vllm(VOCAB, token_delay_s=0.005) as fake:
        async with open_vllm(options(fake, context_versions=1)) as engine:
            await engine.load(folders[0], 0, mode="keep")
            flushed = fake.sampler.flushes
            assert flushed == 1, "what was computed before the first update has no name of its own"
            assert (await ask(engine, 4)).version_runs == ((0, 0),)
            long = asyncio.create_task(ask(engine, 120, turn=1))
            await until(lambda: fake.sampler.jobs and len(fake.sampler.jobs[0].ids) > 3)
            await engine.load(folders[1], 1, mode="keep")
            assert fake.sampler.flushes == flushed
            other = RequestKey(seed=3, rollout_id="other", turn=0)
            params = SamplingParams(max_tokens=4)
            assert (await engine.generate(PROMPT, params, other)).version_runs == ((0, 1),)
            sampled = len(fake.sampler.jobs[0].ids)
            await engine.load(folders[2], 2, mode="keep")
            assert fake.sampler.flushes == flushed + 1, "the running call's context is two versions old"
            reply = await long
            assert [version for _, version in reply.version_runs] == [0, 2]
            assert reply.version_runs[1][0] >= sampled
            assert (await engine.generate(PROMPT, params, other)).version_runs == ((0, 2),)
            await engine.load(folders[3], 3, mode="keep")
            assert (await engine.generate(PROMPT, params, other)).version_runs == ((0, 2),)
            await engine.load(folders[4], 4, mode="keep")
            assert (await engine.generate(PROMPT, params, other)).version_runs == ((0, 4),)
            assert fake.sampler.flushes == flushed + 1, (
                "a session without a running call begins its context again"
            )
        assert fake.salts[-4:] == ["insitu-1", "insitu-2", "insitu-2", "insitu-4"]
        assert fake.cleared == 0


async def test_sleep_drains_first_and_wake_lets_waiting_calls_go_on() -> None:
    async with serve_vllm(VOCAB, token_delay_s=0.005) as fake, open_vllm(options(fake)) as engine:
        running = asyncio.create_task(ask(engine, 30))
        await until(lambda: fake.sampler.jobs)
        await engine.sleep()
        assert fake.sleeping
        assert len((await running).ids) == 30
        waiting = asyncio.create_task(ask(engine, 4, turn=1))
        assert not (await asyncio.wait([waiting], timeout=0.1))[0]
        await engine.wake()
        assert not fake.sleeping
        assert len((await waiting).ids) == 4


async def test_a_sleep_may_outlast_the_time_of_a_call_and_weights_may_not(tmp_path: Path) -> None:
    folder = chance_folder(tmp_path, "one")
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake, call_deadline_s=0.3)) as engine:
        await engine.sleep()
        waiting = asyncio.create_task(ask(engine, 4))
        assert not (await asyncio.wait([waiting], timeout=0.5))[0]
        await engine.wake()
        assert len((await waiting).ids) == 4
        fake.hangs = {"/collective_rpc"}
        loading = asyncio.create_task(engine.load(folder, 1, mode="keep"))
        await until(lambda: fake.sampler.paused)
        with pytest.raises(EngineError, match=r"was loading weights or waking up|has not: its weights"):
            await ask(engine, 4, turn=1)
        with pytest.raises(EngineError, match="did not answer"):
            await loading


async def test_a_sleep_that_fails_does_not_keep_calls_for_ever() -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake, call_deadline_s=0.2)) as engine:
        fake.hangs = {"/sleep"}
        with pytest.raises(EngineError, match="did not answer /sleep"):
            await engine.sleep()
        async with asyncio.timeout(5):
            with pytest.raises(EngineError, match=r"or waking up for 0\.2 s"):
                await ask(engine, 4)


def adapter(folder: Path, seed: str, version: int) -> Path:
    folder.mkdir()
    write_tensors(folder / "adapter_model.safetensors", chance_tensors(seed, layers=1))
    (folder / "adapter_config.json").write_text("{}")
    write_manifest(folder, version, sums_of(read_folder(folder)))
    return folder


async def test_each_version_of_an_adapter_has_a_name_and_a_call_keeps_its_own(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB, token_delay_s=0.005) as fake, open_vllm(options(fake)) as engine:
        plain = await ask(engine)
        receipt = await engine.load(adapter(tmp_path / "a", "one", 1), 1)
        assert (receipt.version, receipt.tensors) == (1, sums_of(chance_tensors("one", layers=1)))
        running = asyncio.create_task(ask(engine, 60))
        await until(lambda: fake.sampler.jobs and len(fake.sampler.jobs[0].ids) > 3)
        await engine.load(adapter(tmp_path / "b", "two", 2), 2)
        assert (await running).version_runs == ((0, 1),)
        said = await ask(engine)
        assert said.version_runs == ((0, 2),)
        assert said.ids.tolist() != (await running).ids[:8].tolist() != plain.ids.tolist()
        await engine.load(adapter(tmp_path / "c", "three", 3), 3)
        assert [name.split("-")[1] for name in fake.adapters] == ["v2", "v3"]
        await engine.load(tmp_path / "c", 3)
        assert (await ask(engine)).version_runs == ((0, 3),)


async def test_an_adapter_that_is_gone_or_whose_base_changed_is_noticed(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake, open_vllm(options(fake)) as engine:
        await engine.load(adapter(tmp_path / "a", "one", 1), 1)
        fake.sampler.label = "7"
        with pytest.raises(EngineError, match="own weights changed below an adapter|no receipt"):
            await ask(engine)
        fake.sampler.label = "0"
        assert await engine.version() == 1
        fake.restart()
        with pytest.raises(EngineError, match="has lost adapter insitu-v1-"):
            await engine.version()
        with pytest.raises(EngineError, match="does not exist"):
            await ask(engine)
        await engine.load(tmp_path / "a", 1)
        assert (await ask(engine)).version_runs == ((0, 1),)


async def test_an_adapter_does_not_go_on_top_of_what_was_published_before(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB) as fake:
        async with open_vllm(options(fake)) as engine:
            await engine.load(published(tmp_path / "whole", "one", 3), 3)
        async with open_vllm(options(fake)) as engine:
            with pytest.raises(EngineError, match="holds weights of version 3 .* start it again"):
                await engine.load(adapter(tmp_path / "a", "one", 4), 4)
            assert not fake.adapters


def test_files_are_those_that_other_libraries_read(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    made = chance_tensors("x")
    write_tensors(tmp_path / "ours.safetensors", made)
    theirs = load_file(tmp_path / "ours.safetensors")
    assert sums_of(made) == {n: sums_of({n: made[n]})[n] for n in sorted(theirs)}
    assert all(np.array_equal(made[n].data, theirs[n].reshape(-1).view(np.uint8)) for n in theirs)
    save_file(theirs, tmp_path / "theirs.safetensors")
    assert sums_of(read_tensors(tmp_path / "theirs.safetensors")) == sums_of(made)
