"""Containers of an OpenEnv image: a pool of servers, started when the first session asks for one.

    free -- session --> in use --> free          a session that failed counts against its container
    FAILURES in a row, or a server that does not answer --> pause, doubled each time --> started again

A process beside each container removes it when this one ends, however it ends; what a lost machine leaves is
removed by the next process that starts one, or by docker sandboxes, which have the same label.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.errors import GradeError, SetupError, TaskError
from insitu.sandbox.docker_cli import Cli, classify, last_line
from insitu.sandbox.process_owner import LABEL, is_dead, owner
from insitu.tasks.user_functions import in_thread

log = logging.getLogger(__name__)

FAILURES = 3
"""Sessions in a row that fail before a container is started again."""
RESTARTS = 8
"""Restarts in a row without a session that works, after which a container is given up."""
PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
"""First pause before a restart, and the longest."""
START_S = 120.0
"""Deadline of a new container's server."""
PULL_S = 1800.0
"""Deadline of `docker run`, which may have to download the image."""
ANSWER_S = 10.0
WAIT_S = 300.0
"""Longest wait for a free session."""
_POLL_S = 0.1
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_GUARD = """\
trap "" TERM INT HUP
while read -r line; do run=$line; done
left=1800
while [ "$run" ] && [ "$left" -gt 0 ] && kill -0 "$run"; do
  "$0" rm --force --volumes "$1"
  left=$((left - 1))
  sleep 1
done >/dev/null 2>&1
exec "$0" rm --force --volumes "$1" >/dev/null 2>&1
"""
"""Reads the process of a `docker run` while there is one: it goes on when this process is killed."""


class ServerImage(BaseModel):
    """What a task file says of its image."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str
    port: int = Field(8000, gt=0, lt=1 << 16)
    """Of the server in the container."""
    containers: int = Field(1, gt=0)
    sessions: int = Field(0, ge=0)
    """Most sessions of one container at a time; 0 = as many as are asked for."""
    options: tuple[str, ...] = ()
    """Further arguments of `docker run`."""


class Container:
    """One container of an image, with a breaker of its own."""

    def __init__(self, image: ServerImage, cli: Cli) -> None:
        self._image, self._cli = image, cli
        self._lock = threading.Lock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._name = ""
        self._failed, self._pause, self._again = 0, PAUSE_S, 0.0
        self._stale = False
        """Whether it must be started again before the next session."""
        self._tried = 0
        """Restarts since the last session that worked."""
        self.url = self.cause = ""
        self.in_use = self.starts = self.restarts = 0

    @property
    def given_up(self) -> bool:
        return self._tried >= RESTARTS and self._stale

    @property
    def free(self) -> bool:
        """Whether a session may begin."""
        if self.given_up or (self._stale and (self.in_use or time.monotonic() < self._again)):
            return False
        return not self._image.sessions or self.in_use < self._image.sessions

    def ready(self) -> str:
        """Return the URL of a server that answers; start it where it does not. Raises GradeError."""
        with self._lock:
            if not self._stale and self._serves():
                return self.url
            again = self._guard is not None
            self.restarts, self._tried = self.restarts + again, self._tried + again
            self._remove()
            try:
                self._start()
            except (OSError, subprocess.TimeoutExpired, SetupError) as error:
                self._wait_longer(str(error))
                raise GradeError(f"start {self._image.image}: {error}") from error
            self._failed, self._stale = 0, False
            return self.url

    def failed(self, cause: str) -> None:
        """Count a session that failed."""
        self._failed += 1
        if self._failed >= FAILURES and not self._stale:
            self._wait_longer(cause)

    def worked(self) -> None:
        """Count a session that ended well."""
        self._failed, self._tried, self._pause = 0, 0, PAUSE_S

    def stop(self) -> None:
        """Remove the container; one that starts is left to the process beside it."""
        if self._lock.acquire(timeout=ANSWER_S):
            try:
                self._remove()
            finally:
                self._lock.release()

    def _remove(self) -> None:
        guard, self._guard, self.url = self._guard, None, ""
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on by itself
                guard.wait(START_S)

    def _wait_longer(self, cause: str) -> None:
        self._stale, self._again, self.cause = True, time.monotonic() + self._pause, cause
        log.warning("environment_failed image=%s pause_s=%g cause=%s", self._image.image, self._pause, cause)
        self._pause = min(2 * self._pause, MOST_PAUSE_S)

    def _serves(self) -> bool:
        if not self.url:
            return False
        # others at work may keep a server from answering in time
        return _answers(self.url) or (self.in_use > 1 and self._runs())

    def _runs(self) -> bool:
        done = _call(self._cli, "inspect", "--format", "{{.State.Running}}", self._name)
        return done.stdout.strip() == b"true"

    def _start(self) -> None:
        self._name, self.starts = f"insitu-env-{uuid.uuid4().hex}", self.starts + 1
        # Before the container: it must be removed also if this process is killed while it starts.
        command = ["/bin/sh", "-c", _GUARD, self._cli.program, self._name]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        port = self._image.port
        argv = ["run", "--detach", "--init", "--name", self._name, "--label", f"{LABEL}={owner()}"]
        argv += ["--publish", f"127.0.0.1::{port}", *self._image.options, self._image.image]
        self._run(argv)
        deadline = time.monotonic() + START_S
        while True:
            if at := _call(self._cli, "port", self._name, f"{port}/tcp").stdout.split():
                url = f"http://{at[0].decode()}"
                if _answers(url):
                    break
            if not self._runs() or time.monotonic() > deadline:
                raise SetupError(f"its server does not answer at port {port}: {self._said()}")
            time.sleep(_POLL_S)
        self.url = url
        log.info("environment_started image=%s starts=%d url=%s", self._image.image, self.starts, url)

    def _run(self, argv: Sequence[str]) -> None:
        command = [self._cli.program, *argv]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
            try:
                self._tell_guard(str(process.pid))
                _, err = process.communicate(timeout=PULL_S)
            except BaseException:
                process.kill()
                raise
        self._tell_guard("")
        if process.returncode:
            raise SetupError(str(classify(self._cli.name, "run", err)))

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()

    def _said(self) -> str:
        done = _call(self._cli, "logs", "--tail", "20", self._name)
        return last_line(done.stdout + done.stderr) or "it printed nothing"


class Lease:
    """One session's hold of a container."""

    def __init__(self, container: Container) -> None:
        self._container, self._failed = container, False
        self.url = ""

    def failed(self, cause: object) -> None:
        """Count this session as failed."""
        if not self._failed:
            self._failed = True
            self._container.failed(str(cause))

    def open(self) -> None:
        """Wait for the server. Raises GradeError."""
        try:
            self.url = self._container.ready()
        except GradeError:
            self._failed = True  # counted there
            raise

    def close(self) -> None:
        if self.url and not self._failed:
            self._container.worked()


