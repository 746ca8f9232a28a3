"""The control plane of a vLLM server: pause, new weights with their proof, sleep, versions, adapters.

A load is pause -> reload -> forget cached prefixes -> compare every parameter -> set and read back the
version -> resume, each wait with a deadline. From the pause to the last step nothing is sampled; when a step
fails the engine stays so until a later load succeeds. Needs VLLM_SERVER_DEV_MODE=1 at the server.
The sampling side is vllm.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from insitu.engines.base import PauseMode, Receipt
from insitu.engines.http import EngineHttp, NotOffered, RequestGate
from insitu.engines.kept_context import KeptContext
from insitu.engines.response_checks import version_number
from insitu.engines.safetensors_file import total
from insitu.engines.served_model import no_adapters
from insitu.engines.vllm_weights import FRESH, ServedWeights, TensorSums
from insitu.engines.weight_mapping import (
    ParamChecksums,
    PublishedFolder,
    WeightMapping,
    check_received,
    inspect,
    map_weights,
    plain,
)
from insitu.errors import EngineError, boundary
from insitu.types import VersionRuns


def ties_embeddings(folder: Path) -> bool:
    """Return whether the output head is the embedding matrix; False for a folder without a config."""
    path = folder / "config.json"
    with boundary(EngineError, f"read {path}"):
        config = orjson.loads(path.read_bytes()) if path.exists() else {}
    return bool(isinstance(config, dict) and config.get("tie_word_embeddings"))


log = logging.getLogger(__name__)

Route = Literal["generate", "completions"]
ADAPTER = "adapter_config.json"
_ADAPTERS = 2
"""Kept at the server: the one in use and the one that running calls started with."""


_NO_CONTROL = "vllm cannot {}: start it with VLLM_SERVER_DEV_MODE=1 for its control routes"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """Properties of the server, read at attachment."""

    model: str
    max_context_tokens: int
    route: Route
    weights: ServedWeights | None
    """Access to its weight labels; None = it has no control routes."""

    @property
    def controlled(self) -> bool:
        return self.weights is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Expected weights of a server after an update."""

    sums: Mapping[str, str]
    """Checksums of the published tensors."""
    fed: WeightMapping
    expected: Mapping[str, str]
    """Sum of each parameter that holds exactly the published bytes."""
    unchanged: Callable[[], None] | None = None
    """Raises if the published files have changed since `sums` was computed."""

    def changed_since(self, earlier: Mapping[str, str]) -> list[str]:
        return [name for name, held in self.sums.items() if earlier.get(name) != held]


