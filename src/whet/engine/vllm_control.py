"""The control plane of a vLLM server: pause, new weights with their proof, sleep, versions, adapters.

A load is pause -> reload -> forget cached prefixes -> compare every parameter -> set and read back the
version -> resume, each wait with a deadline. From the pause to the last step nothing is sampled; when a step
fails the engine stays so until a later load succeeds. Needs VLLM_SERVER_DEV_MODE=1 at the server.
The sampling side is vllm.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.engine.base import PauseMode, Receipt
from whet.engine.fed import EMPTY, Fed, check_received, feed
from whet.engine.folder import ties_embeddings
from whet.engine.http import EngineHttp
from whet.engine.published import inspect
from whet.engine.reply import version_number
from whet.engine.tensor_file import total
from whet.errors import EngineError
from whet.types import VersionRuns

log = logging.getLogger(__name__)

Route = Literal["generate", "completions"]
FRESH = "default"
"""What vLLM calls the weights it was started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """What the server said of itself when it was attached."""

    model: str
    max_context_tokens: int
    route: Route
    controlled: bool
    """It has the routes that pause it and change its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSums:
    """What vLLM reports for each of its tensors. On a CPU it repacks some and then reports empty ones."""

    by_name: Mapping[str, str]

    @property
    def complete(self) -> bool:
        return EMPTY not in self.by_name.values()

    def digest(self, published: str = "") -> str:
        """Hex digest over all tensors in name order; `published` stands in for empty ones."""
        text = "".join(f"{name}\0{self.by_name[name]}\0" for name in sorted(self.by_name))
        if not self.complete:
            text += published
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a server must hold after an update."""

    sums: Mapping[str, str]
    """Of the published tensors."""
    fed: Fed
    expected: Mapping[str, str]
    """Sum of each parameter that holds exactly the published bytes."""
    unchanged: Callable[[], None] | None = None
    """Raises when what was sent is no longer what the sums are of."""

    def changed_since(self, earlier: Mapping[str, str]) -> list[str]:
        return [name for name, held in self.sums.items() if earlier.get(name) != held]


async def tensor_sums(http: EngineHttp) -> TensorSums:
    body = {"action": "checksum"}
    answer = await http.post("/weight_checker", body, deadline_s=http.options.call_deadline_s)
    sums = answer.get("checksums")
    if not isinstance(sums, dict) or not sums:
        raise EngineError("vllm /weight_checker names no tensor")
    return TensorSums(by_name=sums)


async def weight_label(http: EngineHttp) -> str:
    label = (await http.get("/weight_info")).get("weight_version")
    if not isinstance(label, str):
        raise EngineError("vllm /weight_info names no version")
    return label


async def set_label(http: EngineHttp, version: int) -> None:
    await http.post("/update_weight_version", {"new_version": str(version)})


