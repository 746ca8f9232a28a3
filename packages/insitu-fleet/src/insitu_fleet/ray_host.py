"""What Ray runs on another host of a trainer: `insitu ranks`, as a child that ends with Ray's worker.

Ray gets this module by value, so that a host without insitu fails with its own line. It must import nothing
of insitu.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

_AGAIN_S = 5.0
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Before exec in a child: it gets SIGTERM when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_ranks(words: list[str], variables: dict[str, str]) -> tuple[str, int, str]:
    """Run `insitu ranks` with these arguments to its end, again where it is killed.

    Return the name of the host, the exit status and the last line that it said.
    """
    command = [sys.executable, "-P", "-m", "insitu", "ranks", *words]
    while True:
        last = ""
        with subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=end_with_parent,
        ) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                last = line.strip() or last
        if process.returncode >= 0:
            return socket.gethostname(), process.returncode, last
        time.sleep(_AGAIN_S)
