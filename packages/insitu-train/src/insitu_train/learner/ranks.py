"""The other ranks of a learner: processes that take part in every training step.

    learner (rank 0) --pipe: step, load--> rank 1 .. n     all: Trainer.step, gradients summed by gloo

A rank has no sampler and no socket. It executes the commands of its pipe, ends with the pipe or its parent,
and logs to the learner's log. Commands are sent to all ranks before the learner acts itself, since a step is
collective. Ranks of other hosts get them through an agent there (host_agent.py). Run as `python -m
insitu_train.learner.ranks --place JSON --model DIR --parent PID --train JSON`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt

from insitu.errors import InsituError, TrainError, boundary
from insitu_train.channel.parent_watch import follow_parent, main_of_child
from insitu_train.channel.rpc import Decoder, Frame, Meta, encode
from insitu_train.learner.hosts import Hosts
from insitu_train.learner.rank_process import Place, RankChild, end_all
from insitu_train.learner.serialization import decode_plan
from insitu_train.model.base import Policy
from insitu_train.model.load import device_of, open_policy
from insitu_train.options import TrainConfig, parse_config
from insitu_train.trainer import checkpoint
from insitu_train.trainer.distributed import (
    RankLostError,
    Ranks,
    Sharded,
    connect_store,
    join,
    leave,
    tcp_store,
)
from insitu_train.trainer.reference import read_reference
from insitu_train.trainer.trainer import Trainer


class RankProcesses:
    """Rank 0's handle of the other ranks, here and on other hosts."""

    def __init__(
        self,
        ranks: Ranks,
        children: Sequence[RankChild],
        hosts: Hosts | None = None,
        place: Place | None = None,
    ) -> None:
        self.ranks, self._children, self.hosts = ranks, children, hosts
        self.place = place or Place(rank=0, world=1, index=0, here=1, store="")

    def send(self, op: str, meta: Meta, arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        """Send a command to every rank without waiting. Raises RankLostError when one is dead."""
        frame = encode({"op": op, **meta}, arrays) if self.place.world > 1 else b""
        for child in self._children:
            if line := child.exit_line:
                raise RankLostError(f"{line}: see the learner's log")
            with boundary(RankLostError, f"write to rank {child.rank} of the learner"):
                child.send(frame)
        if self.hosts is not None:
            self.hosts.send(frame, Path(scores) if (scores := meta.get("scores")) else None)

    def working(self) -> AbstractContextManager[None]:
        """Return the context of work with all ranks: the process ends if a host is lost meanwhile."""
        return nullcontext() if self.hosts is None else self.hosts.working()

    def load(self, trainer: Trainer, folder: Path) -> None:
        """Restore all ranks from a checkpoint, which hosts need not reach. Raises TrainError."""
        far = self.hosts is not None
        self.send("load", {"folder": "" if far else str(folder)})
        if far:
            checkpoint.load_shared(trainer, folder)
        else:
            checkpoint.load(trainer, folder)

    def described(self) -> str:
        """Return who takes part; empty without hosts."""
        if self.hosts is None:
            return ""
        hosts = [f"{self.place.here} here", *map(str, self.hosts.world)]
        return f"train.ranks: {self.place.world} ranks, {', '.join(hosts)}"


@contextmanager
def started(model: Path, config: TrainConfig, *, again: bool = False) -> Iterator[RankProcesses]:
    """Start the configured ranks; none for one rank. They end with the context.

    again: a learner died before; it goes on with the hosts that come.
    """
    if config.world == 1:
        yield RankProcesses(Ranks(), [])
        return
    with tempfile.TemporaryDirectory(prefix="insitu-ranks-") as folder, ExitStack() as stack:
        hosts = _hosts(stack, model, config, again=again) if config.meeting else None
        world = config.ranks_here + (hosts.meet(again=again) if hosts else 0)
        first = Place(rank=0, world=world, index=0, here=config.ranks_here, store=str(Path(folder) / "store"))
        if world == 1:
            yield RankProcesses(Ranks(), [], hosts)
            return
        children: list[RankChild] = []
        stack.callback(end_all, children)
        stack.callback(leave)
        with hosts.working() if hosts else nullcontext():
            store: Path | Any = Path(first.store)
            if hosts and hosts.world:
                store, port = tcp_store(hosts.here, config.step_timeout_s)
                first = first.changed(store=f"tcp://{hosts.here}:{port}", address=hosts.here)
                hosts.start(port, world)
            for index in range(1, config.ranks_here):
                place = first.changed(rank=index, index=index)
                children.append(RankChild.start(place, model, config))
            ranks = _join(first, config, store)
        yield RankProcesses(ranks, children, hosts, first)


def _hosts(stack: ExitStack, model: Path, config: TrainConfig, *, again: bool) -> Hosts:
    hosts = Hosts(config, model)

    def close(kind: object, error: BaseException | None, trace: object) -> None:
        # A learner that could not start ends its run; after a death hosts come back.
        if isinstance(error, InsituError) and not again:
            hosts.end(str(error))
        hosts.close()

    stack.push(close)
    return hosts


def _join(place: Place, config: TrainConfig, store: Path | Any) -> Ranks:
    return join(
        place.rank,
        place.world,
        store,
        deadline_s=config.step_timeout_s,
        device=device_of(config.policy, place.index, place.world, place.here),
        sharded=config.shard,
        address=place.address,
    )


def open_model(folder: Path, config: TrainConfig, ranks: Ranks, place: Place) -> Policy:
    """Open the model of one rank; a sharded rank reads only its part."""
    device = device_of(config.policy, place.index, place.world, place.here)
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


def _frames(pipe: IO[bytes]) -> Iterator[Frame]:
    decoder = Decoder()
    while data := os.read(pipe.fileno(), 1 << 20):
        yield from decoder.feed(data)


def _execute(trainer: Trainer, frame: Frame) -> None:
    meta = frame.meta
    if meta["op"] == "load" and meta["folder"]:
        checkpoint.load(trainer, Path(meta["folder"]))
    elif meta["op"] == "load":
        checkpoint.load_shared(trainer, None)
    elif meta["op"] == "gather":
        with trainer.whole(moments=meta["moments"]):
            pass  # rank 0 reads
    else:
        trainer.step(decode_plan(frame.arrays), Path(meta["scores"]) if meta["scores"] else None)


def run(args: argparse.Namespace) -> None:
    """Execute the commands of rank 0 until its pipe ends."""
    follow_parent(args.parent)
    config, place = parse_config(args.train), Place.model_validate_json(args.place)
    far = place.store.startswith("tcp://")
    store = connect_store(place.store, config.step_timeout_s) if far else Path(place.store)
    ranks = _join(place, config, store)
    model = open_model(args.model, config, ranks, place)
    trainer = make_trainer(model, args.model, config, ranks)
    for frame in _frames(sys.stdin.buffer):
        try:
            _execute(trainer, frame)
        except RankLostError:
            raise
        except TrainError as error:
            # Rank 0 reports the same error; if it does not, the next step finds diverged weights.
            print(f"rank {place.rank}: {error}", file=sys.stderr)
        trainer.release_cache()
    leave()


def main(argv: list[str]) -> int:
    """Return 0, or 1 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="insitu_train.learner.ranks", description=__doc__)
    parser.add_argument("--place", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--train", required=True)
    return main_of_child(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
