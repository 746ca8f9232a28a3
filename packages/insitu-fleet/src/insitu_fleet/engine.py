"""The run's engine on a node: every call goes to the controller, which owns engine and weights.

    node: gateway -> RemoteEngine --engine.generate--> controller: EngineCalls -> engine
                         ^----------- engine.down ------------'

So a node needs no address of the engine, and versions, restarts and publications are handled in one place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict

from insitu.engines.base import Engine, EngineInfo, Receipt
from insitu.engines.downtime import Waiter, current_waiter, on_downtime
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu.types.codec import VALUES, pick
from insitu_train.channel.calls import read_generation, read_request
from insitu_train.channel.rpc import NOTHING, Frame, Handler, Meta, RpcPeer


class EngineCalls:
    """The controller's side."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def info(self) -> Meta:
        """Return what `RemoteEngine` is made of."""
        info, receipt = self._engine.info, self._engine.receipt
        return {**asdict(info), "version": receipt.version, "checksum": receipt.checksum}

    def handlers(self, node: RpcPeer) -> Mapping[str, Handler]:
        """Return the commands for one node, which are answered with the engine."""

        async def generate(frame: Frame) -> Frame:
            ids, params, key = read_request(frame.arrays)
            with on_downtime(_Downtime(node, int(frame.meta["call"]))):
                made = await self._engine.generate(ids, params, key)
            return Frame(meta={"held": self._engine.receipt.version}, arrays=VALUES.pack(made))

        return {"engine.generate": generate}


class _Downtime:
    """Reports to the node that a call waits for the engine; implements `engines.downtime.Waiter`."""

    def __init__(self, node: RpcPeer, call: int) -> None:
        self._node, self._call = node, call

    def on_wait(self) -> None:
        self._node.notify("engine.down", {"call": self._call, "down": True})

    def on_resume(self, *, cut: bool) -> None:
        self._node.notify("engine.down", {"call": self._call, "down": False})


class RemoteEngine:
    """The node's side; implements `engines.base.Engine`."""

    def __init__(self, controller: RpcPeer, info: Meta, deadline_s: float) -> None:
        """Take `EngineCalls.info`; `deadline_s` is a bound of one call, which the gateway's own precedes."""
        self._controller, self._deadline_s = controller, deadline_s
        self._receipt = Receipt(version=int(info["version"]), checksum=str(info["checksum"]))
        self.info = pick(EngineInfo, info)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Waiter, bool]] = {}
        """Running calls: who waits, and whether the engine is down for it."""
        controller.handlers["engine.down"] = self._on_down

    @property
    def receipt(self) -> Receipt:
        """The newest that came with a reply."""
        return self._receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Sample at the controller's engine. Raises EngineError."""
        number, waiter = next(self._numbers), current_waiter()
        if waiter is not None:
            self._waiting[number] = (waiter, False)
        try:
            frame = await self._controller.call(
                "engine.generate",
                {"call": number},
                VALUES.pack((ids, params, key)),
                deadline_s=self._deadline_s,
            )
        finally:
            waited = self._waiting.pop(number, None)
            if waited is not None and waited[1]:
                waited[0].on_resume(cut=True)
        held = int(frame.meta["held"])
        if held > self._receipt.version:
            self._receipt = Receipt(version=held, checksum="")
        return read_generation(frame.arrays)

    async def _on_down(self, frame: Frame) -> Frame:
        number, down = int(frame.meta["call"]), bool(frame.meta["down"])
        if number in self._waiting:
            waiter, was_down = self._waiting[number]
            self._waiting[number] = (waiter, down)
            if down and not was_down:
                waiter.on_wait()
            elif was_down and not down:
                waiter.on_resume(cut=False)
        return NOTHING

    async def pause(self) -> None:
        """Do nothing: the controller's engine is paused there."""

    async def resume(self) -> None:
        """Do nothing: the controller's engine is resumed there."""

    async def close(self) -> None:
        """Do nothing: the controller closes its engine."""
