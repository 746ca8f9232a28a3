"""The `docker` backend: a sandbox is one container, started by the docker or podman command line.

PID 1 of the container is supervisor.py, run by bundled_python.py, so any image will do. As in a local sandbox
the host drives it over one socket: commands need no call to the daemon, and files move through descriptors of
the sandbox's folders. The only network device is loopback, beside one of the task's services where it has
some; PID 1 listens on loopback for the gateway. A container ends when this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import re
import socket
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import cast

from insitu.errors import (
    ImageMissing,
    PolicyUnsupported,
    SandboxLost,
    SandboxStartError,
    SetupError,
    boundary,
)
from insitu.registry import find
from insitu.sandbox import bundled_python as sandbox_python
from insitu.sandbox import rootfs as layout
from insitu.sandbox import seccomp as syscalls
from insitu.sandbox.base import Capability, SandboxSpec
from insitu.sandbox.cgroup import kills_of
from insitu.sandbox.control_channel import Control
from insitu.sandbox.docker_cli import Cli, classify
from insitu.sandbox.docker_image import Image, Images
from insitu.sandbox.docker_sandbox import Beside, DockerSandbox, remove, remove_after
from insitu.sandbox.limits import allow_open_files
from insitu.sandbox.process_owner import LABEL, is_dead, owner
from insitu.storage.temp_dirs import remove_stale_scratch, scratch_folder

log = logging.getLogger(__name__)

SANDBOX_AT = "/run/insitu/sandbox"
INSPECT_S = 2.0
"""Interval of `inspect` while a container starts."""
PIDS = 4096
"""Default limit of processes and threads."""
ROOT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID")
"""Capabilities of root during setup: files and users, as in an image build; SETPCAP, to drop them all."""


class DockerBackend:
    """Implements insitu.sandbox.base.SandboxBackend.

    `image`: default image, with a read-only system. `user`: "UID" or "UID:GID" (0: root without capabilities,
    for images that only work as root); an unprivileged host uses its own ids. `memory_bytes`: of a whole
    sandbox, tmpfs included, where the daemon has a memory cgroup. `disk_bytes`: what a sandbox of a task's
    image may write to the daemon's disk (0 = unlimited), needs storage with quotas. Raises SetupError without
    a suitable daemon.
    """

    def __init__(
        self,
        image: str = "",
        *,
        cache: Path,
        program: str = "docker",
        runtime: str = "",
        user: str = "1000:1000",
        start_timeout_s: float = 60.0,
        memory_bytes: int = 4 << 30,
        disk_bytes: int = 0,
        work_bytes: int = 128 << 20,
        scratch_bytes: int = 64 << 20,
    ) -> None:
        allow_open_files()
        self._cli = Cli(program)
        self._image = image
        self._runtime = runtime
        self._start_timeout_s = start_timeout_s
        self._memory = memory_bytes
        self._sizes = (work_bytes, scratch_bytes)
        self._user = _numbers(user) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        self._disk = disk_bytes
        info = self._cli.info()
        self._podman = isinstance(info.get("host"), dict)
        self._limits = _limits(info, runtime)
        if disk_bytes:
            _check_quotas(info)
        if missing := sorted({"memory", "pids"} - self._limits):
            log.warning("no_limits daemon=%s missing_cgroups=%s", self._cli.name, ",".join(missing))
        self._owner = owner()
        self._python = sandbox_python.stage_python(cache)
        self._refused = syscalls.program(platform.machine())
        self._images = Images(self._cli, cache, *self._user)

    @property
    def name(self) -> str:
        return "docker"

    @property
    def capabilities(self) -> frozenset[Capability]:
        some: set[Capability] = {"network_none", "gateway_only", "pid_isolation", "stdin_pipe"}
        some |= {"images", "binds", "roots"}
        if not self._podman:  # its memory places belong to the user of the start
            some |= {"root_setup", "container"}
        if self._refused:
            some.add("syscall_filter")
        if self._limits >= {"memory", "pids"}:
            some.add("resource_limits")
        if "memory" in self._limits:
            some.add("sandbox_memory")
        if os.geteuid() == 0:
            some.add("file_owner")
        return frozenset(some)

    async def image_digest(self, image: str) -> str:
        """Return the name with the registry's digest, or the content id. Raises ImageMissing."""
        return (await self._images.get(image)).digest

    async def reap(self) -> int:
        """Remove sandboxes and scratch folders of dead owners; return the number of sandboxes.

        Raises SandboxError.
        """
        await asyncio.to_thread(remove_stale_scratch)
        form = f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'
        listed = await self._cli.call("ps", "--all", "--filter", f"label={LABEL}", "--format", form)
        rows = (line.split() for line in listed.decode("utf-8", "replace").splitlines())
        left = [row[0] for row in rows if len(row) == 2 and is_dead(row[1])]
        for container in left:
            await remove(self._cli, container)
        for kind in () if self._podman else ("network", "volume"):
            form = f'{{{{.Name}}}} {{{{.Label "{LABEL}"}}}}'
            listed = await self._cli.call(kind, "ls", "--filter", f"label={LABEL}", "--format", form)
            rows = (line.split() for line in listed.decode("utf-8", "replace").splitlines())
            for name in [row[0] for row in rows if len(row) == 2 and is_dead(row[1])]:
                await self._cli.run([kind, "rm", name])
        return len(left)

    def _check(self, spec: SandboxSpec) -> None:
        if not (spec.image or self._image):
            raise PolicyUnsupported(
                "a docker sandbox needs an image: name one in the task or in sandbox.image"
            )
        if any(":" in root for root in spec.roots):  # to docker, two folders: the first of this machine
            raise PolicyUnsupported(f"a docker sandbox takes no colon in a root: {', '.join(spec.roots)}")
        if spec.root_setup and self._podman:
            raise PolicyUnsupported(f"{self._cli.name} sets no sandbox up as root")
        if spec.container and self._podman:
            raise PolicyUnsupported(f"{self._cli.name} starts an image alone, without services")
        if spec.network not in ("none", "gateway_only"):
            raise PolicyUnsupported(f"the docker sandbox offers no network `{spec.network}`")
        if spec.network == "gateway_only" and spec.gateway_socket is None:
            raise PolicyUnsupported("network `gateway_only` needs the gateway's socket")
        if spec.max_processes is not None and "pids" not in self._limits:
            raise PolicyUnsupported("this daemon cannot limit processes: its pids cgroup is missing")

    def _check_binds(self, spec: SandboxSpec) -> None:
        places = self._places(spec)
        for bind in spec.binds:
            if not bind.source.exists():
                raise PolicyUnsupported(f"bind of {bind.source}: no such file or folder")
            covers = any(Path(place).is_relative_to(bind.target) for place in places)
            if covers or not bind.target.startswith("/"):
                raise PolicyUnsupported(
                    f"bind at {bind.target}: would cover a writable folder of the sandbox"
                )

    def _places(self, spec: SandboxSpec) -> tuple[str, ...]:
        return (*layout.writable(spec), "/var/tmp")

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        self._check(spec)
        reference = spec.image or self._image
        image = await self._images.get(reference)
        spec = replace(spec, workdir=spec.workdir or image.workdir)
        if spec.workdir == "/":
            raise PolicyUnsupported(
                f"{reference} has no WORKDIR, and the whole system is no work folder: name one in the task"
            )
        self._check_binds(spec)
        name = f"insitu-{uuid.uuid4().hex}"
        with boundary(SandboxStartError, "start a docker sandbox"), contextlib.ExitStack() as stack:
            folder = stack.enter_context(scratch_folder())
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            beside = self._beside(spec, name)
            try:
                await beside.open()
                return await self._start(spec, image, name, folder, listener, beside)
            except BaseException as error:
                if isinstance(error, ImageMissing):
                    self._images.forget(reference)
                await asyncio.shield(remove_after(self._cli, name, error))
                await asyncio.shield(beside.close())
                raise

    def _beside(self, spec: SandboxSpec, name: str) -> Beside:
        if not spec.container:
            return Beside()
        bounds = self._bounds(replace(spec, cpus=0.0))
        found = find("parts", "open_container")(
            spec.container, self._cli, self._images, name=name, bounds=bounds
        )
        return cast("Beside", found)

    async def _start(
        self,
        spec: SandboxSpec,
        image: Image,
        name: str,
        folder: Path,
        listener: socket.socket,
        beside: Beside,
    ) -> DockerSandbox:
        arguments = self._arguments(spec, image, name, folder / "in", beside)
        control = await self._connected(name, folder, listener, arguments)
        sandbox = DockerSandbox(
            spec,
            control,
            container=name,
            cli=self._cli,
            places=self._places(spec),
            env={**self._environment(spec, image), **beside.env},
            kills=kills_of(control.peer),
            beside=beside,
        )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await sandbox.begin()
            await beside.ready(sandbox)
        except TimeoutError as error:
            await sandbox.close()
            raise SandboxStartError(f"a sandbox was not ready within {self._start_timeout_s:g} s") from error
        except SandboxLost as error:
            await sandbox.close()
            raise SandboxStartError(f"start a sandbox: {error}") from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _connected(
        self, name: str, folder: Path, listener: socket.socket, arguments: list[str]
    ) -> Control:
        """Start the container and accept the one connection of its PID 1."""
        shown = folder / "in"
        shown.mkdir(mode=0o755)
        shown.chmod(0o755)
        listener.bind(str(shown / "pid1"))
        (shown / "pid1").chmod(0o666)
        listener.listen(1)
        listener.setblocking(False)
        code, _, err = await self._cli.run(arguments, timeout_s=self._start_timeout_s)
        if code:
            raise classify(self._cli.name, "run", err)
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INSPECT_S):
                    control, _ = await asyncio.get_running_loop().sock_accept(listener)
                    return Control(control)
            _, state, _ = await self._cli.run(["inspect", "--format", "{{.State.Status}}", name])
            word = state.decode().strip() or "gone"
            if word != "running" or time.monotonic() > deadline:
                raise SandboxStartError(
                    f"a sandbox did not report to {shown} (its container is {word}); is the daemon here?"
                )

    def _arguments(
        self, spec: SandboxSpec, image: Image, name: str, shown: Path, beside: Beside
    ) -> list[str]:
        user, group = self._user
        argv = ["run", "--detach", "--rm", "--pull", "never", "--name", name]
        argv += ["--label", f"{LABEL}={self._owner}", "--label", f"insitu.sandbox={spec.label}"]
        argv += ["--hostname", "sandbox", "--add-host", "sandbox:127.0.0.1"]
        argv += ["--user", "0:0" if spec.root_setup else f"{user}:{group}", "--cap-drop", "ALL"]
        if spec.root_setup:
            argv += [f"--cap-add={name}" for name in ROOT_CAPABILITIES]
        argv += ["--security-opt", "no-new-privileges"]
        argv += ["--log-driver", "none", "--no-healthcheck", "--workdir", spec.workdir]
        argv += [*self._bounds(spec), *beside.arguments]
        work, scratch = self._sizes
        owner = "U" if self._podman else f"uid={user},gid={group}"
        for place in self._places(spec):
            if place in spec.roots:  # an anonymous volume starts with what the image has there
                argv += ["--volume", place]
            elif place != spec.workdir:
                argv += _memory_place(place, scratch, owner)
            elif not spec.image:
                argv += _memory_place(place, work, owner)
        argv += bind(self._python, sandbox_python.MOUNT) + bind(shown, SANDBOX_AT)
        argv += bind(image.etc / "passwd", "/etc/passwd") + bind(image.etc / "group", "/etc/group")
        for one in spec.binds:
            argv += bind(one.source.resolve(), one.target)
        port = spec.gateway_port if spec.network == "gateway_only" else 0
        start = sandbox_python.command()
        numbers = (port, -1, 0, spec.memory_bytes or 0)
        return [
            *argv,
            "--entrypoint",
            start[0],
            image.id,
            *start[1:],
            f"{SANDBOX_AT}/pid1",
            *(str(number) for number in numbers),
            self._refused.hex(),
            f"{self._user[0]}:{self._user[1]}" if spec.root_setup else "",
            *self._places(spec),
        ]

    def _bounds(self, spec: SandboxSpec) -> list[str]:
        argv = ["--runtime", self._runtime] if self._runtime else []
        if "pids" in self._limits:
            # PID 1 is not the sandbox's own.
            argv += ["--pids-limit", str((spec.max_processes or PIDS) + 1)]
        if "memory" in self._limits:
            argv += ["--memory", str(self._memory)]
        if "swap" in self._limits:
            argv += ["--memory-swap", str(self._memory)]
        if spec.cpus:
            argv += ["--cpus", f"{min(spec.cpus, os.cpu_count() or 1):g}"]
        if not spec.image:
            argv.append("--read-only")
        elif self._disk:
            argv += ["--storage-opt", f"size={self._disk}"]
        return argv

    def _environment(self, spec: SandboxSpec, image: Image) -> dict[str, str]:
        """Return the image's environment below that of every sandbox, with the image's PATH."""
        common = layout.environment(spec)
        path = {} if "PATH" in spec.env or "PATH" not in image.env else {"PATH": image.env["PATH"]}
        return image.env | common | path


