"""What sharded ranks read together: each tensor is gathered by all and kept by one, its owner.

So no rank ever holds a whole copy of the model. Tensors of a layer have one owner, because a tensor of a file
may be made of several parameters (experts, adapters and the matrix that they change).
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from insitu.engines.safetensors_file import digest
from insitu_train.model.hf import HfPolicy
from insitu_train.model.shard import full, gathered
from insitu_train.trainer.distributed import Ranks
from insitu_train.trainer.optimizer import Optimiser

_LAYER = re.compile(r".*?\.\d+(?=\.)")
_SUM_BYTES = hashlib.sha256().digest_size


def owners_of(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the owner of each tensor, a rank below `count`. sizes: bytes of each by its parameter's name.

    The same on every rank: layers go, the largest first, to the rank that holds least.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    for name in sizes:
        found = _LAYER.match(name)
        layers[found[0] if found else name].append(name)
    loads, owners = [0] * count, dict[str, int]()
    for _, names in sorted(layers.items(), key=lambda one: (-sum(sizes[n] for n in one[1]), one[0])):
        owner = loads.index(min(loads))
        loads[owner] += sum(sizes[name] for name in names)
        owners |= dict.fromkeys(names, owner)
    return owners


@contextmanager
def held_whole(
    ranks: Ranks, policy: HfPolicy, optimiser: Optimiser, *, moments: bool, owners: int, frozen: bool
) -> Iterator[None]:
    """See `Trainer.whole`."""
    held: dict[str, Tensor] = {n: p for n, p in policy.named_parameters() if frozen or p.requires_grad}
    if frozen:
        stored = policy.model.state_dict(keep_vars=True)
        held |= {name: one for name, one in stored.items() if not isinstance(one, nn.Parameter)}
    owner = owners_of({name: tensor.nbytes for name, tensor in held.items()}, owners)
    mine = {name for name, rank in owner.items() if rank == ranks.rank}
    state = optimiser.tensors() if moments else {}
    parts = {name for name in state if name.rpartition("/")[0] in mine}
    try:
        policy.whole = ranks.attempt(lambda: gathered(held, mine=mine))
        optimiser.whole = ranks.attempt(lambda: gathered(state, mine=parts)) if moments else None
        yield
    finally:
        policy.whole = optimiser.whole = None


def digests_of_all(ranks: Ranks, named: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the float32 bytes of sharded parameters, in name order. All ranks call it.

    Ranks take turns: each keeps two gathered tensors at most.
    """
    ordered = sorted(names)
    sums = torch.zeros(len(ordered), _SUM_BYTES, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        pending: tuple[int, Future[str]] | None = None

        def note() -> None:
            if pending is not None:
                place, made = pending
                sums[place] = torch.frombuffer(bytearray.fromhex(made.result()), dtype=torch.uint8)

        for at, name in enumerate(ordered):
            found = full(named[name])
            if at % ranks.world == ranks.rank:
                note()
                pending = at, pool.submit(_digest, found)
        note()
    ranks.total(sums)
    return {name: bytes(line).hex() for name, line in zip(ordered, sums.tolist(), strict=True)}


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().to(torch.float32).cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest([data.numpy()])
