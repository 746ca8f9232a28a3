"""Data-parallel training: every rank computes its micro-batches, gradients are summed.

All ranks run the same `Trainer.step` on the same plan with the same weights. The planner fixes row weights
for the whole step, so gradients are summed, not averaged. An error on one rank is raised on all, and after an
update ranks compare their weights. Replicas (`Together`) hold everything; `Sharded` ranks hold a part each
(model/shard.py), of one copy or of a copy per host, and communicate in every layer, so all run equally many
passes. `Ranks` itself is a single process.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from insitu.errors import BadStepError, ConfigError, TrainError, boundary
from insitu_train.plan.packing import MicroBatch

T = TypeVar("T")
_BAD = "bad step: "
"""Marks a BadStepError among the errors of the ranks."""
_ERROR_BYTES = 1024
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""


class RankLostError(TrainError):
    """A rank died or did not answer in time; the others cannot continue."""


_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LARGEST = frozenset({"gap", "seen"})
"""Measures that are combined by maximum; the others are sums."""


class Ranks:
    """A single process, and the interface of several; each method is called by all ranks or by none."""

    rank, world = 0, 1
    here = 0
    """Ranks of this machine, which share its memory; 0 = all."""
    sharded = False
    """Each holds a part of every weight; passes and reading weights are collective."""

    def mine(self, batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """Return the batches that this rank computes, in order; each counts on one rank."""
        return [batch for batch in batches if self.counts(batch)]

    def counts(self, batch: MicroBatch) -> bool:
        """Return whether a batch of `mine` counts; others are computed with zero weight."""
        return True

    def among(self, batch: MicroBatch) -> Ranks:
        """Return those who compute a batch of this rank together, who all call this; all ranks for others."""
        return self

    def in_step(self, work: Callable[[], T]) -> T:
        """Run `work` between two passes; an error that would leave others waiting is raised on all."""
        return work()

    def attempt(self, work: Callable[[], T]) -> T:
        """Run `work`, or raise the TrainError of the first failed rank on all."""
        return work()

    def total(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place."""
        return tensor

    def most(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each value over ranks."""
        return list(values)

    def combine(self, parameters: Sequence[torch.nn.Parameter], measures: Any) -> None:
        """Sum gradients and the numbers among the fields of a dataclass over ranks, in place."""

    def agree(self, parameters: Iterable[Tensor]) -> None:
        """Raise TrainError on all ranks unless they hold the same bits."""


class Together(Ranks):
    """One of several replicas over a torch process group: gloo for CPUs, NCCL for GPUs (see `join`)."""

    def __init__(
        self,
        group: Any,
        device: torch.device | None = None,
        meet: Callable[[int, int], Any] | None = None,
    ) -> None:
        """Join `group`, a ProcessGroup or one of its backends, with tensors on `device`.

        meet: returns the group of some successive ranks, given the first and their number.
        """
        self._group, self._meet = group, meet
        self._parts = dict[tuple[int, int], Ranks]()
        self._device = device or torch.device("cpu")
        self.rank, self.world = int(group.rank()), int(group.size())

    def counts(self, batch: MicroBatch) -> bool:
        if batch.ranks > 1:
            return batch.rank <= self.rank < batch.rank + batch.ranks
        return batch.rank % self.world == self.rank

    def among(self, batch: MicroBatch) -> Ranks:
        if batch.ranks in (1, self.world) or self._meet is None:
            return self
        named = (batch.rank, batch.ranks)
        if named not in self._parts:
            with _all_there(f"meet the {batch.ranks} ranks of a row"):
                self._parts[named] = Together(self._meet(*named), self._device)
        return self._parts[named]

    def attempt(self, work: Callable[[], T]) -> T:
        error = ""
        result: list[T] = []
        try:
            result.append(work())
        except RankLostError:
            raise  # the others are in another conversation, and end with this process
        except TrainError as raised:
            error = (_BAD if isinstance(raised, BadStepError) else "") + (str(raised) or "failed")
        words = error.encode(errors="replace")[:_ERROR_BYTES]
        message = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
        message[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8) if words else 0
        for line in self._gather(message):
            if int(line[0]):
                text = bytes(line.tolist()).rstrip(b"\0").decode(errors="replace")
                kind = BadStepError if text.startswith(_BAD) else TrainError
                raise kind(text.removeprefix(_BAD))
        return result[0]

    def total(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self._device)
        with _all_there("sum over ranks"):
            self._group.allreduce([moved]).wait()
        return tensor if moved is tensor else tensor.copy_(moved)

    def most(self, values: Sequence[int]) -> list[int]:
        found = self._gather(torch.tensor(values, dtype=torch.int64))
        return [int(n) for n in torch.stack(found).amax(0)]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor; the others give one of its shape and dtype."""
        moved = tensor.to(self._device).contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with _all_there("take over from rank 0"):
            self._group.broadcast([moved], options).wait()
        return moved.to(tensor.device)

    def combine(self, parameters: Sequence[torch.nn.Parameter], measures: Any) -> None:
        self._add_gradients(parameters)
        named = [f for f in fields(measures) if isinstance(getattr(measures, f.name), int | float)]
        values = torch.stack(self._gather(self._numbers([float(getattr(measures, f.name)) for f in named])))
        for at, field in enumerate(named):
            column = values[:, at]
            value = column.max() if field.name in LARGEST else column.sum()
            setattr(measures, field.name, type(getattr(measures, field.name))(value.item()))

    def _add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        used = self.total(self._numbers([float(p.grad is not None) for p in parameters]))
        for number, parameter in zip(used.tolist(), parameters, strict=True):
            if number:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.total(parameter.grad)

    def agree(self, parameters: Iterable[Tensor]) -> None:
        sums = [_bits(p) for p in parameters]
        every = self._gather(torch.tensor(sums, dtype=torch.int64))
        for rank, other in enumerate(every):
            if not torch.equal(other, every[0]):
                raise TrainError(f"rank {rank} and rank 0 hold different weights: the ranks have diverged")

    def _numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, on the CPU."""
        return [*self.every(tensor.to(self._device)).cpu()]

    def every(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of equal shapes, as [world, ...]."""
        found = tensor.new_empty((self.world, *tensor.shape))
        with _all_there("gather from all ranks"):
            self._group._allgather_base(found.view(-1), tensor.contiguous().view(-1)).wait()
        return found

    def scatter_sums(self, parts: Tensor) -> Tensor:
        """Return the sum over ranks of `parts[own rank]` of [world, ...], which may be overwritten."""
        if parts.device.type == "cpu":
            # what gloo does for a scatter too, with a copy
            return self.total(parts)[self.rank].clone()
        found = torch.empty_like(parts[0])
        with _all_there("scatter sums to all ranks"):
            self._group._reduce_scatter_base(found.view(-1), parts.view(-1)).wait()
        return found


class Sharded(Together):
    """One of several ranks that hold a part of the model each (FSDP2)."""

    sharded = True

    def __init__(
        self,
        group: Any,
        device: torch.device | None = None,
        shards: int = 0,
        limit: timedelta | None = None,
    ) -> None:
        """As `Together`. shards: successive ranks that hold one copy, 0 = all. limit: of waits."""
        super().__init__(group, device)
        self._shards, self._limit = shards or self.world, limit

    def mesh(self) -> Any:
        """Return torch's DeviceMesh: [shards], with several copies [copies, shards].

        Only the second one needs groups of its own; they wait as long as the group of all.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if self._shards == self.world:
            return init_device_mesh(self._device.type, (self.world,))
        shape = (self.world // self._shards, self._shards)
        mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("copies", "shards"))
        if self._limit is not None:
            for group in mesh.get_all_groups():
                dist.distributed_c10d._set_pg_timeout(self._limit, group)
        return mesh

    def mine(self, batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """Return equally many batches on every rank.

        Padding is another rank's smallest batch, which does not count.
        """
        given = list(batches)
        joint = [batch for batch in given if batch.ranks > 1]
        every = [batch for batch in given if batch.ranks == 1]
        own = super().mine(every)
        most = max(Counter(batch.rank % self.world for batch in every).values(), default=0)
        if len(own) == most:
            return joint + own
        spare = min((batch for batch in every if not self.counts(batch)), key=lambda batch: batch.tokens)
        return joint + own + [spare] * (most - len(own))

    def in_step(self, work: Callable[[], T]) -> T:
        return self.attempt(work)

    def attempt(self, work: Callable[[], T]) -> T:
        def inside() -> T:
            # the layers communicate too
            with _all_there("compute with all ranks"):
                return work()

        return super().attempt(inside)

    def _add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """No-op: the backward passes have summed them."""

    def agree(self, parameters: Iterable[Tensor]) -> None:
        """Compare the shapes of all, and the bits of those that hold the same part of different copies."""
        held = list(parameters)
        shapes = [number for n, p in enumerate(held) for number in (n, p.dim(), *p.shape)]
        copies = self._shards < self.world
        bits = [_bits(getattr(p, "to_local", lambda p=p: p)()) for p in held] if copies else []
        every = self._gather(torch.tensor([*shapes, *bits], dtype=torch.int64))
        at = len(shapes)
        if any(not torch.equal(other[:at], every[0][:at]) for other in every):
            raise TrainError("the ranks hold parts of different models: the ranks have diverged")
        for rank, other in enumerate(every):
            first = rank % self._shards
            if not torch.equal(other, every[first]):
                raise TrainError(
                    f"rank {rank} and rank {first} hold different weights of the same part: the ranks have"
                    " diverged"
                )


@contextmanager
def _all_there(doing: str) -> Iterator[None]:
    """Turn torch's RuntimeErrors about a dead or silent rank into RankLostError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        line = str(error).partition("\n")[0]
        raise RankLostError(f"{doing}: out of memory on a rank ({line}): lower policy.memory_gib") from error
    except RuntimeError as error:
        line = str(error).strip().partition("\n")[0]
        raise RankLostError(f"{doing}: another rank died or did not answer ({line})") from error


def _bits(tensor: Tensor) -> int:
    """Return the sum of the words of a tensor, which almost surely differs when any bit does."""
    flat = tensor.detach().contiguous().view(-1)
    return int(flat.view(_WORD[flat.element_size()]).sum())


def tcp_store(host: str, deadline_s: float) -> tuple[Any, int]:
    """Return the TCPStore of rank 0, which listens at an address of this machine only, and its port."""
    with boundary(TrainError, f"train.ranks: listen at {host}"):
        sock = socket.create_server((host, 0))
    port = int(sock.getsockname()[1])
    with _all_there(f"listen at {host}"):
        limit = timedelta(seconds=deadline_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=sock.fileno()
        )
    sock.detach()
    return store, port


def connect_store(address: str, deadline_s: float) -> Any:
    """Return the TCPStore at tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with _all_there(f"reach {address}"):
        limit = timedelta(seconds=deadline_s)
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=limit, wait_for_workers=False
        )


def join(
    rank: int,
    world: int,
    store: Path | Any,
    *,
    deadline_s: float,
    device: torch.device | None = None,
    shards: int = 0,
    address: str = "",
) -> Together:
    """Meet the other ranks over a file that does not exist yet, or a store of torch's.

    device: of this rank's model. GPUs, one per rank, use NCCL (not yet run), CPUs gloo, at `address` if
    given. shards: ranks that hold one copy of a sharded model; 0 = each a whole one. GPUs and sharded ranks
    use torch's default process group, which `leave` destroys. Raises TrainError after the deadline.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world}")
    on_gpu = device is not None and device.type == "cuda"
    with _all_there(f"meet {world} ranks"):
        limit = timedelta(seconds=deadline_s)
        if isinstance(store, Path):
            store = dist.FileStore(str(store), world)  # type: ignore[attr-defined]
        if not (on_gpu or shards):

            def meet(first: int, size: int) -> Any:
                own = dist.PrefixStore(f"{first}+{size}", store)  # type: ignore[attr-defined]
                return _gloo(own, rank - first, size, limit, address)

            return Together(_gloo(store, rank, world, limit, address), meet=meet)
        backend = "nccl" if on_gpu else "gloo"
        if address:
            _listen_at(address, needed=not on_gpu)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        if not shards:
            return Together(dist.group.WORLD, device, partial(_part_of_all, limit))
        return Sharded(dist.group.WORLD, device, shards, limit)


def _part_of_all(limit: timedelta, first: int, size: int) -> Any:
    ranks = list(range(first, first + size))
    return dist.new_group(ranks, timeout=limit, use_local_synchronization=True)


def _gloo(store: Any, rank: int, world: int, limit: timedelta, address: str) -> Any:
    """Return gloo's process group; without `address` it listens where this machine's name leads."""
    if not address:
        return dist.ProcessGroupGloo(store, rank, world, limit)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, world, options)


def _listen_at(address: str, *, needed: bool) -> None:
    """Let torch's groups, which take no address, use the network interface that has this one.

    Variables that are set stay. needed: raise TrainError where no interface has it.
    """
    missing = [name for name in (_INTERFACE, "NCCL_SOCKET_IFNAME") if not os.environ.get(name)]
    if not missing:
        return
    found = [name for _, name in socket.if_nameindex() if address in _addresses(name)]
    found += ["lo"] if address.startswith("127.") else []
    if not found and needed:
        raise TrainError(f"train.ranks: no network interface here has {address} first: set {_INTERFACE}")
    os.environ.update({name: found[0] for name in missing if found})


def _addresses(interface: str) -> list[str]:
    """Return the first IPv4 address of an interface, or none."""
    asked = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
        return [socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, asked)[20:24])]
    return []


def leave() -> None:
    """Destroy torch's default process group if `join` made one."""
    if dist.is_initialized():
        dist.destroy_process_group()
