"""Publishing without files: the trainer's tensors go to a vLLM server by CUDA IPC or NCCL.

The controller's side; the trainer's half is learner/transfer.py, the server's engines/vllm_transfer.py. Not
run on a GPU so far: tested against the shipped fake server and learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Protocol

from insitu.engines.base import Receipt
from insitu.engines.vllm import VllmEngine
from insitu.engines.vllm_transfer import TransferLayout, initialise, receive, world_size
from insitu.errors import EngineError, InsituError, TrainError
from insitu.training.weights.files import PublishOptions

Way = Literal["ipc", "nccl"]


class SupportsTransfer(Protocol):
    """As much of the learner as this needs: its side of each step, bounded."""

    async def transfer(self, do: str, **more: Any) -> dict[str, Any]: ...


class TransferPublisher:
    """See the module."""

    def __init__(
        self, learner: SupportsTransfer, engine: VllmEngine, options: PublishOptions, way: Way
    ) -> None:
        self._learner, self._engine, self._options, self._way = learner, engine, options, way
        self._ready = False
        self._version: int | None = None
        self.sent_bytes = 0
        """Of the last publication."""

    async def publish(self, version: int) -> Receipt:
        try:
            if not self._ready:
                await self._prepare()
                self._ready = True
            receipt = await self._transfer(version)
            self._version = version
            return receipt
        except InsituError:
            # A communicator that one side has left is of no use to either.
            self._ready = False
            raise

    async def _prepare(self) -> None:
        if self._way == "ipc":
            workers = await world_size(self._engine)
            if workers > 1:
                raise EngineError(
                    f"engine.publish ipc: the server computes on {workers} GPUs, and what the trainer shares"
                    " is on one; publish by disk, delta or nccl, or start the server on one GPU"
                )
            await initialise(self._engine, {"packed": False})
            return
        ranks = 1 + await world_size(self._engine)
        uid = (await self._learner.transfer("unique_id"))["unique_id"]
        info = {"nccl_unique_id_b64": uid, "rank_offset": 1, "world_size": ranks, "packed": False}
        join = partial(self._learner.transfer, "join", unique_id=uid, world_size=ranks)
        await initialise(self._engine, info, join)

    async def _transfer(self, version: int) -> Receipt:
        said = await self._learner.transfer("describe", version=version)
        sent = TransferLayout(names=said["names"], dtypes=said["dtypes"], shapes=said["shapes"])
        self.sent_bytes = sent.nbytes
        try:
            more: dict[str, object] = {}
            if self._way == "ipc":
                more["ipc_handles_pickled"] = (await self._learner.transfer("share"))["handles"]
            beside = partial(self._learner.transfer, "send") if self._way == "nccl" else None
            receipt = await receive(
                self._engine, version, sent, more, self._summed, mode=self._options.mode, beside=beside
            )
        finally:
            await self._learner.transfer("release")
        return receipt

    async def _summed(self, groups: Sequence[Sequence[str]]) -> Sequence[str]:
        said = await self._learner.transfer("sums", groups=[list(names) for names in groups])
        found: list[str] = said["sums"]
        return found

    async def restore(self) -> Receipt:
        """The version that was published last, for a server that was started again, while the trainer still
        holds it. Raises EngineError."""
        if self._version is None:
            raise EngineError("nothing was published yet that the engine could get back")
        self._ready = False
        try:
            return await self.publish(self._version)
        except TrainError as error:
            raise EngineError(f"the engine cannot get version {self._version} back: {error}") from error
