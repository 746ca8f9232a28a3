"""A server with the routes of SGLang that insitu uses, and no model behind them. Shipped for tests.

Follows SGLang's documentation of its native API: `/generate` with `input_ids`, `meta_info` with triples
(logprob, id, text) and the weight version at the end of the reply, `/abort_request`, pause modes, reload from
disk. `corrupt` changes a finished answer on its way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.fakes.sampler import FakeSampler, Job
from tests.fakes.vllm import Corrupt, listening

_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class FakeSglang:
    """Make one with `serve_sglang`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        processed: bool = True,
        max_model_len: int = 4096,
        token_delay_s: float = 0.0,
        trims_stop: bool = False,
        corrupt: Corrupt | None = None,
    ) -> None:
        self.processed, self.max_model_len, self.corrupt = processed, max_model_len, corrupt
        self.trims_stop = trims_stop
        """`output_ids` without the stop id, as some versions do."""
        self.sampler = FakeSampler(vocab_size, label="default", token_delay_s=token_delay_s)
        self.url = ""
        self.loads_fail = False
        self.sleeping = False
        self._numbers = 0
        self._tasks: set[asyncio.Task[Job]] = set()

    def restart(self) -> None:
        """The process dies and comes back with the weights it was started with: connections break."""
        self.sampler.label = "default"
        for task in list(self._tasks):
            task.cancel()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/health", self._health)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/update_weight_version", self._update_version)
        app.router.add_post("/release_memory_occupation", self._release)
        app.router.add_post("/resume_memory_occupation", self._occupy)
        return app

    async def _models(self, http: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": "policy", "max_model_len": self.max_model_len}]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, http: web.Request) -> web.Response:
        return _json({"model_path": "policy", "is_generation": True, "weight_version": self.sampler.label})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        ids, params = body["input_ids"], body["sampling_params"]
        if not ids or max(ids) >= self.sampler.model.vocab_size:
            return _json({"error": {"message": "The input_ids contain values out of the vocabulary"}}, 400)
        if len(ids) >= self.max_model_len:
            return _json({"error": {"message": "The input is longer than the context length"}}, 400)
        self._numbers += 1
        job = Job(
            name=body.get("rid") or f"rid-{self._numbers}",
            prompt=ids,
            max_tokens=params["max_new_tokens"],
            temperature=params["temperature"],
            seed=params.get("sampling_seed") or 0,
            stop_ids=frozenset(params.get("stop_token_ids") or ()),
        )
        task = asyncio.ensure_future(self.sampler.run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await task
        except asyncio.CancelledError:
            if http.transport is not None:
                http.transport.abort()
            raise
        finally:
            task.cancel()
        return self._answer(job, body)

    def _answer(self, job: Job, body: Mapping[str, Any]) -> web.Response:
        reasons: dict[str, dict[str, object]] = {
            "stop": {"type": "stop", "matched": job.ids[-1] if job.ids else None},
            "length": {"type": "length", "length": job.max_tokens},
            "abort": {"type": "abort", "message": "Abort in running batch", "status_code": None},
        }
        meta: dict[str, Any] = {
            "id": job.name,
            "finish_reason": reasons[job.finish],
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(job.ids),
            "cached_tokens": 0,
            "weight_version": self.sampler.label,
        }
        if body.get("return_logprob"):
            logprobs = job.processed if self.processed else job.raw
            pairs = zip(logprobs, job.ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            if body.get("logprob_start_len") == 0:
                meta["input_token_logprobs"] = [
                    [None if i == 0 else -1.0, token, None] for i, token in enumerate(job.prompt)
                ]
        trimmed = self.trims_stop and job.finish == "stop"
        answer = {"text": "", "output_ids": job.ids[:-1] if trimmed else job.ids, "meta_info": meta}
        changed = self.corrupt(answer) if self.corrupt is not None else answer
        raw = changed if isinstance(changed, bytes) else orjson.dumps(changed)
        return web.Response(body=raw, content_type="application/json")

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.sampler.abort(None if body.get("abort_all") else [body["rid"]])
        return web.Response()

    async def _pause(self, http: web.Request) -> web.Response:
        await self.sampler.pause(_MODES[(await http.json()).get("mode", "abort")])
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        self.sampler.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, http: web.Request) -> web.Response:
        self.sampler.flush()
        return web.Response(text="Cache flushed.")

    async def _update(self, http: web.Request) -> web.Response:
        body = await http.json()
        if self.loads_fail:
            return _json({"success": False, "message": "Failed to get weights iterator"}, 400)
        self.sampler.load(Path(body["model_path"]))
        if body.get("weight_version"):
            self.sampler.label = body["weight_version"]
        return _json({"success": True, "message": "Succeeded to update model weights."})

    async def _update_version(self, http: web.Request) -> web.Response:
        self.sampler.label = (await http.json())["new_version"]
        return _json({"success": True, "new_version": self.sampler.label})

    async def _release(self, http: web.Request) -> web.Response:
        if self.sampler.jobs:
            return _json({"error": {"message": "requests are running"}}, 400)
        self.sleeping = True
        return _json({})

    async def _occupy(self, http: web.Request) -> web.Response:
        self.sleeping = False
        return _json({})


def _json(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@asynccontextmanager
async def serve_sglang(vocab_size: int, **options: Any) -> AsyncIterator[FakeSglang]:
    """A fake server on a free loopback port."""
    fake = FakeSglang(vocab_size, **options)
    async with listening(fake.app()) as origin:
        fake.url = origin
        yield fake
