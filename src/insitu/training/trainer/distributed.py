"""Several processes that train one model: every rank computes its micro-batches, gradients are summed.

All ranks run the same `Trainer.step` on the same plan with the same weights and optimiser. The weights of
rows are fixed by the planner for the whole step, so a sum over ranks is all there is: no mean, no world size.
What goes wrong on one rank is raised on all of them, and after an update they compare their weights. Replicas
(`Together`) each hold everything; of `Sharded` ranks each holds a part (model/shard.py) and they speak in
every layer, so all of them run equally many passes. `Alone` is the one process that there is otherwise.
Processes are started by learner/ranks.py; the trainer calls the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from insitu.errors import ConfigError, TrainError
from insitu.training.plan.packing import MicroBatch

T = TypeVar("T")
_ERROR_BYTES = 1024


class RankLostError(TrainError):
    """A rank is gone or did not answer in time: the others can do nothing without it."""


_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LARGEST = frozenset({"gap", "seen"})
"""Measures of which the largest counts; all others are sums."""


class Ranks(Protocol):
    """What the trainer asks of those that train with it. A call is made by all ranks or by none."""

    rank: int
    world: int
    sharded: bool
    """Each holds a part of every weight; passes and reading weights are conversations of all."""

    def mine(self, batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """Those that this rank computes, in order; each counts on one rank."""
        ...

    def counts(self, batch: MicroBatch) -> bool:
        """Whether one of `mine` is this rank's; another is computed for company, with no weight."""
        ...

    def in_step(self, work: Callable[[], T]) -> T:
        """`work()` between two passes. An error that would leave others waiting is raised on all."""
        ...

    def attempt(self, work: Callable[[], T]) -> T:
        """`work()`, or the TrainError of the first rank on which it failed, raised on all."""
        ...

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        ...

    def combine(self, parameters: Sequence[torch.nn.Parameter], measures: Any) -> None:
        """Sum gradients and the fields of a dataclass of numbers over ranks, in place."""
        ...

    def agree(self, parameters: Iterable[Tensor]) -> None:
        """Raises TrainError on all ranks unless they hold the same bits."""
        ...


