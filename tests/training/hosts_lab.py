"""Agents of other hosts as processes of this machine, each at a loopback address of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from insitu.shutdown import descendants
from insitu_train.channel.host_link import SECRET

KEY = "a secret of these tests"
_NAMED = """
import runpy, socket, sys
name = sys.argv.pop(1)
socket.gethostname = lambda: name
runpy.run_module("insitu", run_name="__main__", alter_sys=True)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def agent_process(
    port: int, *arguments: str, log: Path, secret: str = KEY, address: str = "127.0.0.1", name: str = ""
) -> subprocess.Popen[bytes]:
    program = ("-c", _NAMED, name) if name else ("-m", "insitu")
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *program, "ranks", f"{address}:{port}", *arguments],
            env={**os.environ, SECRET: secret},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


@contextmanager
def agent(
    port: int, *arguments: str, log: Path, secret: str = KEY, address: str = "127.0.0.1", name: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Killed with its ranks at the end, if it is still there. name: of the host, else this machine's."""
    process = agent_process(port, *arguments, log=log, secret=secret, address=address, name=name)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ranks_below(pid: int) -> list[int]:
    found = []
    for child in descendants(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"insitu_train.learner.ranks" in command:
            found.append(child)
    return found
