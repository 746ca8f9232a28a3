"""What is particular to the harbor backend; the rest is in the contract suite, over the same fake."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import orjson
import pytest
from sandbox_rig import out

from insitu.errors import ImageMissing, PolicyUnsupported, SandboxLost, SandboxStartError, SetupError
from insitu.grading.grader import Grader
from insitu.sandbox.base import Bind, SandboxSpec, gateway_url, terminate
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.process_owner import owner
from insitu_fleet.harbor import HarborBackend
from insitu_fleet.harbor_sdk import of_kind
from tests.fakes.harbor import FakeEnvironment

pytestmark = pytest.mark.slow


class Cloud:
    """Makes fake environments and keeps them."""

    def __init__(
        self, *, disable_internet: bool = True, allowlist: bool = True, error: Exception | None = None
    ) -> None:
        self.inner, self.error = LocalBackend(), error
        self.flags = {"disable_internet": disable_internet, "network_allowlist": allowlist}
        self.made: list[FakeEnvironment] = []
        self.folders: list[Path] = []
        self.specs: list[SandboxSpec] = []

    def __call__(self, spec: SandboxSpec, folder: Path) -> FakeEnvironment:
        made = FakeEnvironment(self.inner, spec, **self.flags)
        made.start_error = self.error
        self.made.append(made)
        self.folders.append(folder)
        self.specs.append(spec)
        return made


def test_without_harbor_the_line_says_what_to_install() -> None:
    if "harbor" in sys.modules:
        pytest.skip("harbor: it is installed")
    with pytest.raises(SetupError, match=r"\[harbor\].* on Python 3.12"):
        of_kind("e2b")


async def test_a_cloud_that_cannot_cut_the_network_says_so_and_is_refused_for_grading() -> None:
    cloud = Cloud(disable_internet=False, allowlist=False)
    backend = HarborBackend("hf-sandbox", image="any", make=cloud)
    assert backend.capabilities == {"images"}
    made = len(cloud.made)
    with pytest.raises(PolicyUnsupported, match="harbor:hf-sandbox cannot keep a sandbox from the network"):
        await backend.create(SandboxSpec(network="none"))
    assert len(cloud.made) == made, "refused before anything is made"
    with pytest.raises(PolicyUnsupported, match="grading needs network_none.*harbor:hf-sandbox has not"):
        Grader(backend)
    async with await backend.create(SandboxSpec(network="public")) as sandbox:
        assert await out(sandbox, "echo on") == "on"


async def test_what_harbor_says_of_itself_is_what_is_promised() -> None:
    backend = HarborBackend("e2b", image="any", make=Cloud())
    assert backend.capabilities == {"images", "network_none", "gateway_only", "pid_isolation"}
    Grader(backend)


async def test_the_environment_gets_the_gateways_host_alone() -> None:
    cloud = Cloud()
    backend = HarborBackend("e2b", image="any", make=cloud)
    url = "https://gateway.example.com/x"
    async with await backend.create(SandboxSpec(network="gateway_only", gateway_url=url)) as sandbox:
        assert gateway_url(sandbox) == url
        assert (cloud.specs[-1].network, cloud.specs[-1].gateway_url) == ("gateway_only", url)
    closed = HarborBackend("e2b", image="any", make=Cloud(allowlist=False))
    with pytest.raises(
        PolicyUnsupported,
        match=r"no network `gateway_only`: it reaches no socket of this machine and keeps no li",
    ):
        await closed.create(SandboxSpec(network="gateway_only", gateway_url=url))


async def test_an_agents_folder_is_copied_with_links_and_modes(tmp_path: Path) -> None:
    agent = tmp_path / "agent-1.0"
    (agent / "bin").mkdir(parents=True)
    (agent / "bin" / "go").write_text("#!/bin/sh\necho gone\n")
    (agent / "bin" / "go").chmod(0o755)
    (agent / "run").symlink_to("bin/go")
    backend = HarborBackend("e2b", image="any", make=Cloud(), cache=tmp_path / "cache")
    spec = SandboxSpec(binds=(Bind(source=agent, target="/opt/agent", may_copy=True),))
    for _ in range(2):
        async with await backend.create(spec) as sandbox:
            assert await out(sandbox, "/opt/agent/run; rm /opt/agent/run") == "gone"
    assert len(list((tmp_path / "cache" / "harbor").glob("agent-1.0-*.tar.gz"))) == 1


COUNT = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 838[34]' | sort -u | tr '\\n' ,"


async def test_sigterm_spares_what_the_vendor_runs() -> None:
    cloud = Cloud()
    async with await HarborBackend("e2b", image="any", make=cloud).create(SandboxSpec()) as sandbox:
        await cloud.made[-1].exec("(setsid sleep 8383 > /dev/null 2>&1 &)")
        own = asyncio.ensure_future(sandbox.exec(["sleep", "8384"], timeout_s=30))
        async with asyncio.timeout(20):
            while await out(sandbox, COUNT) != "sleep 8383,sleep 8384,":  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        await terminate(sandbox, 5.0)
        assert (await own).exit_code != 0
        assert await out(sandbox, COUNT) == "sleep 8383,"


async def test_what_a_killed_run_left_is_ended_by_name_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = Cloud()
    kept = {kind: HarborBackend(kind, image="any", make=cloud, cache=tmp_path) for kind in ("docker", "e2b")}
    own = await kept["docker"].create(SandboxSpec())
    folder = tmp_path / "harbor" / "sandboxes"
    (mine,) = folder.iterdir()
    dead = await asyncio.create_subprocess_exec("sleep", "60")
    mark = owner(dead.pid)
    dead.kill()
    await dead.wait()
    for kind in kept:
        row = {"kind": kind, "image": "any", "owner": mark}
        (folder / f"insitu-left-{kind}").write_bytes(orjson.dumps(row))
    assert [await backend.reap() for backend in kept.values()] == [1, 0]
    assert cloud.specs[-1].label == "insitu-left-docker"
    assert cloud.made[-1].stopped == 1
    assert "perhaps left at the provider kind=e2b session=insitu-left-e2b" in caplog.text
    assert list(folder.iterdir()) == [mine], "the sandbox of a live owner stays"
    await own.close()
    assert list(folder.iterdir()) == []


async def test_a_secret_is_in_no_command_line_and_nothing_is_left_on_the_host() -> None:
    cloud = Cloud()
    backend = HarborBackend("e2b", image="any", make=cloud)
    async with await backend.create(SandboxSpec(env={"KEY": "s3cr3t-in-env"})) as sandbox:
        done = await sandbox.exec(["sh", "-c", "echo $KEY; cat"], timeout_s=20, stdin=b"s3cr3t-in-input")
        assert done.stdout == b"s3cr3t-in-env\ns3cr3t-in-input"
        assert not any("s3cr3t" in command for command in cloud.made[-1].commands)
        assert cloud.folders[-1].is_dir()
    assert cloud.made[-1].stopped == 1
    assert not any(folder.exists() for folder in cloud.folders)


class SandboxBuildFailedError(Exception):
    """Named as Harbor names it."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("quota exceeded\nand more"), SandboxStartError),
        (TimeoutError(), SandboxStartError),
        (SandboxBuildFailedError("no such image"), ImageMissing),
    ],
)
async def test_a_start_that_fails_is_one_typed_line_and_leaves_nothing(
    error: Exception, kind: type[SandboxStartError]
) -> None:
    cloud = Cloud(error=error)
    backend = HarborBackend("e2b", image="any", make=cloud)
    with pytest.raises(SandboxStartError, match="start a sandbox of harbor:e2b: ") as caught:
        await backend.create(SandboxSpec())
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert cloud.made[-1].stopped == 1
    assert not any(folder.exists() for folder in cloud.folders)


