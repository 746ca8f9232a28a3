"""The channel and the engine over it: round trips, cancellation, a peer that dies."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from insitu.errors import EngineError, TrainError
from insitu.types import RequestKey, SamplingParams
from insitu_train.channel.rpc import Decoder, Frame, RpcClient, RpcPeer, encode
from insitu_train.channel.server import Handler, RpcCall, RpcServer
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.embedded.model import initialise, save_model
from insitu_train.embedded.service import EngineService
from insitu_train.learner.engine import LearnerEngine

MODEL = ModelConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, head_dim=8, intermediate_size=48)
OPTIONS = EngineOptions(max_rows=16, max_context=4096)


@contextmanager
def hosted(path: Path, handlers: dict[str, Handler], work: Callable[[], bool] = bool) -> Iterator[RpcServer]:
    """A server on its own thread, as a learner process runs it. `work` says whether it is busy."""
    with RpcServer(path, handlers) as server:
        stop = threading.Event()

        def loop() -> None:
            while not stop.is_set():
                server.poll(0.0 if work() else 0.05)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield server
        finally:
            stop.set()
            server.wake()
            thread.join(5)


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[RpcClient]:
    channel = await RpcClient.connect(path, deadline_s=5)
    try:
        yield channel
    finally:
        await channel.close()


async def eventually(true: Callable[[], bool]) -> None:
    """Wait, at most 5 s, for what another thread is about to do."""
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 s")


# ---------------------------------------------------------------- frames


def test_frames_survive_any_cut_of_the_stream() -> None:
    arrays = {
        "ids": np.arange(5, dtype=np.int32),
        "empty": np.zeros((0, 3), np.float32),
        "mask": np.array([[True], [False]]),
        "big": np.arange(6, dtype=">i8")[::2],
        "scalar": np.float64(2.5).reshape(()),
    }
    data = encode({"id": 1, "text": "é\n"}, arrays) + encode({"id": 2})
    for step in (1, 7, len(data)):
        decoder, frames = Decoder(), []
        for i in range(0, len(data), step):
            frames += list(decoder.feed(data[i : i + step]))
        assert [f.meta["id"] for f in frames] == [1, 2]
        assert frames[0].meta["text"] == "é\n"
        for name, array in arrays.items():
            assert np.array_equal(frames[0].arrays[name], array)
            assert frames[0].arrays[name].shape == array.shape


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        encode({"id": 1}).replace(b'"meta"', b'"mota"').replace(b"{", b"["),
        encode({"id": 1}, {"a": np.zeros(3, np.int32)}).replace(b"[3]", b"[2]"),
        encode({"id": 1}, {"a": np.zeros(3, np.int32)}).replace(b"<i4", b"|O8"),
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(EngineError, match="channel"):
        list(Decoder().feed(data))


def test_a_kept_array_keeps_nothing_that_came_along_with_it() -> None:
    long = encode({"id": 2}, {"ids": np.arange(10_000, dtype=np.int32)})
    short, _ = Decoder().feed(encode({"id": 1}, {"ids": np.arange(4, dtype=np.int32)}) + long)
    kept = short.arrays["ids"]
    while isinstance(kept.base, np.ndarray):
        kept = kept.base
    assert isinstance(kept.base, bytes)
    assert len(kept.base) == 16


def test_arrays_of_objects_are_not_sent() -> None:
    with pytest.raises(EngineError, match="not carried"):
        encode({}, {"a": np.array([object()])})


# ---------------------------------------------------------------- calls


async def test_replies_come_back_in_any_order(tmp_path: Path) -> None:
    held: list[RpcCall] = []

    def last(call: RpcCall) -> None:
        call.reply({"n": 99})
        for waiting in held:
            waiting.reply({"n": waiting.meta["n"]}, {"twice": waiting.arrays["x"] * 2})

    with hosted(tmp_path / "s", {"hold": held.append, "last": last}):
        async with connected(tmp_path / "s") as channel:
            x = np.arange(1_000_000, dtype=np.float32)
            waiting = [
                asyncio.ensure_future(channel.call("hold", {"n": n}, {"x": x + n}, deadline_s=10))
                for n in range(3)
            ]
            await eventually(lambda: len(held) == 3)
            assert (await channel.call("last", deadline_s=10)).meta["n"] == 99
            for n, frame in enumerate(await asyncio.gather(*waiting)):
                assert frame.meta["n"] == n
                assert np.array_equal(frame.arrays["twice"], (x + n) * 2)


async def test_errors_keep_their_class_and_line(tmp_path: Path) -> None:
    def refuse(call: RpcCall) -> None:
        raise TrainError(f"step {call.meta['step']} refused")

    with hosted(tmp_path / "s", {"train": refuse}):
        async with connected(tmp_path / "s") as channel:
            with pytest.raises(TrainError, match="^step 3 refused$"):
                await channel.call("train", {"step": 3}, deadline_s=5)
            with pytest.raises(EngineError, match="no command 'nope'"):
                await channel.call("nope", deadline_s=5)


async def test_a_cancelled_or_late_call_is_cancelled_at_the_server(tmp_path: Path) -> None:
    cancelled: list[str] = []

    def hold(call: RpcCall) -> None:
        call.on_cancel = lambda: cancelled.append(call.meta["name"])

    with hosted(tmp_path / "s", {"hold": hold, "ping": RpcCall.reply}):
        async with connected(tmp_path / "s") as channel:
            task = asyncio.ensure_future(channel.call("hold", {"name": "a"}, deadline_s=30))
            await channel.call("ping", deadline_s=5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(EngineError, match=r"did not answer hold within 0.1 s"):
                await channel.call("hold", {"name": "b"}, deadline_s=0.1)
            await channel.call("ping", deadline_s=5)
            assert cancelled == ["a", "b"]


async def test_a_vanished_client_cancels_only_its_own_calls(tmp_path: Path) -> None:
    cancelled: list[str] = []
    held: list[RpcCall] = []

    def hold(call: RpcCall) -> None:
        held.append(call)
        call.on_cancel = lambda: cancelled.append(call.meta["name"])

    with hosted(tmp_path / "s", {"hold": hold, "ping": RpcCall.reply}) as server:
        async with connected(tmp_path / "s") as stays:
            async with connected(tmp_path / "s") as leaves:
                kept = asyncio.ensure_future(stays.call("hold", {"name": "kept"}, deadline_s=10))
                lost = asyncio.ensure_future(leaves.call("hold", {"name": "lost"}, deadline_s=10))
                await eventually(lambda: len(held) == 2)
            with pytest.raises(EngineError, match="connection to learner was closed"):
                await lost
            await eventually(lambda: bool(cancelled))
            assert cancelled == ["lost"]
            assert not server.abandoned
            next(c for c in held if c.meta["name"] == "kept").reply({"ok": True})
            assert (await kept).meta["ok"]
        await eventually(lambda: server.abandoned)


async def test_a_stranger_on_the_socket_disturbs_nobody(tmp_path: Path) -> None:
    with hosted(tmp_path / "s", {"ping": RpcCall.reply}):
        async with connected(tmp_path / "s") as channel:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(tmp_path / "s"))
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                stranger.settimeout(5)
                assert stranger.recv(10) == b""
            assert isinstance(await channel.call("ping", deadline_s=5), Frame)


async def test_no_server_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"learner is not reachable at .*s after 0.1 s: No such file"):
        await RpcClient.connect(tmp_path / "s", deadline_s=0.1)


# ---------------------------------------------------------------- the engine over it


@asynccontextmanager
async def engine_on(path: Path, core: EmbeddedCore) -> AsyncIterator[LearnerEngine]:
    service = EngineService(core)

    def work() -> bool:
        service.step()
        return service.busy

    with hosted(path, dict(service.handlers), work):
        channel = await RpcClient.connect(path, deadline_s=5)
        try:
            yield await LearnerEngine.attach(channel, call_deadline_s=20)
        finally:
            await channel.close()


def key(name: str) -> RequestKey:
    return RequestKey(seed=1, rollout_id=name, turn=0)


async def test_generate_through_the_channel_equals_the_core(tmp_path: Path) -> None:
    core = EmbeddedCore(initialise(MODEL, 0), OPTIONS, version=3)
    ids = np.arange(50, dtype=np.int32)
    params = SamplingParams(max_tokens=20, temperature=0.8, stop_ids=frozenset({7}))
    direct: list[object] = []
    core.submit(ids, params, key("a"), direct.append)
    while core.busy:
        core.step()
    async with engine_on(tmp_path / "s", core) as engine:
        assert engine.info.max_context_tokens == 4096
        assert engine.receipt == core.receipt
        replies = await asyncio.gather(*[engine.generate(ids, params, key(n)) for n in "abc"])
        with pytest.raises(EngineError, match="context overflow"):
            await engine.generate(np.zeros(5000, np.int32), params, key("d"))
    wanted = direct[0]
    assert np.array_equal(replies[0].ids, wanted.ids)  # type: ignore[attr-defined]
    assert np.array_equal(replies[0].logprobs, wanted.logprobs)  # type: ignore[attr-defined]
    assert replies[0].finish == wanted.finish  # type: ignore[attr-defined]
    assert replies[0].version_runs == ((0, 3),)


async def test_cancelling_generate_aborts_at_the_core_and_pause_waits(tmp_path: Path) -> None:
    core = EmbeddedCore(initialise(MODEL, 0), OPTIONS)
    ids = np.arange(50, dtype=np.int32)
    async with engine_on(tmp_path / "s", core) as engine:
        endless = asyncio.ensure_future(engine.generate(ids, SamplingParams(max_tokens=4000), key("x")))
        await eventually(lambda: core.running > 0)
        pausing = asyncio.ensure_future(engine.pause())
        await asyncio.sleep(0.05)
        assert not pausing.done(), "a pause waits for what runs"
        endless.cancel()
        await pausing
        assert core.running == 0
        late = asyncio.ensure_future(engine.generate(ids, SamplingParams(max_tokens=2), key("y")))
        await asyncio.sleep(0.05)
        assert not late.done()
        core.refresh(9)
        await engine.resume()
        assert engine.receipt.version == 9
        assert (await late).version_runs == ((0, 9),)


@pytest.mark.parametrize("requests", [1, 20])
async def test_a_pause_waits_for_what_was_asked_before_it(tmp_path: Path, requests: int) -> None:
    """Also for requests that the core has not begun: read together with the pause, or without a free row."""
    core = EmbeddedCore(initialise(MODEL, 0), OPTIONS)
    ids = np.arange(50, dtype=np.int32)
    two = SamplingParams(max_tokens=2)
    async with engine_on(tmp_path / "s", core) as engine:
        before = [asyncio.ensure_future(engine.generate(ids, two, key(f"{i}"))) for i in range(requests)]
        pausing = asyncio.ensure_future(engine.pause())  # sent in the same turn of the loop
        async with asyncio.timeout(15):
            await pausing
            assert [len(made.ids) for made in await asyncio.gather(*before)] == [2] * requests
        late = asyncio.ensure_future(engine.generate(ids, two, key("late")))
        await asyncio.sleep(0.05)
        assert not late.done()
        await engine.resume()
        assert len((await late).ids) == 2


async def test_a_pause_that_was_given_up_holds_nobody(tmp_path: Path) -> None:
    core = EmbeddedCore(initialise(MODEL, 0), OPTIONS)
    ids = np.arange(50, dtype=np.int32)
    async with engine_on(tmp_path / "s", core) as engine:
        endless = asyncio.ensure_future(engine.generate(ids, SamplingParams(max_tokens=4000), key("x")))
        await eventually(lambda: core.running > 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.pause()
        assert len((await engine.generate(ids, SamplingParams(max_tokens=2), key("y"))).ids) == 2
        endless.cancel()
        await engine.pause()
        late = asyncio.ensure_future(engine.generate(ids, SamplingParams(max_tokens=2), key("z")))
        await asyncio.sleep(0.05)
        assert not late.done(), "a later pause holds as before"
        await engine.resume()
        await late


def _wait_for_pause(core: EmbeddedCore) -> None:
    """Let the event loop stand still until the core's thread has answered a pause."""
    end = time.monotonic() + 30
    while not core._paused and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)


