"""Publishing without files: the trainer's tensors go to a vLLM server by CUDA IPC or NCCL.

The controller's side; the trainer's is learner/transfer.py, the server's engines/vllm_transfer.py. Not yet
run on a GPU: tested with a fake server and learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal, Protocol

from insitu.engines.base import LoadingEngine, Receipt
from insitu.engines.replicas import EngineSet
from insitu.engines.vllm import FRESH, VllmEngine
from insitu.errors import EngineError, InsituError
from insitu_train.weights.files import PublishOptions
from insitu_train.weights.vllm_transfer import TransferLayout, initialise, receive, world_size

Transport = Literal["ipc", "nccl"]


class _SupportsTransfer(Protocol):
    """The part of the learner that is used: its side of each transfer, with a deadline."""

    async def transfer(self, do: str, **more: Any) -> dict[str, Any]: ...


class TransferPublisher:
    """Publishes by CUDA IPC or NCCL."""

    def __init__(
        self, learner: _SupportsTransfer, engines: EngineSet, options: PublishOptions, transport: Transport
    ) -> None:
        self._learner, self._engines, self._options, self._transport = learner, engines, options, transport
        self._ready = False
        self.sent_bytes = 0
        """Bytes of the last publication."""

    async def publish(self, version: int) -> Receipt:
        return await self._engines.update(lambda engine: self._feed(engine, version))

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._engines.training()

    async def _feed(self, engine: LoadingEngine, version: int) -> Receipt:
        """Send the trainer's present weights, also to a server that was restarted."""
        if not isinstance(engine, VllmEngine):
            raise EngineError(f"engine.publish {self._transport}: {engine.info.name} is not vllm")
        try:
            if not self._ready or await engine.weights.label() == FRESH:
                await self._prepare(engine)
                self._ready = True
            return await self._transfer(engine, version)
        except InsituError:
            # a communicator that one side has left must be rebuilt
            self._ready = False
            raise

    async def _prepare(self, engine: VllmEngine) -> None:
        if self._transport == "ipc":
            workers = await world_size(engine)
            if workers > 1:
                raise EngineError(
                    f"engine.publish ipc: the server uses {workers} GPUs, the trainer shares tensors of one;"
                    " publish by disk, delta or nccl, or start the server on one GPU"
                )
            await initialise(engine, {"packed": False})
            return
        ranks = 1 + await world_size(engine)
        uid = (await self._learner.transfer("unique_id"))["unique_id"]
        info = {"nccl_unique_id_b64": uid, "rank_offset": 1, "world_size": ranks, "packed": False}
        join = partial(self._learner.transfer, "join", unique_id=uid, world_size=ranks)
        await initialise(engine, info, join)

    async def _transfer(self, engine: VllmEngine, version: int) -> Receipt:
        layout = await self._learner.transfer("describe", version=version)
        sent = TransferLayout(names=layout["names"], dtypes=layout["dtypes"], shapes=layout["shapes"])
        self.sent_bytes = sent.nbytes
        try:
            more: dict[str, object] = {}
            if self._transport == "ipc":
                more["ipc_handles_pickled"] = (await self._learner.transfer("share"))["handles"]
            beside = partial(self._learner.transfer, "send") if self._transport == "nccl" else None
            receipt = await receive(
                engine, version, sent, more, self._summed, mode=self._options.mode, beside=beside
            )
        finally:
            await self._learner.transfer("release")
        return receipt

    async def _summed(self, groups: Sequence[Sequence[str]]) -> Sequence[str]:
        reply = await self._learner.transfer("sums", groups=[list(names) for names in groups])
        sums: list[str] = reply["sums"]
        return sums
