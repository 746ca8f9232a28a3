"""The part `open_container`: the services of a task, in a network of their own with the sandbox.

The network leads nowhere, not even to this machine: the daemon gives it no address here. Names resolve inside
it only. Containers, network and volumes carry the label of their owner, so that `DockerBackend.reap` removes
what a killed process left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Sequence

from insitu.errors import (
    BackendTimeout,
    ImageMissing,
    ImageUnavailable,
    RecordError,
    SandboxError,
    SandboxStartError,
)
from insitu.sandbox.base import Sandbox
from insitu.sandbox.docker import ROOT_CAPABILITIES, bind
from insitu.sandbox.docker_cli import Cli, classify, last_line
from insitu.sandbox.docker_image import Images
from insitu.sandbox.docker_sandbox import LATE_S, Beside, remove
from insitu.sandbox.process_owner import LABEL, owner
from insitu.storage.image_builds import build_context
from insitu_tasksets.container_plan import ContainerPlan, Health, Mount, SideService, read_plan

log = logging.getLogger(__name__)

PAUSE_S = 0.25
START_S = 60.0
ENDED_S = 600.0
"""Timeout of a service that has to end before another one starts."""
SUBNETS = 8
"""Attempts with drawn subnets: the daemon's own pools end after some 30 networks."""
NO_RESOLVER = "127.0.0.1"
"""In the container's own network: names of the world are refused at once, by any version of the daemon."""
LOG_BYTES = "1m"
_late: set[asyncio.Task[None]] = set()


class Company(Beside):
    """Services, variables and a health check."""

    def __init__(
        self, plan: ContainerPlan, cli: Cli, images: Images, *, name: str, bounds: Sequence[str]
    ) -> None:
        self._plan, self._cli, self._images = plan, cli, images
        self._name, self._bounds = name, bounds
        self.env = plan.env
        if plan.services:
            volumes = [word for volume in plan.volumes for word in ("--volume", f"{name}-{volume}")]
            self.arguments = (*self._network(*plan.names), *volumes)
        used = [*plan.volumes, *(volume for service in plan.services for volume in service.volumes)]
        self._volumes = sorted({volume.partition(":")[0] for volume in used})
        self._began: dict[str, float] = {}
        self._closed = self._unsure = False

    async def open(self) -> None:
        if not self._plan.services:
            return
        try:
            await self._open()
        except (BackendTimeout, asyncio.CancelledError):
            self._unsure = True  # a slow daemon may make it after all
            raise

    async def _open(self) -> None:
        references = dict.fromkeys(service.image for service in self._plan.services)
        found = await asyncio.gather(*(self._images.get(reference) for reference in references))
        ids = {reference: image.id for reference, image in zip(references, found, strict=True)}
        await self._make_network()
        for volume in self._volumes:
            await self._cli.call("volume", "create", *_mark(), f"{self._name}-{volume}")
        for service in self._plan.services:
            for name, condition in service.after.items():
                await self._wait(name, condition)
            try:
                argv = _run_arguments(service, self._name, self._bounds)
            except RecordError as error:
                raise ImageMissing(f"service {service.name}: {error}") from error
            argv += [*self._network(service.name, *service.names), *_command(service, ids[service.image])]
            code, _, err = await self._cli.run(argv, timeout_s=START_S)
            if code:
                raise classify(self._cli.name, f"run of service {service.name}", err)
            self._began[service.name] = time.monotonic()
        for service in self._plan.services:
            await self._wait(service.name, "service_healthy" if service.health else "service_started")
        for name, condition in self._plan.after.items():
            await self._wait(name, condition)

    async def ready(self, sandbox: Sandbox) -> None:
        health, began = self._plan.health, time.monotonic()
        while health is not None:
            done = await sandbox.exec(health.argv, timeout_s=health.timeout_s)
            if done.exit_code == 0:
                return
            if time.monotonic() - began > health.deadline_s:
                why = last_line(done.stderr or done.stdout) or f"exit code {done.exit_code}"
                raise ImageUnavailable(f"the task's health check fails after {health.deadline_s:g} s: {why}")
            await asyncio.sleep(PAUSE_S)

    async def fault(self) -> str:
        plan = self._plan
        waits = (plan.after, *(service.after for service in plan.services))
        once = {name for one in waits for name in one if one[name] == "service_completed_successfully"}
        for service in plan.services:
            code = None if service.name in once else await self._exit_code(service.name)
            if code or (code == 0 and service.health):
                return f"service {service.name} ended with {code}: {await self._last_words(service.name)}"
        return ""

    async def close(self) -> None:
        if self._closed or not self._plan.services:
            return
        self._closed = True
        await self._remove()
        if self._unsure:
            task = asyncio.get_running_loop().create_task(self._remove_late())
            _late.add(task)
            task.add_done_callback(_late.discard)

    async def _remove_late(self) -> None:
        await asyncio.sleep(LATE_S)
        await self._remove()

    async def _remove(self) -> None:
        names = [f"{self._name}-{service.name}" for service in self._plan.services]
        for failed in await asyncio.gather(
            *(remove(self._cli, name) for name in names), return_exceptions=True
        ):
            if isinstance(failed, BaseException):
                log.warning("leaked service of=%s error=%s", self._name, failed)
        volumes = [["volume", "rm", "--force", f"{self._name}-{volume}"] for volume in self._volumes]
        for argv in (["network", "rm", self._name], *volumes):
            try:
                code, _, err = await self._cli.run(argv)
            except SandboxError as error:
                code, err = 1, str(error).encode()
            if code and b"o such" not in err:
                log.warning("leaked %s of=%s error=%s", argv[0], self._name, last_line(err))

    def _network(self, *names: str) -> list[str]:
        aliases = [word for name in names for word in ("--network-alias", name)]
        return ["--network", self._name, "--dns", NO_RESOLVER, *aliases]

    async def _make_network(self) -> None:
        argv = ["network", "create", "--internal", *_mark()]
        argv += ["--opt", "com.docker.network.bridge.inhibit_ipv4=true"]
        err = b""
        for _ in range(SUBNETS):
            # 198.18.0.0/15 is for tests of networks: no machine has it.
            drawn = random.SystemRandom().randrange(1 << 13)
            subnet = f"198.{18 + (drawn >> 12)}.{drawn >> 4 & 255}.{(drawn & 15) << 4}/28"
            code, _, err = await self._cli.run([*argv, "--subnet", subnet, self._name])
            if not code:
                return
            if b"overlap" not in err.lower():
                break
        raise SandboxStartError(f"{self._cli.name} network create: {last_line(err)}")

    async def _wait(self, name: str, condition: str) -> None:
        """Wait for a service. Raises ImageUnavailable: the daemon is well, and a retry may help."""
        service = next(one for one in self._plan.services if one.name == name)
        deadline = self._began[name] + (service.health.deadline_s if service.health else START_S)
        if condition == "service_completed_successfully":
            deadline = self._began[name] + ENDED_S
        while True:
            code = await self._exit_code(name)
            if condition == "service_completed_successfully" and code == 0:
                return
            if code is not None and (code or condition == "service_healthy"):
                raise ImageUnavailable(f"service {name} ended with {code}: {await self._last_words(name)}")
            if condition == "service_started":
                return
            if (
                condition == "service_healthy"
                and service.health
                and await self._healthy(name, service.health)
            ):
                return
            if time.monotonic() > deadline:
                what = "healthy" if condition == "service_healthy" else "done"
                raise ImageUnavailable(
                    f"service {name} is not {what} after {deadline - self._began[name]:g} s:"
                    f" {await self._last_words(name)}"
                )
            await asyncio.sleep(PAUSE_S)

    async def _exit_code(self, name: str) -> int | None:
        """Return how a service ended; None while it runs."""
        form = "{{.State.Running}} {{.State.ExitCode}}"
        out = await self._cli.call("inspect", "--format", form, f"{self._name}-{name}")
        running, code = out.decode().split()
        return None if running == "true" else int(code)

    async def _healthy(self, name: str, health: Health) -> bool:
        argv = ["exec", f"{self._name}-{name}", *health.argv]
        try:
            return (await self._cli.run(argv, timeout_s=health.timeout_s))[0] == 0
        except BackendTimeout:
            return False

    async def _last_words(self, name: str) -> str:
        _, out, err = await self._cli.run(["logs", "--tail", "3", f"{self._name}-{name}"])
        return ascii(last_line(err or out))[1:-1] or "it printed nothing"


