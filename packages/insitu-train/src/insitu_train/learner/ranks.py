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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt
import torch

from insitu.engines.safetensors_file import Manifest
from insitu.errors import InsituError, TrainError, boundary
from insitu.storage.temp_dirs import scratch_folder
from insitu_train.channel.parent_watch import child_parser, follow_parent, main_of_child
from insitu_train.channel.rpc import Decoder, Frame, Meta, encode
from insitu_train.learner.hosts import Hosts
from insitu_train.learner.rank_process import LOST, Place, RankChild, end_all, first_dead
from insitu_train.learner.serialization import decode_plan
from insitu_train.loss.losses import own_loss
from insitu_train.model.base import Policy
from insitu_train.model.load import device_of, open_policy
from insitu_train.options import TrainConfig, parse_config, shards_of
from insitu_train.trainer import checkpoint
from insitu_train.trainer.checkpoint import CheckpointWriter
from insitu_train.trainer.checksum import WeightChecksum
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
from insitu_train.weights.export import export as write_export
from insitu_train.weights.files import ExportRequest


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
        if line := self.dead():
            raise RankLostError(f"{line}: see the learner's log")
        for child in self._children:
            with boundary(RankLostError, f"write to rank {child.rank} of the learner"):
                child.send(frame)
        if self.hosts is not None:
            self.hosts.send(frame, Path(scores) if (scores := meta.get("scores")) else None)

    def dead(self) -> str:
        """Return which rank of this machine has died; empty while all run."""
        return first_dead(self._children)

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

    def waiting(self) -> str:
        """Return the hosts that another life of the learner could have; empty if there are none."""
        return "" if self.hosts is None else self.hosts.waiting()

    def described(self) -> str:
        """Return who takes part; empty without hosts."""
        if self.hosts is None:
            return ""
        hosts = [f"{self.place.here} here", *map(str, self.hosts.world)]
        return f"train.ranks: {self.place.world} ranks, {', '.join(hosts)}"


@contextmanager
def started(
    model: Path, config: TrainConfig, *, again: bool = False, losses: Path | None = None
) -> Iterator[RankProcesses]:
    """Start the configured ranks; none for one rank. They end with the context.

    again: a learner of this run ended before; it goes on with the hosts that come. losses: file of hosts that
    were lost.
    """
    if config.world == 1:
        yield RankProcesses(Ranks(), [])
        return
    with scratch_folder() as folder, ExitStack() as stack:
        hosts = _hosts(stack, Hosts(config, model, losses), again=again) if config.meeting else None
        world = config.ranks_here + (hosts.meet(again=again) if hosts else 0)
        first = Place(
            rank=0,
            world=world,
            index=0,
            here=config.ranks_here,
            store=str(folder / "store"),
            shards=_shards(config, hosts),
        )
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
                hosts.start(port, world, first.shards)
            for index in range(1, config.ranks_here):
                place = first.changed(rank=index, index=index)
                children.append(RankChild.start(place, model, config))
            ranks = _join(first, config, store)
        yield RankProcesses(ranks, children, hosts, first)


def _shards(config: TrainConfig, hosts: Hosts | None) -> int:
    others = [host.ranks for host in hosts.world] if hosts else []
    return shards_of([config.ranks_here, *others]) if config.shard else 0


def _hosts(stack: ExitStack, hosts: Hosts, *, again: bool) -> Hosts:
    def close(kind: object, error: BaseException | None, trace: object) -> None:
        # A learner that could not start ends its run; after a death hosts come back.
        if isinstance(error, InsituError) and not again:
            hosts.end(str(error))
        hosts.close()

    stack.push(close)
    return hosts


def _join(place: Place, config: TrainConfig, store: Path | Any) -> Ranks:
    ranks = join(
        place.rank,
        place.world,
        store,
        deadline_s=config.step_timeout_s,
        device=device_of(config.policy, place.index, place.world, place.here),
        shards=place.shards,
        address=place.address,
    )
    ranks.here = place.here
    return ranks


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
    """Return the trainer of one rank, beside a sampler that may still fill `reserved` bytes.

    Raises TrainError where the ranks, of several machines perhaps, have read different files.
    """
    made = Trainer(model, config, reference=read_reference(config, folder), ranks=ranks, reserved=reserved)
    _compare(
        ranks, {"train.reference": checkpoint.reference_of(made), "train.loss": own_loss(config.loss.loss)}
    )
    return made