async def test_a_long_command_outlives_the_stream_that_started_it() -> None:
    """Each call is cut after a moment, while the command runs on: it is run once, and its end is reported."""
    cloud = Cloud()
    async with await HarborBackend("e2b", image="any", make=cloud).create(SandboxSpec()) as sandbox:
        cloud.made[-1].cut_s = 0.4
        script = "echo begun >> times; echo out; echo err >&2; sleep 1.5; cat times; exit 7"
        done = await sandbox.exec(["sh", "-c", script], timeout_s=30)
        assert (done.exit_code, done.stdout, done.stderr) == (7, b"out\nbegun\n", b"err\n")
        assert cloud.made[-1].cuts >= 2
        late = await sandbox.exec(["sleep", "60"], timeout_s=1)
        assert (late.timed_out, late.exit_code) == (True, -9)


async def test_kill_all_ends_what_cleared_its_environment_and_close_ends_the_sandbox() -> None:
    sandbox = await HarborBackend("e2b", image="any", make=Cloud()).create(SandboxSpec())
    hide = "(env -i setsid sh -c 'sleep 8282 & sleep 8282 & wait' >/dev/null 2>&1 &) ; sleep 0.2"
    assert (await sandbox.exec(["sh", "-c", hide], timeout_s=20)).exit_code == 0
    count = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 828[2]' || true"
    assert await out(sandbox, count) == "1"
    await sandbox.kill_all()
    assert await out(sandbox, count) == "0"
    with pytest.raises(PolicyUnsupported):
        await sandbox.spawn(["true"])
    for _ in range(2):
        await sandbox.close()
    with pytest.raises(SandboxLost):
        await sandbox.exec(["true"], timeout_s=1)


async def test_two_commands_at_once_keep_their_own_output() -> None:
    async with await HarborBackend("e2b", image="any", make=Cloud()).create(SandboxSpec()) as sandbox:
        slow = asyncio.ensure_future(sandbox.exec(["sh", "-c", "sleep 0.5; echo slow"], timeout_s=30))
        for number in range(3):
            assert await out(sandbox, f"echo {number}") == str(number)
        assert (await slow).stdout == b"slow\n"
