"""Images of docker sandboxes: resolve a reference to a content id; pull or build it once."""

from __future__ import annotations

import asyncio
import io
import tarfile
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import orjson

from insitu.errors import (
    BackendTimeout,
    ImageMissing,
    ImageUnavailable,
    RecordError,
    SandboxStartError,
    boundary,
)
from insitu.sandbox.docker_cli import Cli, classify, is_daemon_down, last_line
from insitu.sandbox.docker_sandbox import remove, remove_after
from insitu.sandbox.process_owner import LABEL, owner
from insitu.sandbox.rootfs import HOME
from insitu.storage.image_builds import build_context, dockerfile_of

ETC_BYTES = 1 << 20
PULL_S = 1800.0
"""Timeout of an image pull or build: a large image over a slow line takes minutes."""
_ROOT = {"passwd": "root:x:0:0:root:/root:/bin/sh\n", "group": "root:x:0:\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A local image."""

    id: str
    """Content id."""
    digest: str
    """Name with the registry's digest, else the id; stored with verdicts."""
    env: dict[str, str]
    workdir: str
    """WORKDIR of the image."""
    etc: Path
    """Folder with passwd and group files: the image's users and the sandbox's user."""


class Images:
    """Cached image lookups; `cache` is the folder of passwd and group files."""

    def __init__(
        self, cli: Cli, cache: Path, user: int, group: int, *, pull_timeout_s: float = PULL_S
    ) -> None:
        self._cli = cli
        self._ids = (user, group)
        self._pull_timeout_s = pull_timeout_s
        self._known: dict[str, Image] = {}
        self._looking: dict[str, asyncio.Task[Image]] = {}
        self._cache = cache

    async def get(self, reference: str) -> Image:
        """Return the image, pulled or built where missing.

        Raises ImageMissing, ImageUnavailable when it cannot be fetched now, and SandboxStartError when the
        daemon does not answer.
        """
        if reference.startswith("-") or not reference.strip():
            raise ImageMissing(f"{reference!r} is not an image reference")
        if reference in self._known:
            return self._known[reference]
        task = self._looking.get(reference)
        if task is None or task.done():
            task = asyncio.get_running_loop().create_task(self._look_up(reference))
            task.add_done_callback(_retrieve_error)
            self._looking[reference] = task
        # A caller's timeout does not stop the download: a retry joins it.
        self._known[reference] = await asyncio.shield(task)
        self._looking.pop(reference, None)
        return self._known[reference]

    def forget(self, reference: str) -> None:
        """Drop a cached image that the daemon no longer has."""
        self._known.pop(reference, None)

    async def _look_up(self, reference: str) -> Image:
        code, out, err = await self._cli.run(["image", "inspect", reference])
        if code:
            if not isinstance(classify(self._cli.name, "image", err), ImageMissing):
                raise classify(self._cli.name, "image inspect", err)
            await self._fetch(reference)
            out = await self._cli.call("image", "inspect", reference)
        try:
            described = orjson.loads(out)[0]
            digests, config = described.get("RepoDigests") or (), described.get("Config") or {}
            env = dict(item.split("=", 1) for item in config.get("Env") or () if "=" in item)
            found, workdir = str(described["Id"]), str(config.get("WorkingDir") or "/")
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise SandboxStartError(f"{reference}: its description cannot be read") from error
        user, group = self._ids
        etc = self._cache / f"sandbox-users-{found.removeprefix('sha256:')[:24]}-{user}-{group}"
        with boundary(SandboxStartError, f"image {reference}"):
            if not await asyncio.to_thread(etc.exists):
                await self._users(found, etc)
        return Image(
            id=found, digest=str(digests[0]) if digests else found, env=env, workdir=workdir, etc=etc
        )

    async def _fetch(self, reference: str) -> None:
        """Build the image from its task folder, or pull it."""
        try:
            context = await asyncio.to_thread(build_context, reference)
        except RecordError as error:
            raise ImageMissing(str(error)) from error
        verb = ["pull", "--quiet", reference]
        if context is not None:
            file = str(context / dockerfile_of(reference))
            verb = ["build", "--quiet", "--label", "insitu.build=1", "--tag", reference, "--file", file]
            verb.append(str(context))
        try:
            code, _, err = await self._cli.run(verb, timeout_s=self._pull_timeout_s)
        except BackendTimeout as error:
            raise ImageUnavailable(f"image {reference}: {error}") from error
        if code:
            if context is not None and not is_daemon_down(err):
                raise ImageMissing(f"image of {context}: docker build: {last_line(err) or 'no reason given'}")
            failure = classify(self._cli.name, "pull", err)
            at_fault = isinstance(failure, ImageMissing) or is_daemon_down(err)
            raise (type(failure) if at_fault else ImageUnavailable)(f"image {reference}: {failure}")

    async def _users(self, image: str, folder: Path) -> None:
        """Write passwd and group with the sandbox's user: programs look up their own user."""
        name = f"insitu-{uuid.uuid4().hex}"
        marks = ("--name", name, "--label", f"{LABEL}={owner()}", "--network", "none")
        try:
            await self._cli.call("create", *marks, image, "true")
            found = {kind: await self._etc(name, kind) for kind in _ROOT}
        except BaseException as error:
            await asyncio.shield(remove_after(self._cli, name, error))
            raise
        await remove(self._cli, name)
        user, group = self._ids
        own = {
            "passwd": f"agent:x:{user}:{group}::{HOME}:/bin/sh\n",
            "group": f"agent:x:{group}:\n",
        }
        await asyncio.to_thread(_write_users, folder, found, own, (str(user), str(group)))

    async def _etc(self, name: str, kind: str) -> str:
        code, out, _ = await self._cli.run(["cp", f"{name}:/etc/{kind}", "-"])
        if code or len(out) > ETC_BYTES:
            return _ROOT[kind]
        try:
            with tarfile.open(fileobj=io.BytesIO(out)) as archive:
                member = archive.next()
                file = archive.extractfile(member) if member is not None and member.isreg() else None
                return file.read().decode("utf-8", "replace") if file is not None else _ROOT[kind]
        except tarfile.TarError:
            return _ROOT[kind]


def _retrieve_error(task: asyncio.Task[Image]) -> None:
    # Otherwise asyncio logs the error of a task that no caller awaits any more.
    if not task.cancelled():
        task.exception()


def _write_users(folder: Path, found: dict[str, str], own: dict[str, str], numbers: tuple[str, str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".sandbox-users-") as scratch:
        fresh = Path(scratch, "made")
        fresh.mkdir()
        for kind, number in zip(("passwd", "group"), numbers, strict=True):
            lines = [own[kind].rstrip()]
            for line in found[kind].splitlines():
                fields = line.split(":")
                if len(fields) > 2 and fields[2] != number and fields[0] != "agent":
                    lines.append(line)
            (fresh / kind).write_text("\n".join(lines) + "\n")
            (fresh / kind).chmod(0o644)
        if not folder.exists():
            fresh.rename(folder)
