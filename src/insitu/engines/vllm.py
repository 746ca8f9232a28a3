"""A vLLM server as an Engine: token ids in, token ids and logprobs out, over its HTTP API. No vllm import.

Samples through `/inference/v1/generate` (vLLM 0.32 with --enable-scale-out), else `/v1/completions` with
`return_token_ids`. The control plane (pause, reload, versions, checksums) needs VLLM_SERVER_DEV_MODE=1 at the
server, and of vLLM 0.26 a worker extension (vllm_weights.py); without it only the first route samples, and
takes no weights. Logprobs are those of the sampled distribution only with --logprobs-mode processed_logprobs:
`probe` refuses the rest. Invariant: a token is stamped with the version that the server says it was sampled
by, and an unknown label (a server that was restarted and lost its weights) is refused. On a CPU, vLLM
0.32 needs --no-enable-chunked-prefill: it dies when it cuts the prompt of a request with a seed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from insitu.engines.base import EngineInfo, Receipt
from insitu.engines.http import (
    EngineHttp,
    HttpOptions,
    NotOffered,
    open_http,
    request_name,
    session_name,
    stream_seed,
)
from insitu.engines.response_checks import (
    RawReply,
    checked,
    first,
    refuse_none,
    runs_of_spans,
    version_number,
)
from insitu.engines.vllm_control import VllmControl, VllmServer
from insitu.engines.vllm_weights import FRESH, SUPPORTED, announce_other, find_weights, version_of
from insitu.errors import EngineError, EngineUnavailable
from insitu.types import Generation, IntArray, RequestKey, SamplingParams, VersionRuns

__all__ = ["FRESH", "VllmEngine", "VllmServer", "open_vllm"]

_ABORT_S = 1.0
FIRST = 32
"""Tokens of the first prompt that a server gets."""


class VllmEngine(VllmControl):
    """Implements `engines.base.LoadingEngine`. Make one with `open_vllm`."""

    def __init__(self, http: EngineHttp, server: VllmServer, receipt: Receipt) -> None:
        super().__init__(http, server, receipt)
        self._numbers = itertools.count()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="vllm",
            max_context_tokens=self.server.max_context_tokens,
            model=self.server.model,
            versions="token" if self.server.route == "generate" else "reply",
        )

    async def close(self) -> None:
        """Nothing to do: the context of `open_vllm` owns the connections."""

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Sample a continuation of `ids`. Raises EngineError; cancellation and the deadline abort it."""
        await self._admitted()
        name = request_name(key, next(self._numbers))
        headers = {"X-Request-Id": name, "X-Session-ID": session_name(key)}
        done = False
        try:
            if self.server.route == "generate":
                with self._context.call(key.rollout_id, self._receipt.version) as began:
                    generation = await self._by_generate(ids, params, key, headers, began)
            else:
                generation = await self._by_completions(ids, params, key, headers)
            done = True
            return generation
        finally:
            if not done and self.server.route == "generate":
                await self._abort(f"generate-tokens-{name}")

    async def _by_generate(
        self, ids: IntArray, params: SamplingParams, key: RequestKey, headers: Mapping[str, str], began: int
    ) -> Generation:
        path = "/inference/v1/generate"
        model, adapter = self.asked
        body: dict[str, Any] = {
            "model": model,
            "token_ids": ids,
            "return_token_ids": True,
            "sampling_params": {**_neutral(params, key), "logprobs": 0, "detokenize": False},
        }
        if self._http.options.experts:
            body["sampling_params"]["routed_experts_prompt_start"] = params.experts_from
        if self._context.most:
            body["cache_salt"] = f"insitu-{began}"
        answer = await self._post(path, body, headers)
        choice = first(answer.get("choices"), f"vllm {path}")
        new = choice.get("token_ids")
        refuse_none(new, f"vllm {path}")
        count = len(new) if isinstance(new, list) else 0
        logprobs = _paired(choice.get("logprobs"), new)
        runs = runs_of_spans(choice.get("weight_versions"), self._labels, count, f"vllm {path}")
        runs = self._checked_runs(runs) if adapter is None else self._under(runs, adapter)
        raw = RawReply(
            ids=new,
            logprobs=logprobs,
            finish=choice.get("finish_reason"),
            version_runs=self._context.stamped(runs, began) if self._context.most else runs,
            prompt=_prompt(answer),
            cached=_cached(answer),
            experts=self._experts(choice),
        )
        return checked(raw, ids, params, f"vllm {path}")

    def _experts(self, choice: Mapping[str, object]) -> object:
        """Return the experts of a reply, None where they are not wanted; raise EngineError without them."""
        if not self._http.options.experts:
            return None
        if (found := choice.get("routed_experts")) is None:
            raise EngineError(
                f"{self._http.name} returns no experts, which engine.replay_experts needs: start it with"
                " --enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1, or set it to false"
            )
        return found

    async def _by_completions(
        self, ids: IntArray, params: SamplingParams, key: RequestKey, headers: Mapping[str, str]
    ) -> Generation:
        """Generate over /v1/completions; the version must be the same before and after."""
        path = "/v1/completions"
        body = {
            "model": self.asked[0],
            "prompt": ids,
            "return_token_ids": True,
            "logprobs": 0,
            **_neutral(params, key),
            "skip_special_tokens": False,
        }
        before = self._receipt.version
        answer = await self._post(path, body, headers)
        choice = first(answer.get("choices"), f"vllm {path}")
        logprobs = choice.get("logprobs")
        raw = RawReply(
            ids=choice.get("token_ids"),
            logprobs=logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None,
            finish=choice.get("finish_reason"),
            version_runs=await self._unchanged(before),
            prompt=_prompt(choice, answer),
            cached=_cached(answer),
        )
        return checked(raw, ids, params, f"vllm {path}")

    async def _post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Mapping[str, Any]:
        deadline_s = self._http.options.call_deadline_s
        return await self._http.post(
            path, body, headers=headers, deadline_s=deadline_s, passing=EngineUnavailable
        )

    async def _unchanged(self, before: int) -> VersionRuns:
        now = await self.version()
        if not before == now == self._receipt.version:
            raise EngineError("vllm /v1/completions: the weights changed during the call")
        return ((0, now),)

    async def _abort(self, name: str) -> None:
        """Best effort: the server also aborts what its client has left."""
        with contextlib.suppress(EngineError):
            body = {"request_ids": [name]}
            await self._http.post("/inference/v1/abort_requests", body, deadline_s=_ABORT_S)


