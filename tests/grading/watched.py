"""A real backend that a test can count and break."""

from __future__ import annotations

from insitu.errors import SandboxStartError
from insitu.sandbox.base import Capability, Sandbox, SandboxSpec
from insitu.sandbox.local import LocalBackend


class Watched:
    """The real backend, with every sandbox counted and, for a while, failing as a host fails."""

    def __init__(
        self, inner: LocalBackend, *, unstartable: int = 0, dying: int = 0, well: float = float("inf")
    ) -> None:
        """The first sandboxes fail to start or die, and so do all after `well`."""
        self.inner, self.unstartable, self.dying, self.well = inner, unstartable, dying, well
        self.made = 0

    name = "watched"

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.inner.capabilities

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.made += 1
        assert spec.network == "none"
        if self.made <= self.unstartable:
            raise SandboxStartError("no memory left")
        sandbox = await self.inner.create(spec)
        if self.made <= self.dying or self.made > self.well:
            await sandbox.close()
        return sandbox
