"""Publishing without files: the trainer's tensors go to a vLLM server by CUDA IPC or NCCL.

The controller's side; the trainer's is learner/transfer.py, the server's engines/vllm_transfer.py. Not yet
run on a GPU: tested with a fake server and learner.
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

Transport = Literal["ipc", "nccl"]


class _SupportsTransfer(Protocol):
    """The part of the learner that is used: its side of each transfer, with a deadline."""

    async def transfer(self, do: str, **more: Any) -> dict[str, Any]: ...


class TransferPublisher:
    """Publishes by CUDA IPC or NCCL."""

    def __init__(
        self, learner: _SupportsTransfer, engine: VllmEngine, options: PublishOptions, transport: Transport
    ) -> None:
        self._learner, self._engine, self._options, self._transport = learner, engine, options, transport
        self._ready = False
        self._version: int | None = None
        self.sent_bytes = 0
        """Bytes of the last publication."""

    async def publish(self, version: int) -> Receipt:
        try:
            if not self._ready:
                await self._prepare()
                self._ready = True
            receipt = await self._transfer(version)
            self._version = version
            return receipt
        except InsituError:
            # a communicator that one side has left must be rebuilt
            self._ready = False
            raise

    async def _prepare(self) -> None:
        if self._transport == "ipc":
            workers = await world_size(self._engine)
            if workers > 1:
                raise EngineError(
                    f"engine.publish ipc: the server uses {workers} GPUs, the trainer shares tensors of one;"
                    " publish by disk, delta or nccl, or start the server on one GPU"
                )
            await initialise(self._engine, {"packed": False})
            return
        ranks = 1 + await world_size(self._engine)
        uid = (await self._learner.transfer("unique_id"))["unique_id"]
        info = {"nccl_unique_id_b64": uid, "rank_offset": 1, "world_size": ranks, "packed": False}
        join = partial(self._learner.transfer, "join", unique_id=uid, world_size=ranks)
        await initialise(self._engine, info, join)

    async def _transfer(self, version: int) -> Receipt:
        layout = await self._learner.transfer("describe", version=version)
        sent = TransferLayout(names=layout["names"], dtypes=layout["dtypes"], shapes=layout["shapes"])
        self.sent_bytes = sent.nbytes
        try:
            more: dict[str, object] = {}
            if self._transport == "ipc":
                more["ipc_handles_pickled"] = (await self._learner.transfer("share"))["handles"]
            beside = partial(self._learner.transfer, "send") if self._transport == "nccl" else None
            receipt = await receive(
                self._engine, version, sent, more, self._summed, mode=self._options.mode, beside=beside
            )
        finally:
            await self._learner.transfer("release")
        return receipt

    async def _summed(self, groups: Sequence[Sequence[str]]) -> Sequence[str]:
        reply = await self._learner.transfer("sums", groups=[list(names) for names in groups])
        sums: list[str] = reply["sums"]
        return sums

    async def restore(self) -> Receipt:
        """Publish the last version again to a restarted server, while the trainer still holds it.

        Raises EngineError.
        """
        if self._version is None:
            raise EngineError("nothing was published yet, so nothing can be restored")
        self._ready = False
        try:
            return await self.publish(self._version)
        except TrainError as error:
            raise EngineError(f"version {self._version} cannot be restored: {error}") from error