async def test_a_pause_given_up_while_its_answer_is_on_its_way_holds_nobody(tmp_path: Path) -> None:
    core = EmbeddedCore(initialise(MODEL, 0), OPTIONS)
    ids = np.arange(50, dtype=np.int32)
    async with engine_on(tmp_path / "s", core) as engine:
        pausing = asyncio.ensure_future(engine.pause())
        await asyncio.sleep(0)
        _wait_for_pause(core)
        pausing.cancel()
        async with asyncio.timeout(30):
            assert len((await engine.generate(ids, SamplingParams(max_tokens=2), key("y"))).ids) == 2


async def test_a_call_without_an_answer_is_reported_once_unless_there_is_long_work() -> None:
    """Reported where nothing is heard and no long call waits: the other end may be stuck."""
    peer, late_ops = RpcPeer("learner"), list[str]()
    peer.attach(lambda data: None)
    peer.overdue = lambda op, silent_s: late_ops.append(op)
    step = asyncio.ensure_future(peer.call("train.step", deadline_s=60))
    await asyncio.sleep(0)
    calls = [asyncio.ensure_future(peer.call(f"engine.{n}", deadline_s=60, quiet_s=0.02)) for n in range(2)]
    await asyncio.sleep(0.2)
    assert late_ops == []
    step.cancel()
    await eventually(lambda: sorted(late_ops) == ["engine.0", "engine.1"])
    await asyncio.sleep(0.1)
    assert len(late_ops) == 2
    late = asyncio.ensure_future(peer.call("train.save", deadline_s=0.4))
    await eventually(lambda: "train.save" in late_ops)
    assert not late.done(), "half of its deadline is left"
    for call in (*calls, late):
        call.cancel()
    await asyncio.gather(step, late, *calls, return_exceptions=True)
    with pytest.raises(EngineError, match="which is not carried"):
        await peer.call("x", None, {"a": np.zeros(1, complex)}, deadline_s=1)
    assert (peer._long, peer._looks) == (0, {})


