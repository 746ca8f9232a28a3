"""An SGLang server as an Engine: `/generate` with `input_ids`, and its documented control routes.

Written to SGLang's documentation and tested against the shipped fake that follows it (tests/fakes),
not against a real server. SGLang reports one weight version per reply, the one at its end. So a call never
spans an update: it is cut off, its tokens are kept under the old version, and after the update the rest is
requested as a new request behind it. Draws repeat by seed only with --enable-deterministic-inference. Its
logprobs are of the sampled distribution unless SGLANG_RETURN_ORIGINAL_LOGPROB is set, which the probe
detects.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from insitu.engines.base import EngineInfo, PauseMode, Receipt
from insitu.engines.http import (
    EngineHttp,
    HttpOptions,
    RequestGate,
    open_http,
    request_name,
    session_name,
    stream_seed,
)
from insitu.engines.response_checks import RawReply, checked, int_row, version_number
from insitu.engines.weight_mapping import inspect
from insitu.errors import EngineError, EngineUnavailable
from insitu.types import Generation, IntArray, RequestKey, SamplingParams

FRESH = "default"
"""SGLang's label of its initial weights."""
_ABORT_S = 1.0


class _SglangEngine:
    """Implements `engines.base.LoadingEngine`. Make one with `open_sglang`."""

    def __init__(self, http: EngineHttp, model: str, max_context_tokens: int, receipt: Receipt) -> None:
        self._http, self._model, self._max_context, self._receipt = http, model, max_context_tokens, receipt
        self._numbers = itertools.count()
        self._in_flight = 0
        """Requests of ours at the server."""
        self._keeping = False
        """Continue requests that the server cuts off after the pause."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._gate = RequestGate()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="sglang", max_context_tokens=self._max_context, model=self._model, versions="reply"
        )

    @property
    def receipt(self) -> Receipt:
        return self._receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Sample a continuation of `ids`. Raises EngineError; cancellation and the deadline abort it."""
        parts: list[Generation] = []
        limit = self._http.options.call_deadline_s
        while True:
            await self._gate.admit(limit, f"sglang stayed paused for {limit:g} s")
            done = sum(len(part.ids) for part in parts)
            left = replace(params, max_tokens=params.max_tokens - done)
            prompt = np.concatenate([ids, *(part.ids for part in parts)]).astype(np.int32)
            part, cut = await self._part(prompt, left, key, len(parts))
            if part is not None:
                parts.append(part)
            if not cut or (part is not None and len(part.ids) == left.max_tokens):
                return _joined(parts)

    async def _part(
        self, ids: IntArray, params: SamplingParams, key: RequestKey, number: int
    ) -> tuple[Generation | None, bool]:
        """Return what one request sampled, if anything, and whether an update cut it off."""
        self._in_flight += 1
        self._idle.clear()
        version = self._receipt.version
        try:
            answer = await self._ask(ids, params, key, number)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        raw, cut = _reply(answer, len(ids), version, cuts=self._keeping)
        if not cut and self._receipt.version != version:
            raise EngineError("sglang /generate: the weights changed during the call")
        if cut and not raw.ids:
            return None, True
        return checked(raw, ids, params, "sglang /generate"), cut

    async def _ask(
        self, ids: IntArray, params: SamplingParams, key: RequestKey, number: int
    ) -> Mapping[str, Any]:
        name = request_name(key, next(self._numbers))
        body = {
            "rid": name,
            "input_ids": ids,
            "sampling_params": _neutral(params, key, number),
            "return_logprob": True,
            "stream": False,
        }
        done = False
        try:
            answer = await self._http.post(
                "/generate",
                body,
                headers={"X-Session-ID": session_name(key)},
                deadline_s=self._http.options.call_deadline_s,
                passing=EngineUnavailable,
            )
            done = True
            return answer
        finally:
            if not done:
                with contextlib.suppress(EngineError):
                    await self._http.post("/abort_request", {"rid": name}, deadline_s=_ABORT_S)

    # ----------------------------------------------------------------------- control plane

    async def version(self) -> int:
        """Ask the server which weights it holds. Raises EngineError for an unknown label."""
        return version_number(await _label(self._http), None, "sglang /model_info")

    async def recognise(self) -> Receipt:
        """As the protocol says; it proves no weights to its clients."""
        if await _label(self._http) != FRESH:
            raise EngineError("sglang holds weights of a version that insitu did not find there")
        version = str(self._receipt.version)
        await self._http.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        return self._receipt

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop starting new work, and return when no request is left at the server.

        `wait` lets requests finish, `abort` ends them, `keep` continues them after `resume` with the new
        weights.
        """
        self._gate.close()
        limit = self._http.options.call_deadline_s
        self._keeping = mode == "keep"
        if mode == "wait":
            await self._until_idle(limit)
        await self._http.post("/pause_generation", {"mode": "abort"}, deadline_s=limit)
        await self._until_idle(limit)

    async def _until_idle(self, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                await self._idle.wait()
        except TimeoutError as error:
            raise EngineError(f"sglang: requests did not end within {limit:g} s of a pause") from error

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {})
        self._keeping = False
        self._gate.open()

    async def flush(self) -> None:
        """Forget the prefix cache."""
        await self._http.post("/flush_cache")

    async def load(self, folder: Path, version: int, *, mode: PauseMode = "wait") -> Receipt:
        """Sample with the weights in `folder` from now on; the path must mean the same at the server.

        SGLang proves no tensor to its clients: the receipt's checksum is that of the files, which must be the
        same before and after. When anything fails the engine stays paused and refuses to sample until a later
        `load` succeeds. Raises EngineError.
        """
        folder = await asyncio.to_thread(folder.resolve)
        held = await asyncio.to_thread(inspect, folder, version)
        if await asyncio.to_thread((folder / "adapter_config.json").exists):
            raise EngineError("insitu brings adapters to vllm only, not to sglang")
        try:
            await self.pause(mode)
            self._gate.broken = f"sglang was to load version {version} and has not: its weights are unknown"
            body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
            limit = self._http.options.call_deadline_s
            answer = await self._http.post("/update_weights_from_disk", body, deadline_s=limit)
            if answer.get("success") is not True:
                raise EngineError(f"sglang did not load {folder}: {answer.get('message')}")
            await self.flush()
            await asyncio.to_thread(held.check_unchanged)
            if await self.version() != version:
                raise EngineError(f"sglang did not take version {version}")
            self._receipt = Receipt(version=version, checksum=held.checksum, tensors=held.sums)
            self._gate.broken = ""
            await self.resume()
        finally:
            # Whoever waited learns what became of it.
            self._gate.open()
        return self._receipt

    async def has_own_head(self) -> bool:
        return False

    async def sleep(self) -> None:
        """Release the GPU memory: running requests finish first, new ones wait for `wake`."""
        self._gate.sleep()
        try:
            await self.pause("wait")
            limit = self._http.options.call_deadline_s
            await self._http.post("/release_memory_occupation", {}, deadline_s=limit)
        except BaseException:
            self._gate.wake()
            raise

    async def wake(self) -> None:
        self._gate.wake()
        limit = self._http.options.call_deadline_s
        await self._http.post("/resume_memory_occupation", {}, deadline_s=limit)
        await self.resume()

    async def close(self) -> None:
        """Nothing to do: the context of `open_sglang` owns the connections."""


def _neutral(params: SamplingParams, key: RequestKey, part: int = 0) -> dict[str, Any]:
    """Return sampling parameters that change nothing but the temperature.

    Each part of a call that was cut off has its own random stream.
    """
    return {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        # The server keeps seeds in 32 bits.
        "sampling_seed": (stream_seed(key) + 0x9E3779B1 * part) & 0x7FFFFFFF,
        "stop_token_ids": sorted(params.stop_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def _joined(parts: Sequence[Generation]) -> Generation:
    """One call out of its parts, with the version of each."""
    runs: list[tuple[int, int]] = []
    at = 0
    for part in parts:
        version = part.version_runs[0][1]
        if not runs or runs[-1][1] != version:
            runs.append((at, version))
        at += len(part.ids)
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Generation(
        ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate(logprobs),
        finish=parts[-1].finish,
        version_runs=tuple(runs),
        times=parts[0].times,
    )


def _reply(
    answer: Mapping[str, Any], prompt_tokens: int, version: int, *, cuts: bool
) -> tuple[RawReply, bool]:
    """Return the parsed reply, and whether an update cut the request off (only with `cuts`).

    Ids and logprobs come in one list of (logprob, id, text), so they cannot be misaligned.
    """
    where = "sglang /generate"
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineError(f"{where}: no meta_info")
    if meta.get("prompt_tokens") != prompt_tokens:
        raise EngineError(
            f"{where}: {meta.get('prompt_tokens')} prompt tokens where {prompt_tokens} were sent"
        )
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else finish
    cut = kind == "abort" and cuts
    if kind == "abort" and not cut:
        message = finish.get("message", "") if isinstance(finish, dict) else ""
        raise EngineError(f"{where}: the engine aborted the request: {message}")
    logprobs, ids = _triples(meta.get("output_token_logprobs"), where)
    if meta.get("completion_tokens") != len(ids):
        raise EngineError(f"{where}: {meta.get('completion_tokens')} tokens, but {len(ids)} logprobs")
    # Some versions leave the stop id out here, and only here.
    if answer.get("output_ids") not in (None, ids) and not (
        kind == "stop" and answer.get("output_ids") == ids[:-1]
    ):
        raise EngineError(f"{where}: the logprobs are those of other ids than were returned")
    reported = version_number(meta.get("weight_version"), None, where)
    if reported != version:
        raise EngineError(f"{where}: sampled by version {reported}, while version {version} is held")
    finish = "length" if cut else kind
    raw = RawReply(
        ids=ids,
        logprobs=logprobs,
        finish=finish,
        version_runs=((0, version),),
        cached=meta.get("cached_tokens"),
    )
    return raw, cut


def _triples(value: object, where: str) -> tuple[list[object], list[object]]:
    if not isinstance(value, list) or not all(isinstance(item, list) and len(item) >= 2 for item in value):
        raise EngineError(f"{where}: no logprobs")
    return [item[0] for item in value], [item[1] for item in value]


async def _label(http: EngineHttp) -> object:
    return (await http.get("/model_info")).get("weight_version")


async def _served_model(http: EngineHttp) -> tuple[str, int]:
    """Return the name of the model and the tokens that it takes per call."""
    models = (await http.get("/v1/models")).get("data")
    model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    length = model.get("max_model_len")
    if type(length) is not int:
        raise EngineError("sglang /v1/models names no model with its max_model_len")
    return str(model.get("id")), length


async def _check_echo(http: EngineHttp) -> None:
    """Once: the server says which prompt ids it saw, which costs it the prefix cache."""
    sent = np.arange(1, 9, dtype=np.int32)
    body = {
        "input_ids": sent,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await http.post("/generate", body, deadline_s=http.options.call_deadline_s)
    meta = answer.get("meta_info")
    triples = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    seen = int_row(_triples(triples, "sglang prompt")[1], "sglang: prompt ids")
    if not np.array_equal(seen, sent):
        raise EngineError("sglang saw other prompt ids than were sent")


@asynccontextmanager
async def open_sglang(options: HttpOptions) -> AsyncIterator[_SglangEngine]:
    """Attach to a running server; its own weights are version 0 unless it says otherwise.

    Raises EngineError when it is not reachable or does not see the ids it is sent. Does not probe.
    """
    async with open_http(options, f"sglang at {options.url}") as http:
        model, max_context = await _served_model(http)
        await _check_echo(http)
        label = await _label(http)
        if label == FRESH:
            await http.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
            label = await _label(http)
        version = version_number(label, None, "sglang /model_info")
        yield _SglangEngine(http, model, max_context, Receipt(version=version, checksum="unknown"))
