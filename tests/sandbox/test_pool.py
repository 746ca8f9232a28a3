"""The pool over fake backends: permits, spares, retries, circuits and the choice between backends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from insitu.agents.artifacts import attribute_loss
from insitu.errors import (
    ImageMissing,
    ImageUnavailable,
    PolicyUnsupported,
    SandboxError,
    SandboxLost,
    SandboxStartError,
    SandboxTransient,
    SetupError,
)
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.circuit_breaker import CircuitOptions
from insitu.sandbox.pool import Pool, PoolOptions
from insitu.types import FileEntry
from tests.fakes.sandbox import FakeBackend

PLAIN = SandboxSpec()


def options(**more: float) -> PoolOptions:
    circuit = CircuitOptions(threshold=3, window_s=60, cooldown_s=more.pop("cooldown_s", 0.01))
    known = {"max_sandboxes": 4, "warm": 0, "boot_attempts": 3, "pause_s": 0.0, "down_s": 5.0}
    return PoolOptions(circuit=circuit, **{**known, **more})


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.002)


class Reaping(FakeBackend):
    leaked = 0

    async def reap(self) -> int:
        found, self.leaked = self.leaked, 0
        return found


async def test_a_permit_is_held_until_the_sandbox_is_closed() -> None:
    backend = FakeBackend()
    async with Pool([backend], options(max_sandboxes=2)) as pool:
        first, second = await pool.create(PLAIN), await pool.create(PLAIN)
        third = asyncio.ensure_future(pool.create(PLAIN))
        await asyncio.sleep(0.01)
        assert len(backend.sandboxes) == 2
        await first.close()
        await first.close()
        sandbox = await asyncio.wait_for(third, 5)
        fourth = asyncio.ensure_future(pool.create(PLAIN))
        await asyncio.sleep(0.01)
        assert not fourth.done(), "closing twice gave two permits"
        await sandbox.close()
        await second.close()
        await (await fourth).close()
        assert pool.live == 0


async def test_a_start_that_fails_is_tried_again_boundedly() -> None:
    backend = FakeBackend()
    backend.boot_errors = [SandboxStartError("one"), SandboxLost("two"), None]
    async with Pool([backend], options()) as pool:
        async with await pool.create(PLAIN):
            assert len(backend.asked) == 3
        backend.boot_errors = [SandboxStartError(str(n)) for n in range(9)]
        with pytest.raises(SandboxStartError, match="^2$"):
            await pool.create(PLAIN)
        assert len(backend.boot_errors) == 6
        backend.boot_errors = []
        sandboxes = [await pool.create(PLAIN) for _ in range(4)]
        assert len(sandboxes) == 4, "the failed start kept its permit"


@pytest.mark.parametrize("error", [PolicyUnsupported("no"), ImageMissing("no such image")])
async def test_what_no_try_can_help_is_raised_at_once_and_blames_nobody(error: SandboxError) -> None:
    backend = FakeBackend()
    async with Pool([backend], options()) as pool:
        for _ in range(10):
            backend.boot_errors = [error]
            with pytest.raises(type(error)):
                await pool.create(PLAIN)
        assert len(backend.asked) == 10
        assert pool.members[0].circuit.failures == 0


class Fetching(FakeBackend):
    """Has images, which come late."""

    fetch_s = 0.0

    async def image_digest(self, image: str) -> str:
        await asyncio.sleep(self.fetch_s)
        return image


async def test_an_image_that_cannot_be_fetched_is_tried_again_and_blames_nobody() -> None:
    backend = Fetching()
    spec = SandboxSpec(image="a:1")
    async with Pool([backend], options(boot_timeout_s=5)) as pool:
        backend.boot_errors = [ImageUnavailable("registry down")] * 2
        await (await pool.create(spec)).close()
        assert len(backend.asked) == 3
        backend.boot_errors = [ImageUnavailable("registry down")] * 30
        for _ in range(5):
            with pytest.raises(ImageUnavailable):
                await pool.create(spec)
        assert len(backend.boot_errors) == 15
        assert pool.members[0].circuit.failures == 0
    backend.fetch_s = 60
    async with Pool([backend], options(boot_timeout_s=0.01)) as pool:
        with pytest.raises(ImageUnavailable, match=r"^image a:1: not downloaded within 0\.01 s$"):
            await pool.create(spec)
        assert pool.members[0].circuit.failures == 0


@pytest.mark.parametrize("error", [OSError("disk full"), SetupError("no daemon"), TimeoutError()])
async def test_a_trial_that_fails_of_anything_is_a_failed_trial(error: Exception) -> None:
    backend = FakeBackend()
    backend.boot_errors = [SandboxStartError("down")] * 3 + [error]
    async with Pool([backend], options(boot_attempts=4)) as pool, await pool.create(PLAIN):
        circuit = pool.members[0].circuit
        assert (circuit.state, circuit.trips) == ("closed", 2)


async def test_a_hanging_start_ends_at_its_limit() -> None:
    backend = FakeBackend()
    backend.boot_s = 60
    async with Pool([backend], options(boot_timeout_s=0.01, boot_attempts=2)) as pool:
        with pytest.raises(SandboxStartError, match=r"fake: a sandbox was not ready within 0\.01 s"):
            await pool.create(PLAIN)


async def test_only_idempotent_calls_are_made_again() -> None:
    backend = FakeBackend()
    async with Pool([backend], options()) as pool, await pool.create(PLAIN) as sandbox:
        backend.call_errors = [SandboxTransient("reset"), SandboxTransient("reset")]
        await sandbox.put(f"{sandbox.workdir}/a", b"x")
        assert (await sandbox.get_tree())["a"].content == b"x"
        backend.call_errors = [SandboxError("broken"), None]
        with pytest.raises(SandboxError, match="broken"):
            await sandbox.put_tree({"b": FileEntry(content=b"")})
        assert backend.call_errors == [None]
        backend.call_errors = [SandboxTransient("reset")] * 9
        with pytest.raises(SandboxTransient):
            await sandbox.kill_all()
        assert len(backend.call_errors) == 6
        assert pool.members[0].circuit.failures == 1
        backend.call_errors = []
        runs = 0

        async def stumbling(run: object) -> int:
            nonlocal runs
            runs += 1
            raise SandboxTransient("reset")

        backend.programs["stumble"] = stumbling
        with pytest.raises(SandboxTransient):
            await sandbox.exec(["stumble"], timeout_s=5)
        assert runs == 1


async def test_a_sandbox_lost_to_what_ran_in_it_is_no_mark_against_the_backend() -> None:
    backend = FakeBackend()
    async with Pool([backend], options()) as pool:
        for _ in range(5):
            async with await pool.create(PLAIN) as sandbox:
                await backend.sandboxes[-1].lose()
                with pytest.raises(SandboxLost):
                    await sandbox.get_tree()
        assert pool.members[0].circuit.state == "closed"
        assert pool.members[0].circuit.failures == 0


async def test_a_broken_backend_is_left_alone_until_its_probe_succeeds() -> None:
    good, bad = FakeBackend(name="good"), Reaping(name="bad")
    bad.boot_errors = [SandboxStartError("daemon gone")] * 5
    async with Pool([good, bad], options(boot_attempts=9)) as pool:
        sandboxes = [await pool.create(PLAIN) for _ in range(4)]
        assert len(good.open) == 4
        circuit = pool.members[1].circuit
        while len(bad.boot_errors) > 2:
            for sandbox in sandboxes:
                await sandbox.close()
            sandboxes = [await pool.create(PLAIN) for _ in range(4)]
        assert circuit.trips >= 1
        bad.leaked = 3
        # Two trials of the five errors are left: the cool-down doubles, then the third works.
        await until(lambda: circuit.state == "closed")
        assert circuit.trips == 3
        assert pool.reaped == 3
        assert bad.open == []
        for sandbox in sandboxes:
            await sandbox.close()
        sandboxes = [await pool.create(PLAIN) for _ in range(4)]
        assert (len(good.open), len(bad.open)) == (2, 2)
        for sandbox in sandboxes:
            await sandbox.close()


async def test_when_all_are_down_a_sandbox_waits_for_the_first_to_recover() -> None:
    backend = FakeBackend()
    backend.boot_errors = [SandboxStartError("down")] * 4
    async with Pool([backend], options(boot_attempts=4)) as pool:
        async with await pool.create(PLAIN):
            assert pool.members[0].circuit.state == "closed"
        # Three failed starts, one failed trial; then the trial that worked, then the sandbox.
        assert [spec.label for spec in backend.asked] == ["", "", "", "probe", "probe", ""]


async def test_when_all_stay_down_the_best_is_tried_and_the_cause_told() -> None:
    backend = FakeBackend()
    backend.boot_errors = [SandboxStartError("down")] * 100
    async with Pool([backend], options(boot_attempts=4, cooldown_s=60, down_s=0.01)) as pool:
        with pytest.raises(SandboxStartError, match="^down$"):
            await pool.create(PLAIN)
        with pytest.raises(SandboxStartError, match="^down$"):
            await pool.create(PLAIN)
        assert pool.members[0].circuit.state == "open"
        backend.boot_errors = []
        await (await pool.create(PLAIN)).close()
        assert pool.members[0].circuit.state == "closed"


async def test_a_spec_goes_to_a_backend_that_offers_it() -> None:
    plain = FakeBackend(name="plain", capabilities=frozenset({"network_none", "syscall_filter"}))
    images = FakeBackend(name="images", capabilities=frozenset({"network_none", "images"}))
    async with Pool([plain, images], options()) as pool:
        assert pool.capabilities == {"network_none", "images"}
        assert pool.name == "plain+images"
        for _ in range(3):
            async with await pool.create(SandboxSpec(image="python:3.12")):
                assert len(images.open) == 1
        with pytest.raises(PolicyUnsupported):
            await pool.create(SandboxSpec(network="public"))


async def test_a_spec_that_comes_again_finds_a_sandbox_ready() -> None:
    backend = FakeBackend()
    async with Pool([backend], options(warm=1)) as pool:
        for number in range(2):
            await (await pool.create(SandboxSpec(label=f"grade/{number}"))).close()
        await until(lambda: len(backend.sandboxes) == 3)
        async with await pool.create(SandboxSpec(label="grade/2")) as sandbox:
            await sandbox.put(f"{sandbox.workdir}/mine", b"")
            assert backend.sandboxes[2].files, "the spare was not used"
            await until(lambda: len(backend.sandboxes) == 4)
        # Another spec is another sandbox; one with files or a way out is never kept ready.
        await (await pool.create(SandboxSpec(max_processes=3))).close()
        assert backend.sandboxes[-1].spec.max_processes == 3
        filled = SandboxSpec(files={"a": FileEntry(content=b"")})
        for _ in range(3):
            await (await pool.create(filled)).close()
        await asyncio.sleep(0.01)
        assert len(backend.open) == 1
    assert backend.open == []


async def test_a_spare_that_died_is_not_given_out() -> None:
    backend = FakeBackend()
    async with Pool([backend], options(warm=1)) as pool:
        for _ in range(2):
            await (await pool.create(PLAIN)).close()
        await until(lambda: len(backend.open) == 1)
        await backend.open[0].lose()
        async with await pool.create(PLAIN) as sandbox:
            assert (await sandbox.exec(["echo", "alive"], timeout_s=5)).stdout == b"alive\n"
        assert pool.live == 0


async def test_spares_give_way_to_whoever_waits_for_a_permit() -> None:
    backend = FakeBackend()
    async with Pool([backend], options(warm=1, max_sandboxes=2)) as pool:
        for _ in range(2):
            await (await pool.create(PLAIN)).close()
        await until(lambda: len(backend.open) == 1)
        other = SandboxSpec(max_processes=3)
        async with await pool.create(other), await pool.create(other):
            assert pool.live == 2


async def test_whoever_uses_up_all_permits_does_not_make_the_backend_look_broken() -> None:
    backend = FakeBackend()
    async with Pool([backend], options(max_sandboxes=2)) as pool:
        held = [await pool.create(PLAIN) for _ in range(2)]
        lost = SandboxLost("the sandbox has ended")
        assert "was lost while the agent ran" in await attribute_loss(lost, pool, PLAIN)
        assert len(backend.open) == pool.live == 2
        backend.boot_errors = [SandboxStartError("no space")] * 3
        with pytest.raises(SandboxLost):
            await attribute_loss(lost, pool, PLAIN)
        for sandbox in held:
            await sandbox.close()
        assert pool.live == 0


async def test_many_controls_at_once_all_get_their_sandbox() -> None:
    backend = FakeBackend()
    backend.boot_s = 0.01
    async with Pool([backend], options(max_sandboxes=1)) as pool, await pool.create(PLAIN):
        found = await asyncio.gather(*(attribute_loss(SandboxLost("gone"), pool, PLAIN) for _ in range(12)))
    assert len(found) == 12
    assert len(backend.sandboxes) == 13


async def test_a_wait_for_a_permit_is_told_and_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.sandbox.pool.LOG_S", 0.02)
    async with Pool([FakeBackend()], options(max_sandboxes=1, permit_wait_s=0.05)) as pool:
        async with await pool.create(PLAIN):
            with pytest.raises(SandboxStartError, match="all 1 permits for sandboxes are in use"):
                await pool.create(PLAIN)
        assert "wait for=permit" in caplog.text
        await (await pool.create(PLAIN)).close()


async def test_a_cancelled_start_gives_its_permit_back() -> None:
    backend = FakeBackend()
    backend.boot_s = 60
    async with Pool([backend], options(max_sandboxes=1)) as pool:
        waiting = asyncio.ensure_future(pool.create(PLAIN))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        backend.boot_s = 0
        async with asyncio.timeout(5):
            await (await pool.create(PLAIN)).close()


async def test_leaked_sandboxes_are_reaped_at_the_start_and_a_dead_daemon_is_no_reason_to_fail() -> None:
    class Down(FakeBackend):
        async def reap(self) -> int:
            raise SandboxError("no daemon")

    leaky = Reaping()
    leaky.leaked = 7
    async with Pool([leaky, Down()], options()) as pool:
        assert pool.reaped == 7
    with pytest.raises(SandboxStartError, match="closed"):
        await pool.create(PLAIN)


async def test_a_fall_back_takes_over_and_hands_back() -> None:
    first, second = FakeBackend(name="first"), FakeBackend(name="second")
    said: list[str] = []
    async with Pool([first, second], options(in_order=True), said.append) as pool:
        for _ in range(4):
            await (await pool.create(PLAIN)).close()
        assert (len(first.sandboxes), len(second.sandboxes)) == (4, 0)
        first.boot_errors = [SandboxStartError("daemon gone")] * 3
        # Its three tries fail and open the circuit; the same sandbox comes from the other.
        async with await pool.create(PLAIN) as sandbox:
            assert sandbox.backend == "second"
        assert said[0] == "the first sandbox is down (daemon gone): sandboxes come from second"
        await until(lambda: pool.members[0].circuit.state == "closed")
        assert said[1:] == ["the first sandbox is back"]
        async with await pool.create(PLAIN) as sandbox:
            assert sandbox.backend == "first"


async def test_a_fall_back_promises_no_more_than_all_can_hold() -> None:
    first = FakeBackend(name="first", capabilities=frozenset({"network_none", "images"}))
    second = FakeBackend(name="second", capabilities=frozenset({"network_none", "resource_limits"}))
    pool = Pool([first, second], options(in_order=True))
    assert pool.capabilities == {"network_none"}


async def test_what_grading_needs_is_promised_where_one_backend_has_all_of_it() -> None:
    cloud = FakeBackend(name="cloud", capabilities=frozenset({"images", "allowlist"}))
    here = FakeBackend(name="here", capabilities=frozenset({"network_none", "pid_isolation", "images"}))
    async with Pool([cloud, here], options(in_order=True)) as pool:
        assert pool.capabilities == {"images", "network_none", "pid_isolation"}
        async with await pool.create(PLAIN) as graded:
            assert (PLAIN.network, graded.backend) == ("none", "here")
        async with await pool.create(replace(PLAIN, network="allowlist")) as agent:
            assert agent.backend == "cloud"
    # one that cuts the network but isolates no processes would be given gradings too
    near = FakeBackend(name="near", capabilities=frozenset({"network_none"}))
    assert Pool([near, here], options(in_order=True)).capabilities == {"network_none"}


async def test_that_another_backend_works_blames_no_agent_for_a_lost_sandbox() -> None:
    first, second = FakeBackend(name="first"), FakeBackend(name="second")
    lost = SandboxLost("the sandbox has ended")
    async with Pool([first, second], options(cooldown_s=60, in_order=True)) as pool:
        sandbox, other = await pool.create(PLAIN), await pool.create(PLAIN)
        first.boot_errors = [SandboxStartError("daemon gone")] * 3
        with pytest.raises(SandboxLost):
            await attribute_loss(lost, pool, PLAIN, sandbox)
        # Down is down: no other trial, and no wait for it to recover.
        asked = len(first.asked)
        with pytest.raises(SandboxLost):
            await attribute_loss(lost, pool, PLAIN, other)
        assert len(first.asked) == asked
        async with await pool.create(PLAIN) as third:
            assert third.backend == "second"
            assert "was lost while the agent ran" in await attribute_loss(lost, pool, PLAIN, third)
        await sandbox.close()
        await other.close()


async def test_what_a_fall_back_does_not_offer_is_not_held_against_the_spec() -> None:
    first = FakeBackend(name="first")
    second = FakeBackend(name="second", capabilities=frozenset({"network_none"}))
    async with Pool([first, second], options(in_order=True)) as pool:
        first.boot_errors = [SandboxStartError("daemon gone")] * 3
        with pytest.raises(SandboxStartError, match="daemon gone"):
            await pool.create(SandboxSpec(image="python:3.12"))