def _compare(ranks: Ranks, read: Mapping[str, str]) -> None:
    """Compare what each rank has read besides the weights. read: hex digest by key, empty = nothing."""
    mine = [int(found[:15] or "0", 16) for found in read.values()]
    most = ranks.most([*mine, *(-number for number in mine)])
    for name, largest, least in zip(read, most, most[len(mine) :], strict=False):
        if largest != -least:
            raise TrainError(f"{name}: its file is another one on some host")


def _frames(pipe: IO[bytes]) -> Iterator[Frame]:
    decoder = Decoder()
    while data := os.read(pipe.fileno(), 1 << 20):
        yield from decoder.feed(data)


def export(trainer: Trainer, meta: Meta, assets: Path, owners: int) -> Manifest:
    """Write the weights as `train.export` asks; sharded ranks all call it."""
    wanted = ExportRequest(
        folder=Path(meta["folder"]),
        version=int(meta["version"]),
        dtype=meta["dtype"],
        own_head=bool(meta["own_head"]),
        adapter=bool(meta["adapter"]),
    )
    ranks = trainer.ranks if trainer.ranks.sharded else Ranks()
    parts = owners if ranks.sharded and not wanted.adapter else 1
    with trainer.whole(owners=parts, frozen=not wanted.adapter):
        return write_export(trainer.model, wanted, assets, ranks, parts)


class _Follower:
    """Executes the commands of rank 0 on another rank."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder
        self._writer, self._checksum = CheckpointWriter(), WeightChecksum(trainer.model, trainer.ranks)

    def execute(self, frame: Frame) -> None:
        """Do what a command says. Raises TrainError."""
        meta, trainer = frame.meta, self._trainer
        if meta["op"] == "load" and meta["folder"]:
            checkpoint.load(trainer, Path(meta["folder"]))
        elif meta["op"] == "load":
            checkpoint.load_shared(trainer, None)
        elif meta["op"] == "save":
            self._writer.wait()  # rank 0 has said why it failed
            checkpoint.begin(trainer, self._writer, Path(meta["folder"]), None, int(meta["owners"]))
        elif meta["op"] == "export":
            export(trainer, meta, self._folder, int(meta["owners"]))
        elif meta["op"] == "digest":
            self._checksum.now()
        else:
            trainer.step(decode_plan(frame.arrays), Path(meta["scores"]) if meta["scores"] else None)


def run(args: argparse.Namespace) -> None:
    """Execute the commands of rank 0 until its pipe ends; exit with `LOST` when another rank is lost."""
    try:
        _follow(args)
    except RankLostError as error:
        print(f"RankLostError: {error}", file=sys.stderr)
        # without memory it has left the others alone
        raise SystemExit(1 if isinstance(error.__cause__, torch.OutOfMemoryError) else LOST) from error


def _follow(args: argparse.Namespace) -> None:
    follow_parent(args.parent)
    config, place = parse_config(args.train), Place.model_validate_json(args.place)
    far = place.store.startswith("tcp://")
    store = connect_store(place.store, config.step_timeout_s) if far else Path(place.store)
    ranks = _join(place, config, store)
    model = open_model(args.model, config, ranks, place)
    trainer = make_trainer(model, args.model, config, ranks)
    follower = _Follower(trainer, args.model)
    for frame in _frames(sys.stdin.buffer):
        try:
            follower.execute(frame)
        except RankLostError:
            raise
        except TrainError as error:
            # Rank 0 reports the same error; if it does not, the next step finds diverged weights.
            print(f"rank {place.rank}: {error}", file=sys.stderr)
        trainer.release_cache()
    leave()


def main(argv: list[str]) -> int:
    """Return 0, or 1 with one line on standard error."""
    module = "insitu_train.learner.ranks"
    parser = child_parser(module, __doc__, place=str, model=Path, parent=int, train=str)
    return main_of_child(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
