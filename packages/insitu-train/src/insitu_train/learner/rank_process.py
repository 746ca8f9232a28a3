"""A rank of a learner as a child process: where it stands, its start, its pipe, its end. Needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from insitu.errors import TrainError, boundary
from insitu.types.keys import Keys
from insitu_train.options import TrainConfig, dump_config

LOST = 3
"""Exit status of a rank that another one has left alone."""
_END_S = 10.0
"""Time for a clean exit of a rank."""


class Place(Keys):
    """Where a rank stands among all."""

    rank: int
    world: int
    index: int
    """Its number among the ranks of its machine, for its GPU."""
    here: int
    """Ranks of its machine."""
    store: str
    """Where ranks meet: a file, or tcp://HOST:PORT of torch's TCPStore."""
    shards: int = 0
    """Ranks that hold one copy of a sharded model; 0 = each holds a whole one."""
    address: str = ""
    """With hosts: the address of its machine that the others reach."""


class RankChild:
    """The parent's handle of one rank."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank, self._process = rank, process

    @classmethod
    def start(
        cls, place: Place, model: Path, config: TrainConfig, environment: Mapping[str, str] | None = None
    ) -> RankChild:
        """Start it, with this process's environment and output if not said otherwise. Raises TrainError."""
        arguments = [
            *("--place", place.model_dump_json(), "--model", str(model)),
            *("--parent", str(os.getpid()), "--train", dump_config(config)),
        ]
        with boundary(TrainError, f"start rank {place.rank}"):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "insitu_train.learner.ranks", *arguments],
                stdin=subprocess.PIPE,
                env=environment,
            )
        return cls(place.rank, process)

    @property
    def exit_line(self) -> str:
        """How it ended; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"rank {self.rank} died (exit status {code})"

    def send(self, frame: bytes) -> None:
        """Write an encoded command to its pipe. Raises OSError."""
        pipe = self._pipe
        pipe.write(frame)
        pipe.flush()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Close its pipe and wait for its exit, then kill it."""
        try:
            self._pipe.close()
            self._process.wait(_END_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    @property
    def _pipe(self) -> IO[bytes]:
        if self._process.stdin is None:
            raise TrainError("a rank of the learner has no pipe")
        return self._process.stdin


def left_alone(line: str) -> bool:
    """Return whether a rank that ended so was only left alone by another one."""
    return line.endswith(f"(exit status {LOST})")


def first_dead(children: Sequence[RankChild]) -> str:
    """Return how a rank died, one that died of itself rather than one left alone; empty while all run."""
    lines = [line for child in children if (line := child.exit_line)]
    return min(lines, key=left_alone, default="")


def end_all(children: Sequence[RankChild], *, kill: bool = False) -> None:
    """End ranks, at once with `kill`."""
    for child in children:
        if kill:
            child.kill()
    for child in children:
        child.end()