def open_container(text: str, cli: Cli, images: Images, *, name: str, bounds: Sequence[str]) -> Company:
    """Return what `Setup.container` says for the container `name`.

    `bounds`: arguments of `docker run` that bound a container.
    """
    return Company(read_plan(text), cli, images, name=name, bounds=bounds)


def _mark() -> tuple[str, str]:
    return "--label", f"{LABEL}={owner()}"


def _run_arguments(service: SideService, name: str, bounds: Sequence[str]) -> list[str]:
    argv = ["run", "--detach", "--pull", "never", "--name", f"{name}-{service.name}", *_mark()]
    argv += ["--label", f"insitu.service={service.name}", "--hostname", service.name]
    argv += ["--cap-drop", "ALL", *(f"--cap-add={each}" for each in (*ROOT_CAPABILITIES, "NET_BIND_SERVICE"))]
    argv += ["--security-opt", "no-new-privileges", "--no-healthcheck"]
    argv += ["--log-driver", "json-file", "--log-opt", f"max-size={LOG_BYTES}", *bounds]
    if service.memory_mb and "--memory" in bounds:
        most = min(int(bounds[bounds.index("--memory") + 1]), service.memory_mb << 20)
        argv += ["--memory", str(most), "--memory-swap", str(most)]
    if service.cpus:
        argv += ["--cpus", f"{min(service.cpus, os.cpu_count() or 1):g}"]
    for word, value in (("--user", service.user), ("--workdir", service.workdir)):
        argv += [word, value] if value else []
    argv += [word for key, value in service.env.items() for word in ("--env", f"{key}={value}")]
    argv += [word for place in service.tmpfs for word in ("--tmpfs", place)]
    argv += [word for volume in service.volumes for word in ("--volume", f"{name}-{volume}")]
    argv += [word for mount in service.mounts for word in _shown(mount)]
    argv += ["--shm-size", f"{service.shm_mb}m"] if service.shm_mb else []
    argv += ["--init"] if service.init else []
    return argv + (["--read-only"] if service.read_only else [])


def _shown(mount: Mount) -> list[str]:
    folder = build_context(mount.folder)
    source = folder and (folder / mount.source).resolve()
    if not folder or not source or not source.is_relative_to(folder):
        raise RecordError(f"{ascii(mount.source)[:80]} is not in the folder of the task")
    return bind(source, mount.target)


def _command(service: SideService, image: str) -> list[str]:
    first, *rest = service.entrypoint or ("",)
    entry = ["--entrypoint", first] if service.entrypoint is not None else []
    return [*entry, image, *rest, *(service.command or ())]