def _cached(answer: Mapping[str, Any]) -> object:
    """Return the prompt tokens from the prefix cache (reported with --enable-prompt-tokens-details)."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return details.get("cached_tokens") if isinstance(details, dict) else None


def _neutral(params: SamplingParams, key: RequestKey) -> dict[str, Any]:
    """Return sampling parameters that change nothing but the temperature."""
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "seed": stream_seed(key),
        "stop_token_ids": sorted(params.stop_ids),
        # Else the server would also stop at ids that its own generation config names.
        "ignore_eos": True,
    }


def _paired(logprobs: object, ids: object) -> object:
    """Return the logprobs of the reply's own ids; raise EngineError if they belong to other ids."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        return None
    if content and not any("token_id" in item for item in content):
        raise EngineError(
            "vllm: its logprobs name no ids, as before 0.32: start it with VLLM_SERVER_DEV_MODE=1;"
            f" {SUPPORTED}"
        )
    if [item.get("token_id") for item in content] != ids:
        raise EngineError("vllm: the logprobs are those of other ids than were returned")
    return [item.get("logprob") for item in content]


def _prompt(*places: Mapping[str, object]) -> object:
    """Return the prompt ids of the reply; a null is rejected like a missing field."""
    return next((ids for place in places if (ids := place.get("prompt_token_ids")) is not None), "missing")


async def _describe(http: EngineHttp) -> VllmServer:
    models = (await http.get("/v1/models")).get("data")
    model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    name, length = model.get("id"), model.get("max_model_len")
    if not isinstance(name, str) or not isinstance(length, int):
        raise EngineError("vllm /v1/models names no model with its max_model_len")
    weights = await find_weights(http)
    if weights is not None:
        await _check_single(http)
    # A server whose replies name no weights names no ids beside their logprobs either, on that route.
    generates = (weights is None or weights.spans) and await _offers_generate(http, name, length)
    return VllmServer(
        model=name,
        max_context_tokens=length,
        route="generate" if generates else "completions",
        weights=weights,
    )


async def _check_single(http: EngineHttp) -> None:
    """Raise EngineError for several data-parallel engines behind one address.

    A label, a checksum or a cached prefix would be that of any of them.
    """
    with contextlib.suppress(NotOffered):
        workers = (await http.get("/get_world_size")).get("world_size")
        of_one = (await http.get("/get_world_size?include_dp=false")).get("world_size")
        if workers != of_one:
            raise EngineError(
                f"{http.name} has {workers} workers where one engine has {of_one} (--data-parallel-size):"
                " start a server of its own for each, and name all in engine.urls"
            )


async def _offers_generate(http: EngineHttp, model: str, length: int) -> bool:
    """Return whether the server has the generate route, tested with a prompt of several tokens."""
    # vLLM 0.32 on a CPU with AMX (bfloat16) crashes (illegal instruction) if its first prompt has one token.
    ids = [0] * max(1, min(FIRST, length - 1))
    body = {"model": model, "token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 1.0}}
    try:
        await http.post("/inference/v1/generate", body, deadline_s=http.options.call_deadline_s)
    except NotOffered:
        return False
    return True


@asynccontextmanager
async def open_vllm(options: HttpOptions) -> AsyncIterator[VllmEngine]:
    """Attach to a running server; its own weights are version 0 unless it says otherwise.

    Raises EngineError when it is not reachable or is no vLLM server that can serve. Does not probe.
    """
    async with open_http(options, f"vllm at {options.url}") as http:
        server = await _describe(http)
        if server.route == "completions" and not server.controlled:
            raise EngineError(
                f"vllm {await version_of(http)} at {options.url} cannot say which weights sampled a reply:"
                f" start it with --enable-scale-out or with VLLM_SERVER_DEV_MODE=1; {SUPPORTED}"
            )
        asked = {"replay_experts": options.experts, "publish_mode keep": options.context_versions}
        for key in (key for key, given in asked.items() if given and server.route != "generate"):
            raise EngineError(f"vllm at {options.url}: engine.{key} needs vLLM 0.32 with --enable-scale-out")
        await announce_other(http, server.weights, server.route)
        receipt = Receipt(version=0, checksum="unknown")
        if (weights := server.weights) is not None:
            label = await weights.label()
            if label == FRESH:
                await weights.set_label(0)
                label = "0"
            version = version_number(label, None, "vllm")
            receipt = Receipt(version=version, checksum=(await weights.sums()).digest())
        yield VllmEngine(http, server, receipt)
