"""Child processes of a benchmark that speak JSON lines. Callers: gateway, grpo, soak."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import orjson

ROOT = Path(__file__).parents[1]
"""Where `python -m benchmarks.…` finds this package."""


class Process:
    """A child that takes and gives one line of JSON at a time."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        if self.child.stdin is None or self.child.stdout is None:
            raise RuntimeError("a child without pipes")
        self.stdin, self.stdout = self.child.stdin, self.child.stdout

    @classmethod
    def of(cls, command: Sequence[str], **options: Any) -> Self:
        """A new one of this command; `options` as for Popen."""
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options))

    def say(self, value: object) -> None:
        self.stdin.write(orjson.dumps(value) + b"\n")
        self.stdin.flush()

    def receive(self) -> Any:
        """The child's next line. Raises RuntimeError when it has ended."""
        line = self.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with status {self.child.wait()}")
        return line.strip() if line.strip() == b"ready" else orjson.loads(line)

    def ask(self, value: object) -> Any:
        self.say(value)
        return self.receive()

    def end(self) -> None:
        """The end of its stdin ends the child; a stuck one is killed."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.stdout.close()


@contextmanager
def running(module: str, *arguments: str) -> Iterator[Process]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    process = Process.of([sys.executable, "-m", module, *arguments], env=os.environ | {"PYTHONPATH": path})
    try:
        yield process
    finally:
        process.end()
