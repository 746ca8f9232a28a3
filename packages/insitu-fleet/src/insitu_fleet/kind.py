"""The extension of kind `fleets`: nodes in child processes, or on the machines of a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from insitu.config import Config
from insitu.engines.base import EngineInfo, Receipt
from insitu.errors import EngineError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu_fleet.controller import Fleet, open_fleet, open_links
from insitu_fleet.node import SentTasks

log = logging.getLogger(__name__)


class _NoEngine:
    """The engine of a fleet that is only checked."""

    info = EngineInfo(name="none", max_context_tokens=0)
    receipt = Receipt(version=0, checksum="")

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        raise EngineError("a check samples nothing")

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


async def check_fleet(config: Config) -> Sequence[tuple[str, str, bool]]:
    """Start the nodes of [fleet] without a run and end them again; see `Fleet.check`. Raises SetupError."""
    async with open_links(config.fleet) as links:
        fleet = Fleet(config, links, _NoEngine(), SentTasks(), ("", ""), log.warning)
        try:
            return await fleet.check()
        finally:
            await fleet.close()


class NodeFleet:
    """What `find("fleets", fleet.kind)` gives."""

    open = staticmethod(open_fleet)
    check = staticmethod(check_fleet)