class VllmControl:
    """See the module."""

    def __init__(self, http: EngineHttp, server: VllmServer, receipt: Receipt) -> None:
        self._http, self.server, self._receipt = http, server, receipt
        self._labels = {} if server.controlled else {FRESH: receipt.version}
        self._below = receipt.version
        """Version of the base weights, while adapters are published."""
        self._vouched = {receipt.version}
        """Versions that there was a receipt for."""
        self._sums: Mapping[str, str] | None = None
        """Checksums of the last loaded tensors."""
        self._exact: frozenset[str] = frozenset()
        """Parameters that held exactly the published bytes after an earlier load."""
        self._adapters: list[str] = []
        """Names of those at the server, oldest first."""
        self._gate = RequestGate()
        self._context = KeptContext(http.options.context_versions)

    @property
    def http(self) -> EngineHttp:
        return self._http

    @property
    def receipt(self) -> Receipt:
        return self._receipt

    @property
    def weights(self) -> ServedWeights:
        """Access to the server's weight labels and checksums; raises EngineError if not available."""
        if self.server.weights is None:
            raise EngineError(_NO_CONTROL.format("say which weights it holds"))
        return self.server.weights

    async def version(self) -> int:
        """Query the version of the server's weights.

        Raises EngineError for an unknown label, or when the adapter in use is gone.
        """
        name, adapter = self.asked
        if adapter is not None:
            if name not in await self._models():
                raise EngineError(f"vllm has lost adapter {name}")
            return adapter
        if not self.server.controlled:
            await self._models()
            return self._receipt.version
        return version_number(await self.weights.label(), self._labels, "vllm")

    async def recognise(self) -> Receipt:
        label = await self.weights.label()
        if label != FRESH:
            raise EngineError(f"vllm holds weights of version {label} that insitu did not find there")
        if (await self.weights.sums()).digest() != self._receipt.checksum:
            raise EngineError("vllm was started again with other weights")
        await self.weights.set_label(self._receipt.version)
        return self._receipt

    async def has_own_head(self) -> bool:
        """Return whether the output head is a separate parameter at the server."""
        return any(n.endswith("lm_head.weight") for n in (await self.weights.sums()).by_name)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop starting new work. `wait` lets what runs finish, `abort` ends it, `keep` freezes it."""
        self._need_control("pause")
        limit = self._http.options.call_deadline_s
        # vLLM 0.32 clears its caches at every pause, also with mode keep, unless clear_cache is false
        query = {"mode": mode, "clear_cache": "false" if self._context.most else "true"}
        await self._http.post("/pause", query=query, deadline_s=limit)
        if (await self._http.get("/is_paused")).get("is_paused") is not True:
            raise EngineError("vllm did not pause")

    async def resume(self) -> None:
        self._need_control("resume")
        await self._http.post("/resume")

    async def flush(self, *, running: bool = False) -> None:
        """Clear the prefix cache; with `running` the running requests are recomputed too."""
        self._need_control("reset_prefix_cache")
        query = {"reset_running_requests": "true" if running else "false"}
        if (await self._http.post("/reset_prefix_cache", query=query)).get("success") is not True:
            raise EngineError("vllm did not reset its prefix cache")

    async def load(self, folder: Path, version: int, *, mode: PauseMode = "wait") -> Receipt:
        """Sample with the weights in `folder` from now on; the path must mean the same at the server.

        A folder that does not match its own manifest, tensors that do not feed exactly the engine's
        parameters, and weights that a CPU server would mix are refused before anything is paused.
        Raises EngineError.
        """
        folder = await asyncio.to_thread(folder.resolve)
        held = await asyncio.to_thread(inspect, folder, version)
        if await asyncio.to_thread((folder / ADAPTER).exists):
            return await self._load_adapter(held, version)
        self._need_control("reload_weights")
        before = await self.weights.sums()
        fed = self._mapped(before, held)
        if not before.complete:
            _check_packed(fed, ties=await asyncio.to_thread(ties_embeddings, folder))
        proof = Proof(
            sums=held.sums,
            fed=fed,
            expected=await asyncio.to_thread(held.expected, fed),
            unchanged=held.check_unchanged,
        )
        async with self.updating(version, mode):
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._http.post("/collective_rpc", body, deadline_s=self._http.options.call_deadline_s)
            return await self.settle(proof, version, before, mode)

    def _mapped(self, before: TensorSums, held: PublishedFolder) -> WeightMapping:
        """Map the published tensors to the server's parameters; raise EngineError for another model's."""
        try:
            return map_weights(before.by_name, {name: one.shape for name, one in held.tensors.items()})
        except EngineError as error:
            raise EngineError(
                f"{self._http.name} serves another model than this run trains ({error}): start it on"
                " model.path"
            ) from error

    async def _load_adapter(self, held: PublishedFolder, version: int) -> Receipt:
        """Load a version's adapter under its own name.

        The server keys cached prefixes on the name alone, and a running call continues with its adapter. The
        server reports no checksums of adapters: those of the receipt are those of the files.
        """
        name = f"insitu-v{version}-{held.checksum[:8]}"
        limit = self._http.options.call_deadline_s
        await self._check_base()
        if name not in await self._models():
            body = {"lora_name": name, "lora_path": str(held.folder)}
            try:
                await self._http.post("/v1/load_lora_adapter", body, deadline_s=limit)
            except NotOffered as error:
                raise EngineError(no_adapters(self._http.name)) from error
            if name not in await self._models():
                raise EngineError(f"vllm did not take adapter {name}")
        await asyncio.to_thread(held.check_unchanged)
        self._adapters = [a for a in self._adapters if a != name] + [name]
        while len(self._adapters) > _ADAPTERS:
            old = self._adapters.pop(0)
            await self._http.post("/v1/unload_lora_adapter", {"lora_name": old}, deadline_s=limit)
        self._vouched.add(version)
        self._receipt = Receipt(version=version, checksum=held.checksum, tensors=held.sums)
        return self._receipt

    async def _check_base(self) -> None:
        """Adapters belong to the weights that the server was started with. Raises EngineError."""
        if not self.server.controlled:
            return
        label = await self.weights.label()
        if label == FRESH:
            await self.weights.set_label(0)  # it was started again
            self._below = 0
        elif label != "0":
            raise EngineError(
                f"vllm holds weights of version {label} that were published to it: adapters need those that"
                " it is started with, start it again"
            )

    async def _models(self) -> list[object]:
        models = (await self._http.get("/v1/models")).get("data")
        return [m.get("id") for m in models if isinstance(m, dict)] if isinstance(models, list) else []

    @property
    def asked(self) -> tuple[str, int | None]:
        """The current model name and the version of its adapter; None = reported by the server."""
        return (self._adapters[-1], self._receipt.version) if self._adapters else (self.server.model, None)

    @asynccontextmanager
    async def updating(self, version: int, mode: PauseMode) -> AsyncIterator[None]:
        """Pause the server and hold new calls inside the context; an error fails them and later ones.

        Running calls finish first, whatever the mode, where replies do not report versions.
        """
        self._gate.close()
        try:
            await self.pause(mode if self.weights.spans else "wait")
            self._gate.broken = f"vllm was to load version {version} and has not: its weights are unknown"
            yield
        finally:
            self._gate.open()

    async def settle(self, proof: Proof, version: int, before: TensorSums, mode: PauseMode) -> Receipt:
        """Finish an update: clear the cache, compare, set the version, return the receipt, resume."""
        if not self._context.most or self._context.update(version):
            await self.flush(running=mode == "keep")
        after = await self.weights.sums()
        changed = None if self._sums is None else proof.changed_since(self._sums)
        sums = ParamChecksums(before=before.by_name, after=after.by_name, exact=self._exact)
        exact = check_received(proof.fed, proof.expected, changed, sums)
        self._exact |= exact
        if len(exact) < len(after.by_name) and proof.unchanged is not None:
            await asyncio.to_thread(proof.unchanged)
        await self.weights.set_label(version)
        if await self.version() != version:
            raise EngineError(f"vllm did not take version {version}")
        checksum = after.digest(total(proof.sums))
        self._sums, self._gate.broken = proof.sums, ""
        self._vouched.add(version)
        self._receipt = Receipt(version=version, checksum=checksum, tensors=proof.sums)
        log.info("weights loaded version=%d exact=%d of=%d", version, len(exact), len(after.by_name))
        await self.resume()
        return self._receipt

    async def sleep(self) -> None:
        """Release the GPU memory: running calls finish first, new ones wait for `wake`."""
        self._need_control("sleep")
        self._gate.sleep()
        try:
            await self.pause("wait")
            limit = self._http.options.call_deadline_s
            await self._http.post("/sleep", query={"level": "1", "mode": "wait"}, deadline_s=limit)
            if (await self._http.get("/is_sleeping")).get("is_sleeping") is not True:
                raise EngineError("vllm does not sleep: start it with --enable-sleep-mode")
        except BaseException:
            self._gate.wake()
            raise

    async def wake(self) -> None:
        """Take the memory again, with the weights and version as they were."""
        self._gate.wake()
        await self._http.post("/wake_up", deadline_s=self._http.options.call_deadline_s)
        if (await self._http.get("/is_sleeping")).get("is_sleeping") is not False:
            raise EngineError("vllm did not wake up")
        if not self._gate.broken:
            await self.resume()
        self._gate.open()

    async def _admitted(self) -> None:
        """Return when a call may be sent. Raises EngineError while the weights are unknown."""
        limit = self._http.options.call_deadline_s
        await self._gate.admit(limit, f"timeout: vllm was loading weights or waking up for {limit:g} s")

    def _checked_runs(self, runs: VersionRuns) -> VersionRuns:
        """Return the checked version runs; raise EngineError for a version without a receipt."""
        for _, version in runs:
            if version not in self._vouched:
                raise EngineError(f"vllm sampled with version {version}, for which there is no receipt")
        return runs

    def _under(self, runs: VersionRuns, adapter: int) -> VersionRuns:
        """Return the version runs of a call with an adapter; EngineError if the base weights changed."""
        if runs != ((0, self._below),):
            raise EngineError(f"vllm's own weights changed below an adapter: {list(runs)}")
        return ((0, adapter),)

    def _need_control(self, what: str) -> None:
        if not self.server.controlled:
            raise EngineError(_NO_CONTROL.format(what))


def _check_packed(fed: WeightMapping, *, ties: bool) -> None:
    """Raise EngineError for weights that a server would mix because it packs them, as on CPUs."""
    if ties:
        raise EngineError(
            "vllm has packed its weights, as on CPUs, and would keep the old output head: the folder ties it "
            "to the embeddings; publish lm_head.weight of its own with tie_word_embeddings = false"
        )
    # vLLM 0.32 packs experts at its start only: after a reload its kernel takes plain ones for packed.
    experts = next((name for name in fed.sources if name.endswith("w13_weight")), "")
    if experts:
        raise EngineError(
            "vllm packs its weights, as on CPUs, but not its experts after a reload, and would sample with "
            f"others ({plain(experts)}): publish to a vLLM on a GPU"
        )