async def test_a_deadline_stands_still_with_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = [0.0]
    monkeypatch.setattr("insitu.stalls.stalled_s", lambda: stalled[0])
    peer = RpcPeer("learner")
    peer.attach(lambda data: None)
    call = asyncio.ensure_future(peer.call("engine.info", deadline_s=0.2))
    await asyncio.sleep(0)
    stalled[0] = 30.0
    await asyncio.sleep(0.5)
    assert not call.done()
    peer.feed(encode({"id": 1}))
    assert (await call).meta == {"id": 1}


@pytest.mark.slow
async def test_a_killed_learner_wakes_every_waiter_with_one_line(tmp_path: Path) -> None:
    save_model(initialise(MODEL, 0), tmp_path / "m")
    argv = [
        sys.executable,
        "-m",
        "insitu_train.embedded.service",
        str(tmp_path / "s"),
        str(tmp_path / "m"),
        "4096",
    ]
    process = await asyncio.create_subprocess_exec(*argv)
    try:
        channel = await RpcClient.connect(tmp_path / "s", deadline_s=60)
        engine = await LearnerEngine.attach(channel)
        params = SamplingParams(max_tokens=4000)
        waiters = [
            asyncio.ensure_future(engine.generate(np.arange(9, dtype=np.int32), params, key(f"k{i}")))
            for i in range(5)
        ]
        await engine.recognise()
        process.kill()
        for result in await asyncio.gather(*waiters, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert str(result) == "learner is gone: the connection ended"
        with pytest.raises(EngineError, match="learner is gone"):
            await engine.pause()
        await channel.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
def test_the_controllers_side_never_imports_torch() -> None:
    modules = "insitu_train.learner.engine, insitu_train.channel.server"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
