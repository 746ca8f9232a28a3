"""Delegating engine base class: forwards the control plane; subclasses implement `generate`."""

from __future__ import annotations

from insitu.engines.base import Engine, EngineInfo, Receipt


class EngineWrapper:
    """`engines.base.Engine` without `generate`."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    @property
    def receipt(self) -> Receipt:
        return self._inner.receipt

    async def pause(self) -> None:
        await self._inner.pause()

    async def resume(self) -> None:
        await self._inner.resume()

    async def close(self) -> None:
        await self._inner.close()