class Alone:
    """The only process: nothing is to be shared."""

    rank, world, sharded = 0, 1, False

    def mine(self, batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        return list(batches)

    def counts(self, batch: MicroBatch) -> bool:
        return True

    def in_step(self, work: Callable[[], T]) -> T:
        return work()

    def attempt(self, work: Callable[[], T]) -> T:
        return work()

    def total(self, tensor: Tensor) -> Tensor:
        return tensor

    def combine(self, parameters: Sequence[torch.nn.Parameter], measures: Any) -> None:
        """Nothing to add."""

    def agree(self, parameters: Iterable[Tensor]) -> None:
        """With itself it does."""


class Together:
    """One of several replicas, over a process group of torch: gloo for CPUs, NCCL for GPUs (see `join`)."""

    sharded = False

    def __init__(self, group: Any, device: torch.device | None = None) -> None:
        """group: a ProcessGroup or one of its backends, with tensors on `device`."""
        self._group = group
        self._device = device or torch.device("cpu")
        self.rank, self.world = int(group.rank()), int(group.size())

    def mine(self, batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        return [batch for batch in batches if self.counts(batch)]

    def counts(self, batch: MicroBatch) -> bool:
        return batch.rank % self.world == self.rank

    def in_step(self, work: Callable[[], T]) -> T:
        return work()

    def attempt(self, work: Callable[[], T]) -> T:
        error = ""
        result: list[T] = []
        try:
            result.append(work())
        except TrainError as raised:
            error = str(raised) or "failed"
        words = error.encode(errors="replace")[:_ERROR_BYTES]
        told = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
        told[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8) if words else 0
        for line in self._gather(told):
            if int(line[0]):
                raise TrainError(bytes(line.tolist()).rstrip(b"\0").decode(errors="replace"))
        return result[0]

    def total(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self._device)
        with _all_there("add up over ranks"):
            self._group.allreduce([moved]).wait()
        return tensor if moved is tensor else tensor.copy_(moved)

    def combine(self, parameters: Sequence[torch.nn.Parameter], measures: Any) -> None:
        self._add_gradients(parameters)
        named = fields(measures)
        told = torch.stack(self._gather(self._numbers([float(getattr(measures, f.name)) for f in named])))
        for at, field in enumerate(named):
            column = told[:, at]
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
        told = self._gather(torch.tensor(sums, dtype=torch.int64))
        for rank, other in enumerate(told):
            if not torch.equal(other, told[0]):
                raise TrainError(f"the weights of rank {rank} are not those of rank 0: the ranks have parted")

    def _numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, on the CPU."""
        own = tensor.to(self._device)
        found = [torch.empty_like(own) for _ in range(self.world)]
        with _all_there("hear from all ranks"):
            self._group.allgather([found], [own]).wait()
        return [other.cpu() for other in found]


class Sharded(Together):
    """One of several ranks that hold a part of the model each (FSDP2)."""

    sharded = True

    def mesh(self) -> Any:
        """torch's DeviceMesh of all ranks, for model/shard.py."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self._device.type, (self.world,))

    def mine(self, batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """As many as on every rank: short ones get a small one of another rank, which does not count."""
        every = list(batches)
        own = super().mine(every)
        most = max(Counter(batch.rank % self.world for batch in every).values(), default=0)
        if len(own) == most:
            return own
        spare = min((batch for batch in every if not self.counts(batch)), key=lambda batch: batch.tokens)
        return own + [spare] * (most - len(own))

    def in_step(self, work: Callable[[], T]) -> T:
        return self.attempt(work)

    def attempt(self, work: Callable[[], T]) -> T:
        def inside() -> T:
            # the layers speak with the other ranks themselves
            with _all_there("compute with all ranks"):
                return work()

        return super().attempt(inside)

    def _add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The backward passes have."""

    def agree(self, parameters: Iterable[Tensor]) -> None:
        """No two ranks hold the same part, so only the weights' shapes can be compared."""
        shapes = [[n, p.dim(), *p.shape] for n, p in enumerate(parameters)]
        told = self._gather(torch.tensor([number for shape in shapes for number in shape]))
        if any(not torch.equal(other, told[0]) for other in told):
            raise TrainError("the ranks hold parts of different models: the ranks have parted")


@contextmanager
def _all_there(doing: str) -> Iterator[None]:
    """torch says by RuntimeError that a rank is gone or did not answer in time."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        line = str(error).partition("\n")[0]
        raise RankLostError(f"{doing}: out of memory on a rank ({line}): lower policy.memory_gib") from error
    except RuntimeError as error:
        line = str(error).strip().partition("\n")[0]
        raise RankLostError(f"{doing}: another rank is gone or did not answer ({line})") from error


def _bits(tensor: Tensor) -> int:
    """A number that differs when any bit of a tensor does, almost surely: the sum of its words."""
    flat = tensor.detach().contiguous().view(-1)
    return int(flat.view(_WORD[flat.element_size()]).sum())


def join(
    rank: int,
    world: int,
    store: Path,
    *,
    deadline_s: float,
    device: torch.device | None = None,
    sharded: bool = False,
) -> Together:
    """Meet the other ranks over a file that does not exist yet. Raises TrainError when they do not come.

    device: where this rank's model is. On GPUs, one for each rank, they speak by NCCL (not yet run), else by
    gloo. GPUs and sharded ranks take torch's one default group of the process; `leave` gives it back.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world}")
    on_gpu = device is not None and device.type == "cuda"
    with _all_there(f"meet {world} ranks"):
        limit = timedelta(seconds=deadline_s)
        file = dist.FileStore(str(store), world)  # type: ignore[attr-defined]
        if not (on_gpu or sharded):
            return Together(dist.ProcessGroupGloo(file, rank, world, limit))
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=file, rank=rank, world_size=world, timeout=limit)
        return (Sharded if sharded else Together)(dist.group.WORLD, device)


def leave() -> None:
    """Give back torch's default group, where `join` made one."""
    if dist.is_initialized():
        dist.destroy_process_group()