class ServerPool:
    """The containers of one image; sessions may come from several threads and event loops."""

    def __init__(self, image: ServerImage) -> None:
        cli = Cli("docker" if shutil.which("docker") else "podman")
        cli.info()
        _reap(cli)
        self._lock = threading.Lock()
        self._closing, self._name = False, image.image
        self.containers = [Container(image, cli) for _ in range(image.containers)]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Lease]:
        """Hold a container whose server answers. Raises GradeError."""
        deadline = time.monotonic() + WAIT_S
        while (container := self._take()) is None:
            _check(deadline)
            await asyncio.sleep(_POLL_S)
        with self._held(container) as lease:
            _, error = await in_thread(lease.open)
            if error is not None:
                raise error
            yield lease

    @contextmanager
    def blocking(self) -> Iterator[Lease]:
        """Hold a container as `session` does, for code without an event loop."""
        deadline = time.monotonic() + WAIT_S
        while (container := self._take()) is None:
            _check(deadline)
            time.sleep(_POLL_S)
        with self._held(container) as lease:
            lease.open()
            yield lease

    def close(self) -> None:
        """Remove the containers; one that is in use when its session ends."""
        with self._lock:
            self._closing = True
            for container in self.containers:
                if not container.in_use:
                    container.stop()

    def _take(self) -> Container | None:
        """Return the least used container that is free, one that serves before one to be started."""
        with self._lock:
            if all(one.given_up for one in self.containers):
                last = self.containers[0]
                raise GradeError(f"{self._name} was started {last.starts} times and fails: {last.cause}")
            free = [one for one in self.containers if one.free]
            if not free:
                return None
            self._closing = False
            taken = min(free, key=lambda one: (one.in_use, not one.url))
            taken.in_use += 1
            return taken

    @contextmanager
    def _held(self, container: Container) -> Iterator[Lease]:
        lease = Lease(container)
        try:
            yield lease
        finally:
            lease.close()
            with self._lock:
                container.in_use -= 1
                if self._closing and not container.in_use:
                    container.stop()


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise GradeError(f"no container of the environment had a free session for {WAIT_S:g} s")


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=ANSWER_S) as reply:
            return bool(reply.status == 200)
    except (OSError, HTTPException):
        return False


def _reap(cli: Cli) -> None:
    """Remove containers of dead owners."""
    form = f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'
    listed = _call(cli, "ps", "--all", "--filter", f"label={LABEL}", "--format", form)
    for line in listed.stdout.decode("utf-8", "replace").splitlines():
        if len(row := line.split()) == 2 and is_dead(row[1]):
            _call(cli, "rm", "--force", "--volumes", row[0])


def _call(cli: Cli, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    argv, none = [cli.program, *arguments], subprocess.DEVNULL
    return subprocess.run(argv, capture_output=True, stdin=none, timeout=START_S, check=False)


_POOLS: dict[str, ServerPool] = {}
_MAKING = threading.Lock()


def image_of(keys: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return what a task file says of its image, for rows; raise TaskError."""
    try:
        return ServerImage.model_validate(keys).model_dump(exclude_defaults=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise TaskError(f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def pool_of(server: Mapping[str, Any]) -> ServerPool:
    """Return this process's pool of an image. Raises SetupError without a daemon."""
    name = json.dumps(server, sort_keys=True)
    with _MAKING:
        if name not in _POOLS:
            _POOLS[name] = ServerPool(ServerImage.model_validate(server))
        return _POOLS[name]


def gauges() -> dict[str, int]:
    """Return the figures of all pools of this process for the timeline; {} without one."""
    made = [container for pool in _POOLS.values() for container in pool.containers]
    if not made:
        return {}
    return {
        "environments_up": sum(bool(one.url) for one in made),
        "environments_started": sum(one.starts for one in made),
        "environments_restarts": sum(one.restarts for one in made),
        "environments_in_use": sum(one.in_use for one in made),
    }


def close_all() -> None:
    """Remove the containers of all pools, also those still in use when their sessions end."""
    for pool in list(_POOLS.values()):
        pool.close()
