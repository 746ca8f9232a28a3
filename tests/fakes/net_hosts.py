"""Hosts as namespaces of this machine, each with an address, a name and a process table of its own, on one
network. Needs root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from insitu.errors import SetupError

_FIRST = (
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
)
"""The first process of a host: takes what ended, and ends the host with its input."""
START_S = 20.0
SHORT_RUN = """
[run]
steps = 3
[eval]
count = 2
[model]
max_context_tokens = 2048
[tasks]
source = "toy"
[harness]
agent = "script"
mode = "warm"
workers = 2
[collect]
groups_per_step = 2
group_size = 4
[train]
min_groups = 1
"""
"""Configuration of a run of minutes; ends in the table train."""


class NetHost:
    """One host; commands start in it by `nsenter`."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._started: list[subprocess.Popen[bytes]] = []
        words = ["unshare", "--net", "--pid", "--uts", "--mount", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            [*words, sys.executable, "-S", "-c", _FIRST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            self._holder.wait()
            raise SetupError("no namespaces: unshare failed")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.pid = int(children.split()[0])
        """Of its first process, from outside."""
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    def words(self, *command: str, cwd: Path | None = None) -> list[str]:
        """Return the command line that runs a command in it."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-p", "-u", "-m", "--"]
        return [*enter, "env", "-C", str(cwd or Path.cwd()), *command]

    def run(self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run a command to its end and return what it printed. Raises SetupError."""
        words = self.words(*command, cwd=cwd)
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise SetupError(f"{' '.join(command)} on {self.name}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    @contextlib.contextmanager
    def started(
        self, *command: str, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command until the end of the context, then end it with SIGTERM, or SIGKILL after a while."""
        with log.open("ab") as output:
            words = self.words(*command, cwd=cwd)
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        self._started.append(process)
        try:
            yield process
        finally:
            for child in children_of(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                for child in children_of(process.pid):
                    os.kill(child, signal.SIGKILL)
                process.kill()
                process.wait()
            self._started.remove(process)

    def processes(self, word: bytes = b"") -> list[int]:
        """Return its processes without the first, all or those with a word in their command line."""
        mine, found = Path(f"/proc/{self.pid}/ns/pid").readlink(), list[int]()
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (place / "ns/pid").readlink() == mine and word in (place / "cmdline").read_bytes():
                    found.append(int(place.name))
        return [pid for pid in found if pid != self.pid]

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes but the first."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        for process in self._started:  # nsenter stops with its child, but does not go on with it
            if number == signal.SIGCONT:
                process.send_signal(number)

    def cable(self, up: bool) -> None:
        """Plug in its cable, or pull it: nothing goes in or out, and nothing says so."""
        self.run("ip", "link", "set", "eth0", "up" if up else "down")

    def slow(self, times: int) -> None:
        """Let it run an eighth of the time for a while, as one that has other work."""
        for _ in range(times):
            self.signal(signal.SIGSTOP)
            time.sleep(3.5)
            self.signal(signal.SIGCONT)
            time.sleep(0.5)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        for end in (self._holder.stdin, self._holder.stdout):
            assert end is not None
            end.close()
        self._holder.wait(START_S)


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextlib.contextmanager
def net_hosts(*names: str) -> Iterator[list[NetHost]]:
    """Yield hosts 10.77.0.1, .2, ... on one network, a bridge on the first. Raises SetupError."""
    if os.geteuid():
        raise SetupError("hosts need root")
    with contextlib.ExitStack() as stack:
        hosts = []
        for number, name in enumerate(names, 1):
            try:
                hosts.append(NetHost(name, f"10.77.0.{number}"))
            except OSError as error:
                raise SetupError(f"no hosts: {error}") from error
            stack.callback(hosts[-1].close)
        first = hosts[0]
        first.run("ip", "link", "add", "hub", "type", "bridge")
        first.run("ip", "link", "set", "hub", "up")
        for number, host in enumerate(hosts, 1):
            peer = (
                ["peer", "name", "eth0", "netns", str(host.pid)] if number > 1 else ["peer", "name", "eth0"]
            )
            # In the network alone: the other host's number is one of the outside.
            enter = ["nsenter", "-t", str(first.pid), "-n", "ip", "link", "add", f"port{number}"]
            subprocess.run([*enter, "type", "veth", *peer], check=True, capture_output=True)
            first.run("ip", "link", "set", f"port{number}", "master", "hub", "up")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
        stack.enter_context(_names(hosts))
        yield hosts


@contextlib.contextmanager
def _names(hosts: list[NetHost]) -> Iterator[None]:
    """Let hosts know each other by name: their own /etc/hosts, which no other process sees."""
    with tempfile.NamedTemporaryFile("w", prefix="hosts-", suffix=".txt") as file:
        file.write("127.0.0.1 localhost\n" + "".join(f"{one.address} {one.name}\n" for one in hosts))
        file.flush()
        for host in hosts:
            host.run("mount", "--bind", file.name, "/etc/hosts")
        yield


def until(true: Any, what: str, wait_s: float = 120.0) -> None:
    """Wait for a condition."""
    ends = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.1)