def _memory_place(place: str, size: int, owner: str) -> list[str]:
    return ["--tmpfs", f"{place}:rw,exec,nosuid,nodev,size={size},mode=0755,{owner}"]


def bind(source: Path, target: str) -> list[str]:
    fields = ("type=bind", f"src={source}", f"dst={target}", "readonly")
    quoted = ('"' + field.replace('"', '""') + '"' if {",", '"'} & set(field) else field for field in fields)
    return ["--mount", ",".join(quoted)]


def _numbers(user: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", user)
    if match is None:
        raise SetupError(f"sandbox.user is {user!r}: it must be a number, or two as in 1000:1000")
    return int(match[1]), int(match[2] or match[1])


def _check_quotas(info: dict[str, object]) -> None:
    """Raise SetupError for storage without quotas; xfs without pquota only fails at the first sandbox."""
    store, host = info.get("store"), info.get("host")
    if isinstance(store, dict) and isinstance(host, dict):  # podman
        driver, rows = str(store.get("graphDriverName")), store.get("graphStatus")
        backing = rows.get("Backing Filesystem", "") if isinstance(rows, dict) else ""
    else:
        driver, rows = str(info.get("Driver")), info.get("DriverStatus")
        pairs = [row for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
        backing = next((row[1] for row in pairs if len(row) == 2 and row[0] == "Backing Filesystem"), "")
    if driver not in ("btrfs", "zfs") and not (driver.startswith("overlay") and backing == "xfs"):
        where = f"{driver} on {backing}" if backing else driver
        raise SetupError(
            f"sandbox.disk_mb needs storage with quotas (overlay2 on xfs mounted with pquota, btrfs, zfs); "
            f"this daemon has {where}"
        )


def _limits(info: dict[str, object], runtime: str) -> frozenset[str]:
    """Return the limits that the daemon supports: memory, swap, pids. Raises SetupError."""
    host = info.get("host")
    if isinstance(host, dict):  # podman
        found = host.get("cgroupControllers") or ()
        return frozenset({"memory", "pids"} & set(found))
    if info.get("OSType") != "linux":
        raise SetupError(
            f"docker sandboxes need a Linux daemon, this one is {info.get('OSType') or 'unknown'}"
        )
    runtimes = info.get("Runtimes")
    if runtime and isinstance(runtimes, dict) and runtime not in runtimes:
        raise SetupError(f"docker has no runtime {runtime!r}; it has {', '.join(sorted(runtimes))}")
    names = (("memory", "MemoryLimit"), ("swap", "SwapLimit"), ("pids", "PidsLimit"))
    return frozenset(word for word, key in names if info.get(key) is True)
