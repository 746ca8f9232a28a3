"""The other ranks of a learner: processes that take part in every training step.

    learner (rank 0) --pipe: step, load--> rank 1 .. n     all: Trainer.step, gradients summed by gloo

A rank has no sampler and no socket. It executes the commands of its pipe, ends with the pipe or its parent,
and logs to the learner's log. Commands are sent to all ranks before the learner acts itself, since a step is
collective. Run as `python -m insitu_train.learner.ranks --rank R --world N --store FILE --model DIR
--parent PID --train JSON`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt

from insitu.errors import TrainError, boundary
from insitu_train.channel.parent_watch import follow_parent, main_of_child
from insitu_train.channel.rpc import Decoder, Frame, Meta, encode
from insitu_train.learner.serialization import decode_plan
from insitu_train.model.base import Policy
from insitu_train.model.load import device_of, open_policy
from insitu_train.options import TrainConfig, dump_config, parse_config
from insitu_train.trainer import checkpoint
from insitu_train.trainer.distributed import RankLostError, Ranks, Sharded, join, leave
from insitu_train.trainer.reference import read_reference
from insitu_train.trainer.trainer import Trainer

_END_S = 10.0
"""Time for a clean exit of a rank."""


class RankProcesses:
    """Rank 0's handle of the other ranks."""

    def __init__(self, ranks: Ranks, children: list[subprocess.Popen[bytes]]) -> None:
        self.ranks, self._children = ranks, children

    def send(self, op: str, meta: Meta, arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        """Send a command to every rank without waiting. Raises TrainError when one is dead."""
        frame = encode({"op": op, **meta}, arrays) if self._children else b""
        for rank, child in enumerate(self._children, 1):
            if (code := child.poll()) is not None:
                raise RankLostError(f"rank {rank} died (exit status {code}): see the learner's log")
            with boundary(RankLostError, f"write to rank {rank} of the learner"):
                pipe = _pipe(child)
                pipe.write(frame)
                pipe.flush()


@contextmanager
def started(model: Path, config: TrainConfig) -> Iterator[RankProcesses]:
    """Start the configured ranks; none for one rank. They end with the context."""
    if config.ranks == 1:
        yield RankProcesses(Ranks(), [])
        return
    with tempfile.TemporaryDirectory(prefix="insitu-ranks-") as folder:
        store = Path(folder) / "store"
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, config.ranks):
                children.append(_spawn(rank, store, model, config))
            yield RankProcesses(_join(0, store, config), children)
        finally:
            leave()
            for child in children:
                _end(child)


def _join(rank: int, store: Path, config: TrainConfig) -> Ranks:
    device = device_of(config.policy, rank, config.ranks)
    limit = config.step_timeout_s
    return join(rank, config.ranks, store, deadline_s=limit, device=device, sharded=config.shard)


def open_model(folder: Path, config: TrainConfig, ranks: Ranks) -> Policy:
    """Open the model of one rank; a sharded rank reads only its part."""
    device = device_of(config.policy, ranks.rank, config.ranks)
    if not isinstance(ranks, Sharded):
        return open_policy(folder, config.policy, device)
    if config.policy.kind != "hf":
        raise TrainError("train.shard: needs policy.kind hf")
    return open_policy(folder, config.policy, device, ranks.mesh())


def make_trainer(
    model: Policy, folder: Path, config: TrainConfig, ranks: Ranks, reserved: int = 0
) -> Trainer:
    """Return the trainer of one rank, beside a sampler that may still fill `reserved` bytes."""
    return Trainer(model, config, reference=read_reference(config, folder), ranks=ranks, reserved=reserved)


def _spawn(rank: int, store: Path, model: Path, config: TrainConfig) -> subprocess.Popen[bytes]:
    arguments = [
        *("--rank", str(rank), "--world", str(config.ranks), "--store", str(store)),
        *("--model", str(model), "--parent", str(os.getpid()), "--train", dump_config(config)),
    ]
    with boundary(TrainError, f"start rank {rank}"):
        # inherits the learner's environment (PYTHONPATH, thread settings) and log
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "insitu_train.learner.ranks", *arguments], stdin=subprocess.PIPE
        )


def _pipe(child: subprocess.Popen[bytes]) -> IO[bytes]:
    if child.stdin is None:
        raise TrainError("a rank of the learner has no pipe")
    return child.stdin


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        _pipe(child).close()
        child.wait(_END_S)
    except (OSError, subprocess.TimeoutExpired):
        child.kill()
        child.wait()


def _frames(pipe: IO[bytes]) -> Iterator[Frame]:
    decoder = Decoder()
    while data := os.read(pipe.fileno(), 1 << 20):
        yield from decoder.feed(data)


def run(args: argparse.Namespace) -> None:
    """Execute the commands of rank 0 until its pipe ends."""
    follow_parent(args.parent)
    config = parse_config(args.train)
    ranks = _join(args.rank, args.store, config)
    model = open_model(args.model, config, ranks)
    trainer = make_trainer(model, args.model, config, ranks)
    for frame in _frames(sys.stdin.buffer):
        if frame.meta["op"] == "load":
            checkpoint.load(trainer, Path(frame.meta["folder"]))
        elif frame.meta["op"] == "gather":
            with trainer.whole(moments=frame.meta["moments"]):
                pass  # rank 0 reads
        else:
            plan, scores = decode_plan(frame.arrays), frame.meta["scores"]
            try:
                trainer.step(plan, Path(scores) if scores else None)
            except TrainError as error:
                # Rank 0 reports the same error; if it does not, the next step finds diverged weights.
                print(f"rank {args.rank}: {error}", file=sys.stderr)
            trainer.release_cache()
    leave()


def main(argv: list[str]) -> int:
    """Return 0, or 1 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="insitu_train.learner.ranks", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--train", required=True)
    return main_of_child(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