class VllmControl:
    """See the module."""

    def __init__(self, http: EngineHttp, server: VllmServer, receipt: Receipt) -> None:
        self._http, self.server, self._receipt = http, server, receipt
        self._labels = {} if server.controlled else {FRESH: receipt.version}
        self._vouched = {receipt.version}
        """Versions that there was a receipt for."""
        self._sums: Mapping[str, str] | None = None
        """Of the published tensors that were loaded last."""
        self._broken = ""
        self._open = asyncio.Event()
        """New calls may be sent; otherwise they wait, for new weights or for the end of a sleep."""
        self._open.set()

    @property
    def http(self) -> EngineHttp:
        return self._http

    @property
    def receipt(self) -> Receipt:
        return self._receipt

    async def version(self) -> int:
        """Ask the server which weights it holds. Raises EngineError for a label that nobody set."""
        return version_number(await weight_label(self._http), self._labels, "vllm /weight_info")

    async def has_own_head(self) -> bool:
        """Whether the output head is a parameter of its own at the server."""
        return any(n.endswith("lm_head.weight") for n in (await tensor_sums(self._http)).by_name)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop starting new work. `wait` lets what runs finish, `abort` ends it, `keep` freezes it."""
        self._need_control("pause")
        limit = self._http.options.call_deadline_s
        await self._http.post("/pause", query={"mode": mode}, deadline_s=limit)
        if (await self._http.get("/is_paused")).get("is_paused") is not True:
            raise EngineError("vllm says it is paused and is not")

    async def resume(self) -> None:
        self._need_control("resume")
        await self._http.post("/resume")

    async def flush(self, *, running: bool = False) -> None:
        """Forget the prefix cache; with `running` the requests under way are computed anew too."""
        self._need_control("reset_prefix_cache")
        query = {"reset_running_requests": "true" if running else "false"}
        if (await self._http.post("/reset_prefix_cache", query=query)).get("success") is not True:
            raise EngineError("vllm did not reset its prefix cache")

    async def load(self, folder: Path, version: int, *, mode: PauseMode = "wait") -> Receipt:
        """Sample with the weights in `folder` from now on; the path must mean the same at the server.

        A folder that does not match its own manifest, tensors that do not feed exactly the engine's
        parameters, and tied weights that a CPU server would mix are refused before anything is paused.
        Raises EngineError.
        """
        self._need_control("reload_weights")
        folder = await asyncio.to_thread(folder.resolve)
        held = await asyncio.to_thread(inspect, folder, version)
        before = await tensor_sums(self._http)
        if not before.complete and await asyncio.to_thread(ties_embeddings, folder):
            raise EngineError(
                f"vllm has packed its weights, as on CPUs, and would keep the old output head: {folder} ties "
                "it to the embeddings; publish lm_head.weight of its own with tie_word_embeddings = false"
            )
        fed = feed(before.by_name, held.tensors)
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

    @asynccontextmanager
    async def updating(self, version: int, mode: PauseMode) -> AsyncIterator[None]:
        """Paused, new calls waiting here; with an error inside, they and later ones fail."""
        self._open.clear()
        try:
            await self.pause(mode)
            self._broken = f"vllm was to load version {version} and has not: its weights are unknown"
            yield
        finally:
            self._open.set()

    async def settle(self, proof: Proof, version: int, before: TensorSums, mode: PauseMode) -> Receipt:
        """The last part of an update: forget, compare, set the version, give the receipt, resume."""
        await self.flush(running=mode == "keep")
        after = await tensor_sums(self._http)
        changed = None if self._sums is None else proof.changed_since(self._sums)
        exact = check_received(proof.fed, proof.expected, changed, before.by_name, after.by_name)
        if exact < len(after.by_name) and proof.unchanged is not None:
            await asyncio.to_thread(proof.unchanged)
        await set_label(self._http, version)
        if await self.version() != version:
            raise EngineError(f"vllm did not take version {version}")
        checksum = after.digest(total(proof.sums))
        self._sums, self._broken = proof.sums, ""
        self._vouched.add(version)
        self._receipt = Receipt(version=version, checksum=checksum, tensors=proof.sums)
        log.info("weights loaded version=%d exact=%d of=%d", version, exact, len(after.by_name))
        await self.resume()
        return self._receipt

    async def sleep(self) -> None:
        """Give the GPU's memory back: calls under way end first, new ones wait for `wake`."""
        self._need_control("sleep")
        self._open.clear()
        await self.pause("wait")
        limit = self._http.options.call_deadline_s
        await self._http.post("/sleep", query={"level": "1", "mode": "wait"}, deadline_s=limit)
        if (await self._http.get("/is_sleeping")).get("is_sleeping") is not True:
            raise EngineError("vllm does not sleep: start it with --enable-sleep-mode")

    async def wake(self) -> None:
        """Take the memory again, with the weights and version as they were."""
        await self._http.post("/wake_up", deadline_s=self._http.options.call_deadline_s)
        if (await self._http.get("/is_sleeping")).get("is_sleeping") is not False:
            raise EngineError("vllm did not wake up")
        if not self._broken:
            await self.resume()
        self._open.set()

    async def _admitted(self) -> None:
        """Return when a call may be sent. Raises EngineError while the weights are unknown."""
        limit = self._http.options.call_deadline_s
        try:
            async with asyncio.timeout(limit):
                await self._open.wait()
        except TimeoutError as error:
            raise EngineError(f"vllm was asleep or loading weights for {limit:g} s") from error
        if self._broken:
            raise EngineError(self._broken)

    def _checked_runs(self, runs: VersionRuns) -> VersionRuns:
        """Raises EngineError for a version that nobody gave a receipt for."""
        for _, version in runs:
            if version not in self._vouched:
                raise EngineError(f"vllm sampled with version {version}, for which there is no receipt")
        return runs

    def _need_control(self, what: str) -> None:
        if not self.server.controlled:
            raise EngineError(
                f"vllm cannot {what}: start it with VLLM_SERVER_DEV_MODE=1 for its control routes"
            )
