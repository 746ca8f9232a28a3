"""Publishing weights: bringing a policy version into an engine, with verification.

The controller's side. A version is published only after its step is durable: otherwise tokens could be
sampled by weights that a crash discards.

    learner -----------> OwnPublisher                                 (its own engine: nothing travels)
    learner --files--> DiskPublisher  --pause, load, compare, resume--> server
    learner --delta--> DeltaPublisher --apply--> files --as above-----> server
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from insitu.config import Config
from insitu.engines.base import PauseMode, Receipt
from insitu.engines.replicas import EngineSet
from insitu.errors import EngineError, EngineUnavailable
from insitu.storage.files import replaced_folder
from insitu_train.weights.delta import apply_delta

log = logging.getLogger(__name__)

KEPT = 2
"""Published folders of whole weights that are kept: the current one, and the base of a delta."""
TRIES = 2
"""Attempts to load a version into an engine that refuses it."""


class SupportsPublish(Protocol):
    """Brings the trainer's current weights into the engine."""

    async def publish(self, version: int) -> Receipt:
        """Return when the engine samples with them; the receipt is for the trainer's `version`.

        Raises EngineError or TrainError when the engine does not hold them; sampling must then wait for a
        later publication.
        """


class Publisher(SupportsPublish, Protocol):
    """The publisher of a run."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Return the context of a training step: an engine that shares the GPU sleeps meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Weights to be written as files."""

    folder: Path
    version: int
    dtype: str = "auto"
    """float32, bfloat16, or auto = the type in the start model's config.json."""
    own_head: bool = False
    """Write an output head also where it is tied to the embeddings."""
    adapter: bool = False
    """Write only the adapters, as PEFT does; otherwise whole weights, adapters added to their matrices."""
    base: Path | None = None
    delta: Path | None = None
    """With both: also write the difference to the folder `base` into the file `delta`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """Weights that were written as files."""

    checksum: str
    tensors: Mapping[str, str]
    """Checksum of each tensor."""
    sent_bytes: int
    """Size of the delta where there is one, else of the whole."""


class Exporter(Protocol):
    """The part of the learner that a publisher of files uses."""

    async def export(self, wanted: ExportRequest) -> ExportResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """How files reach a server."""

    folder: Path
    """Folder of published versions; the server must see it under the same path."""
    dtype: str = "auto"
    """float32, bfloat16, or auto = the type in the start model's config.json."""
    mode: PauseMode = "keep"
    """What happens to running calls."""
    adapter: bool = False
    """Publish adapters unmerged; otherwise whole weights with adapters merged."""
    kept: int = KEPT
    """Published folders that are kept."""

    @classmethod
    def of(cls, config: Config, spool: Path) -> PublishOptions:
        """Return the options of a run. spool: default parent of published versions."""
        table = config.engine
        adapter = config.publishes_adapters
        # a server may reload an evicted adapter for a call that started with it
        kept = config.collect.max_staleness + 1 + KEPT if adapter else KEPT
        return cls(
            folder=Path(table.publish_dir or spool / "served"),
            dtype=table.publish_dtype,
            mode=table.pause_mode,
            adapter=adapter,
            kept=kept,
        )


class OwnPublisher:
    """Lets the learner's own engine sample with the trainer's weights."""

    def __init__(self, learner: SupportsPublish, engines: EngineSet) -> None:
        self._learner, self._engines = learner, engines

    async def publish(self, version: int) -> Receipt:
        return await self._engines.update(lambda _: self._learner.publish(version))

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._engines.training()


class DiskPublisher:
    """Publishes each version as a folder of whole weights."""

    def __init__(self, learner: Exporter, engines: EngineSet, options: PublishOptions) -> None:
        self._learner, self._engines, self._options = learner, engines, options
        self._own_head: bool | None = None
        self.sent_bytes = 0
        """Bytes sent for the last publication."""

    async def publish(self, version: int) -> Receipt:
        if self._own_head is None and not self._options.adapter:
            self._own_head = await self._engines.has_own_head()
        folder = self._options.folder / f"v{version:06d}"
        sent = await self._bring(folder, version)
        self.sent_bytes = sent.sent_bytes
        receipt = await self._load(folder, version)
        _check_receipt(receipt, version, sent.tensors)
        await asyncio.to_thread(_prune, self._options.folder, folder, self._options.kept)
        return receipt

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._engines.training()

    async def _bring(self, folder: Path, version: int) -> ExportResult:
        return await self._learner.export(self._wanted(folder, version))

    def _wanted(self, folder: Path, version: int) -> ExportRequest:
        return ExportRequest(
            folder=folder,
            version=version,
            dtype=self._options.dtype,
            own_head=bool(self._own_head),
            adapter=self._options.adapter,
        )

    async def _load(self, folder: Path, version: int) -> Receipt:
        """Load, with a retry: loading the same files twice is harmless."""
        for _ in range(TRIES - 1):
            try:
                return await self._engines.load(folder, version, mode=self._options.mode)
            except EngineUnavailable:
                raise
            except EngineError as error:
                log.warning("engine refused weights version=%d error=%s", version, error)
        return await self._engines.load(folder, version, mode=self._options.mode)


# The first version, and any whose base is missing, is sent whole.
class DeltaPublisher(DiskPublisher):
    """Publishes the difference to the previous version; it is applied where the server reads."""

    def __init__(self, learner: Exporter, engines: EngineSet, options: PublishOptions, spool: Path) -> None:
        """Keep the learner's own whole versions in `spool`, to compute differences from."""
        super().__init__(learner, engines, options)
        self._spool = spool
        self._base: tuple[Path, Path] | None = None
        """The last version: in the spool, and where the server reads."""

    async def _bring(self, folder: Path, version: int) -> ExportResult:
        wanted = self._wanted(self._spool / folder.name, version)
        base = self._base
        if base is not None and folder not in base and all(any(kept.glob("*.safetensors")) for kept in base):
            file = self._options.folder / f"{folder.name}.delta"
            sent = await self._learner.export(replace(wanted, base=base[0], delta=file))
            await asyncio.to_thread(apply_delta, file, base[1], folder)
            await asyncio.to_thread(file.unlink)
        else:
            sent = await self._learner.export(wanted)
            await asyncio.to_thread(_copy_whole, wanted.folder, folder)
        self._base = wanted.folder, folder
        await asyncio.to_thread(_prune, self._spool, wanted.folder)
        return sent


def _check_receipt(receipt: Receipt, version: int, tensors: Mapping[str, str]) -> None:
    """Raise EngineError unless the receipt is for the published weights."""
    if receipt.version != version:
        raise EngineError(f"the engine's receipt is for version {receipt.version}, published was {version}")
    for name in sorted(tensors.keys() | receipt.tensors.keys()):
        sent, held = tensors.get(name, "none"), receipt.tensors.get(name, "none")
        if sent != held:
            raise EngineError(
                f"the engine's receipt for version {version} has checksum {held[:12]} for {name}, published"
                f" was {sent[:12]}"
            )


def _copy_whole(source: Path, folder: Path) -> None:
    with replaced_folder(folder) as fresh:
        shutil.copytree(source, fresh, dirs_exist_ok=True)


def _prune(parent: Path, current: Path, kept: int = KEPT) -> None:
    """Remove published folders except `current` and the newest before it, `kept` in all."""
    others = sorted(
        (p for p in parent.glob("v*") if p.is_dir() and p != current), key=lambda p: p.stat().st_mtime
    )
    for old in others[: -(kept - 1)]:
        shutil.rmtree(old, ignore_errors=True)
