"""The trainer's side of publishing without files: handles for CUDA IPC, sends by NCCL.

Runs in the learner's process. Not yet run on a GPU. NCCL waits forever for a missing peer, so it works in a
thread that is abandoned at the deadline; the next publication creates a new communicator.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.cuda.nccl
from torch import Tensor

from insitu.errors import TrainError
from insitu_train.channel.rpc import Meta
from insitu_train.model.base import Policy
from insitu_train.model.hf import HfPolicy

NCCL: Any = torch.cuda.nccl
SENDER = 0
"""The trainer's rank; the server's workers follow."""


def published(policy: Policy) -> dict[str, Tensor]:
    """Return what an engine must hold, in its dtype, by checkpoint name."""
    named = policy.published() if isinstance(policy, HfPolicy) else policy.named_parameters()
    return {name: tensor.detach().contiguous() for name, tensor in named}


class Transfers:
    """Handles `train.transfer`: `describe`, `sums`, `share`, `release`, `unique_id`, `join`, `send`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._held: dict[str, Tensor] = {}
        """Tensors of the current publication; an engine may read them until `release`."""
        self._group: Any = None

    def answer(self, meta: Meta) -> Meta:
        """Handle one call. Raises TrainError."""
        return self._named[str(meta["do"])](meta)

    @property
    def _named(self) -> dict[str, Callable[[Meta], Meta]]:
        return {
            "describe": self._describe,
            "sums": self._sums,
            "share": self._share,
            "release": self._release,
            "unique_id": self._unique_id,
            "join": self._join,
            "send": self._send,
        }

    def _describe(self, meta: Meta) -> Meta:
        self._held = published(self._policy)
        return {
            "names": list(self._held),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in self._held.values()],
            "shapes": [list(t.shape) for t in self._held.values()],
        }

    def _sums(self, meta: Meta) -> Meta:
        groups: Sequence[Sequence[str]] = meta["groups"]
        return {"sums": [self._sum(names) for names in groups]}

    def _sum(self, names: Sequence[str]) -> str:
        total = hashlib.sha256()
        for name in names:
            total.update(self._held[name].cpu().reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()

    def _share(self, meta: Meta) -> Meta:
        """Return one handle per tensor, keyed by its GPU, as vLLM unpickles them."""
        from torch.multiprocessing.reductions import reduce_tensor

        self._need_cuda()
        handles = []
        for tensor in self._held.values():
            uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
            handles.append({uuid: reduce_tensor(tensor)[1]})  # type: ignore[no-untyped-call]
        return {"handles": base64.b64encode(pickle.dumps(handles)).decode()}

    def _release(self, meta: Meta) -> Meta:
        self._held = {}
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return {}

    def _unique_id(self, meta: Meta) -> Meta:
        self._need_cuda()
        return {"unique_id": base64.b64encode(NCCL.unique_id()).decode()}

    def _join(self, meta: Meta) -> Meta:
        """Create a communicator with the server's workers, and run their initial one-element reduction."""
        uid, ranks = base64.b64decode(meta["unique_id"]), int(meta["world_size"])

        def work() -> None:
            self._group = NCCL.init_rank(ranks, uid, SENDER)
            one = torch.zeros(1, device="cuda")
            NCCL.all_reduce([one], comms=[self._group])
            torch.cuda.synchronize()

        self._bounded(work, meta, "join the server's NCCL group")
        return {}

    def _send(self, meta: Meta) -> Meta:
        """Broadcast every tensor in the order of `describe`."""
        tensors = list(self._held.values())

        def work() -> None:
            for tensor in tensors:
                NCCL.broadcast([tensor], root=SENDER, comms=[self._group])
            torch.cuda.synchronize()

        self._bounded(work, meta, "send weights by NCCL")
        return {}

    def _bounded(self, work: Callable[[], None], meta: Meta, doing: str) -> None:
        """Raise TrainError after the deadline, or when the work fails."""
        limit_s = float(meta["deadline_s"])
        failed: list[RuntimeError] = []

        def run() -> None:
            try:
                work()
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive() or failed:
            self._group = None
            why = str(failed[0]) if failed else f"timeout after {limit_s:g} s"
            raise TrainError(f"{doing}: {why}")

    def _need_cuda(self) -> None:
        if not torch.cuda.is_available() or any(not t.is_cuda for t in self._held.values()):
            raise TrainError("engine.publish ipc and nccl need the trainer's weights on a GPU")
