"""Weight labels and checksums of a vLLM server: by its own routes, or through insitu's worker extension.

vLLM 0.32 has routes for the label of its weights and the checksums of its tensors. 0.26 has neither; there
`vllm_worker.InsituWorker` provides both, if the server was started with it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from insitu.engines.http import EngineHttp, NotOffered
from insitu.engines.weight_mapping import EMPTY
from insitu.errors import EngineError, EngineUnavailable

__all__ = ["FRESH", "SUPPORTED", "ServedWeights", "TensorSums", "announce_other", "find_weights"]

FRESH = "default"
"""Label of a server's initial weights."""
SUPPORTED = (
    "it needs /weight_info and /weight_checker, as vLLM 0.32 has them, or as 0.26 --worker-extension-cls"
    " insitu.engines.vllm_worker.InsituWorker and insitu on the server's PYTHONPATH"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSums:
    """Checksums of vLLM's tensors; on a CPU it repacks some and then reports empty ones."""

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


class ServedWeights(Protocol):
    """Access to the label and checksums of a server's weights; all methods raise EngineError."""

    spans: bool
    """Replies say which weights sampled which tokens, so a call may go on while they change."""

    async def label(self) -> str:
        """FRESH, or what `set_label` set."""

    async def set_label(self, version: int) -> None: ...

    async def sums(self) -> TensorSums: ...


class _RouteWeights:
    """By the routes of vLLM 0.32."""

    spans = True

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def label(self) -> str:
        label = (await self._http.get("/weight_info")).get("weight_version")
        if not isinstance(label, str):
            raise EngineError("vllm /weight_info names no version")
        return label

    async def set_label(self, version: int) -> None:
        await self._http.post("/update_weight_version", {"new_version": str(version)})

    async def sums(self) -> TensorSums:
        body = {"action": "checksum"}
        answer = await self._http.post("/weight_checker", body, deadline_s=self._http.options.call_deadline_s)
        sums = answer.get("checksums")
        if not isinstance(sums, dict) or not sums:
            raise EngineError("vllm /weight_checker names no tensor")
        return TensorSums(by_name=sums)


class _WorkerWeights:
    """By `vllm_worker.InsituWorker` in each worker of the server."""

    spans = False

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def label(self) -> str:
        labels = {answers["label"] for answers in await self._ask({})}
        if len(labels) != 1:
            raise EngineError(f"vllm's workers hold weights of several versions: {sorted(labels)}")
        label: str = labels.pop()
        return label

    async def set_label(self, version: int) -> None:
        await self._call("insitu_set_label", {"label": str(version)})

    async def sums(self) -> TensorSums:
        answers = await self._ask({"with_sums": "yes"})
        sums = {f"tp{one['rank']}:{name}": value for one in answers for name, value in one["sums"].items()}
        if not sums:
            raise EngineError("vllm's workers name no tensor")
        return TensorSums(by_name=sums)

    async def _ask(self, kwargs: Mapping[str, str]) -> list[dict[str, Any]]:
        found = (await self._call("insitu_weights", kwargs)).get("results")
        wanted = {"label", "rank", *(("sums",) if kwargs else ())}
        if not isinstance(found, list) or not found:
            raise EngineError("vllm /collective_rpc names no worker")
        if not all(isinstance(one, dict) and one.keys() >= wanted for one in found):
            raise EngineError("vllm /collective_rpc: a worker's answer is not that of InsituWorker")
        return found

    async def _call(self, method: str, kwargs: Mapping[str, str]) -> Mapping[str, Any]:
        body = {"method": method, "kwargs": dict(kwargs)}
        return await self._http.post("/collective_rpc", body, deadline_s=self._http.options.call_deadline_s)


async def find_weights(http: EngineHttp) -> ServedWeights | None:
    """Return the access to the server's weights; None for a server without control routes."""
    with suppress(NotOffered):
        await http.get("/weight_info")
        return _RouteWeights(http)
    try:
        await http.get("/is_paused")
    except NotOffered:
        return None
    held = _WorkerWeights(http)
    try:
        await held.label()
    except EngineUnavailable:
        raise
    except EngineError as error:
        version = await version_of(http)
        raise EngineError(f"vllm {version} cannot say which weights it holds: {SUPPORTED}") from error
    return held


async def announce_other(http: EngineHttp, weights: ServedWeights | None, route: str) -> None:
    """Log what was found of a release that no test ran with."""
    if not (release := await version_of(http)).startswith(("0.32.", "0.26.")):
        held = (
            "/collective_rpc" if weights and not weights.spans else "/weight_info" if weights else "nothing"
        )
        said = (
            "vllm %s at %s: tests ran with 0.32 and 0.26; weights by %s, samples by %s, numbers by the probe"
        )
        log.warning(said, release, http.options.url, held, route)


async def version_of(http: EngineHttp) -> str:
    """Return the server's version, or `of an unknown version`."""
    try:
        answer = (await http.get("/version")).get("version")
    except NotOffered:
        answer = None
    return answer if isinstance(answer, str) else "of an unknown version"
