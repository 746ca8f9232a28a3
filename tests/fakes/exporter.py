"""A learner as far as publishers know it: each version's weights are the ones before, a little moved."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from insitu.engines.safetensors_file import StoredTensor, digest, sums_of, write_manifest, write_tensors
from insitu_train.weights.delta import write_delta
from insitu_train.weights.files import ExportRequest, ExportResult
from tests.fakes.vllm import FakeVllm
from tests.fakes.weight_folders import chance_tensors


class FakeExporter:
    """`training.weights.files.Exporter`; `share` of the values change from version to version."""

    def __init__(self, *, share: float = 0.01, vocab: int = 512) -> None:
        self.share = share
        self.tensors = chance_tensors("start", vocab=vocab)
        self.wanted: list[ExportRequest] = []
        """Every export, in order."""
        self._version = 0

    async def export(self, wanted: ExportRequest) -> ExportResult:
        self.wanted.append(wanted)
        return await asyncio.to_thread(self._write, wanted)

    def _write(self, wanted: ExportRequest) -> ExportResult:
        while self._version < wanted.version:
            self._version += 1
            self.tensors = {n: self._moved(t) for n, t in self.tensors.items()}
        tensors = dict(self.tensors)
        if wanted.own_head:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        wanted.folder.mkdir(parents=True, exist_ok=True)
        size = write_tensors(wanted.folder / "model.safetensors", tensors)
        config = {"tie_word_embeddings": not wanted.own_head}
        (wanted.folder / "config.json").write_bytes(orjson.dumps(config))
        manifest = write_manifest(wanted.folder, wanted.version, sums_of(tensors))
        if wanted.delta is not None and wanted.base is not None:
            size = write_delta(wanted.delta, wanted.base, wanted.folder)
        return ExportResult(checksum=manifest.checksum, tensors=manifest.tensors, sent_bytes=size)

    def _moved(self, tensor: StoredTensor) -> StoredTensor:
        random = np.random.default_rng([self._version, len(tensor.data)])
        values = tensor.data.view(np.float32).copy()
        values[random.random(len(values)) < self.share] += np.float32(1e-3)
        return StoredTensor(dtype=tensor.dtype, shape=tensor.shape, data=values.view(np.uint8))


class FakeTransfers:
    """`training.weights.gpu.Transferring`: what a learner with its weights on a GPU answers."""

    def __init__(self, fake: FakeVllm) -> None:
        self.tensors: Mapping[str, StoredTensor] = chance_tensors("start")
        self.asked: list[str] = []
        self.sends = True
        """Without it the trainer's half of a send never comes."""
        self._fake = fake

    async def transfer(self, do: str, **more: Any) -> dict[str, Any]:
        self.asked.append(do)
        if do == "describe":
            dtypes, shapes = ["float32"] * len(self.tensors), [list(t.shape) for t in self.tensors.values()]
            return {"names": list(self.tensors), "dtypes": dtypes, "shapes": shapes}
        if do == "sums":
            return {"sums": [digest([self.tensors[n].data for n in names]) for names in more["groups"]]}
        if do == "share":
            self._fake.memory["handles"] = self.tensors
            return {"handles": "handles"}
        if do == "unique_id":
            return {"unique_id": "id"}
        if do in ("join", "send") and self.sends:
            await self._fake.broadcast.put(self.tensors)
        return {}
