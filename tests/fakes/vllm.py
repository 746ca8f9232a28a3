"""A server with the routes of vLLM that insitu uses, and no model behind them. Shipped for tests.

Follows vLLM 0.32: `/inference/v1/generate` (403 without scale_out), `/v1/completions`, and the routes of
VLLM_SERVER_DEV_MODE (404 without dev_mode). `corrupt` changes a finished answer on its way out, for faults
that no healthy server shows.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from aiohttp import web
from tokenizers import Tokenizer

from insitu.engines.safetensors_file import StoredTensor, read_folder, sums_of, total
from insitu.engines.weight_mapping import EMPTY as _EMPTY
from tests.fakes.sampler import ChanceModel, FakeSampler, Job
from tests.fakes.weight_folders import chance_tensors, served_sums

Corrupt = Callable[[dict[str, Any]], object]
"""Gets the answer; what it returns is sent instead (bytes as they stand)."""


class FakeVllm:
    """Make one with `serve_vllm`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        processed: bool = True,
        scale_out: bool = True,
        dev_mode: bool = True,
        release: str = "0.32.0",
        extension: bool = False,
        max_model_len: int = 4096,
        token_delay_s: float = 0.0,
        corrupt: Corrupt | None = None,
        experts: bool = False,
        tokenizer: Path | None = None,
        lora: bool = True,
    ) -> None:
        self.processed, self.scale_out, self.dev_mode = processed, scale_out, dev_mode
        self.release, self.extension = release, extension
        """Version of vLLM, where 0.26 has no routes for its weights, and insitu's methods in its workers."""
        self.max_model_len, self.corrupt = max_model_len, corrupt
        self.words = None if tokenizer is None else Tokenizer.from_file(str(tokenizer))
        """Of /detokenize; None = it has no such route."""
        self.lora = lora
        """VLLM_ALLOW_RUNTIME_LORA_UPDATING=True: it has the routes of adapters."""
        self.experts = experts
        """--enable-return-routed-experts: replies have `chosen_experts`."""
        self.sampler = FakeSampler(vocab_size, label="default", token_delay_s=token_delay_s)
        self.url = ""
        self.cleared = 0
        """Pauses that cleared its caches, as they do without clear_cache=false."""
        self.salts: list[str | None] = []
        """`cache_salt` of every generation on the generate route."""
        self.headers: list[Mapping[str, str]] = []
        """Of every generation, in order of arrival."""
        self.busy = 0
        """Generations to refuse with `busy_status` before the next is served."""
        self.busy_status = 503
        self._tasks: set[asyncio.Task[Job]] = set()
        self.packs = False
        """As on a CPU: some tensors are packed away and reported as empty."""
        self.loads_fail = False
        self.refusals = 0
        """Reloads to refuse before the next succeeds."""
        self.loads_nothing = False
        """A reload is answered as done and changes nothing."""
        self.skips = ""
        """Of a reload, the parameter that keeps what it held."""
        self.spoils = ""
        """Of a reload, the parameter that holds something else afterwards."""
        self.shards = False
        """It holds every tensor in another form than files have, so no sum is that of the files."""
        self.away = False
        """Every call is cut off, as of a server that is being started."""
        self.hangs: set[str] = set()
        """Routes that never answer."""
        self.sleeping = False
        self.workers = 1
        """GPUs that one engine says it computes on."""
        self.data_parallel = 1
        """Engines behind its address."""
        self.adapters: dict[str, ChanceModel] = {}
        self.memory: dict[str, Mapping[str, StoredTensor]] = {}
        """What handles of shared memory stand for."""
        self.broadcast: asyncio.Queue[Mapping[str, StoredTensor]] = asyncio.Queue()
        """What a trainer sends; an update waits for it as NCCL does."""
        self.transfers: list[Mapping[str, Any]] = []
        """Bodies of the weight-transfer routes, in order."""
        self.sums = served_sums(chance_tensors("start"))
        """Of its parameters, by name; those of a real server have more than one shard."""

    def restart(self) -> None:
        """The process dies and comes back with the weights it was started with: connections break."""
        self.adapters.clear()
        self.sleeping = False
        self.sampler.resume()
        self.sampler.label, self.sums = "default", served_sums(chance_tensors("start"))
        for task in list(self._tasks):
            task.cancel()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        if self.words is not None:
            app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/version", self._version)
        app.router.add_get("/health", self._health)
        if self.dev_mode and not self._old:
            app.router.add_get("/weight_info", self._weight_info)
            app.router.add_post("/update_weight_version", self._update_version)
            app.router.add_post("/weight_checker", self._checker)
        if self.dev_mode:
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
            app.router.add_get("/is_paused", self._is_paused)
            app.router.add_post("/reset_prefix_cache", self._reset)
            app.router.add_post("/collective_rpc", self._rpc)
            if self.lora:
                app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
                app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
            app.router.add_post("/sleep", self._sleep)
            app.router.add_get("/get_world_size", self._world_size)
            app.router.add_post("/init_weight_transfer_engine", self._transfer_init)
            app.router.add_post("/start_weight_update", self._transfer_start)
            app.router.add_post("/update_weights", self._transfer_update)
            app.router.add_post("/finish_weight_update", self._transfer_finish)
            app.router.add_post("/wake_up", self._wake)
            app.router.add_get("/is_sleeping", self._is_sleeping)
        app.on_response_prepare.append(self._hang)
        return app

    @property
    def _old(self) -> bool:
        return self.release.startswith("0.26")

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, http: web.Request) -> web.Response:
        return _json({"version": self.release})

    async def _hang(self, http: web.Request, _: web.StreamResponse) -> None:
        if http.path in self.hangs:
            await asyncio.Event().wait()
        if self.away and http.transport is not None:
            http.transport.abort()

    async def _models(self, http: web.Request) -> web.Response:
        cards = [{"id": name, "max_model_len": self.max_model_len} for name in ("policy", *self.adapters)]
        return _json({"object": "list", "data": cards})

    async def _detokenize(self, http: web.Request) -> web.Response:
        ids = (await http.json())["tokens"]
        if self.words is None or max(ids) >= self.sampler.model.vocab_size:
            return _error(400, "Token id is out of range")
        return _json({"prompt": self.words.decode(ids, skip_special_tokens=False)})

    async def _load_adapter(self, http: web.Request) -> web.Response:
        body = await http.json()
        if not body.keys() >= {"lora_name", "lora_path"}:
            return _error(400, "2 validation errors: field required")
        if body["lora_name"] in self.adapters:
            return _error(400, "already been loaded")
        folder = Path(body["lora_path"])
        if not await asyncio.to_thread(_is_adapter, folder):
            return _error(500, "the adapter could not be loaded")
        held = total(sums_of(read_folder(folder)))
        self.adapters[body["lora_name"]] = ChanceModel(self.sampler.model.vocab_size, held)
        return _words(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _unload_adapter(self, http: web.Request) -> web.Response:
        if self.adapters.pop((await http.json())["lora_name"], None) is None:
            return _error(404, "cannot be found")
        return _words("Success")

    async def _run(
        self, http: web.Request, name: str, prompt: object, params: Mapping[str, Any], model: str
    ) -> Job | None:
        """The finished job; None when the server is too busy to begin one."""
        self.headers.append(http.headers.copy())
        if self.busy:
            self.busy -= 1
            return None
        ids = prompt if isinstance(prompt, list) else []
        if not ids or max(ids) >= self.sampler.model.vocab_size:
            raise web.HTTPBadRequest(text='{"error":{"message":"Token id out of vocabulary"}}')
        if len(ids) + 1 > self.max_model_len:
            raise web.HTTPBadRequest(text='{"error":{"message":"The prompt is too long"}}')
        if model not in ("policy", *self.adapters):
            raise web.HTTPNotFound(text='{"error":{"message":"The model does not exist"}}')
        job = Job(
            name=name,
            prompt=ids,
            model=self.adapters.get(model),
            max_tokens=min(params["max_tokens"], self.max_model_len - len(ids)),
            temperature=params["temperature"],
            seed=params.get("seed") or 0,
            stop_ids=frozenset(params.get("stop_token_ids") or ()),
        )
        task = asyncio.ensure_future(self.sampler.run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if http.transport is not None:
                http.transport.abort()
            raise
        finally:
            task.cancel()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return _error(403, "start the server with --enable-scale-out")
        body = await http.json()
        params = body["sampling_params"]
        self.salts.append(body.get("cache_salt"))
        name = "generate-tokens-" + http.headers.get("X-Request-Id", "none")
        job = await self._run(http, name, body["token_ids"], params, body["model"])
        if job is None:
            return _error(self.busy_status, "busy")
        content: list[dict[str, object]] = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            if not self._old
            else {"token": "x", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(job.ids, self._logprobs(job), strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": job.finish,
            "stop_reason": job.ids[-1] if job.finish == "stop" else None,
            "token_ids": job.ids,
            "weight_versions": job.spans,
            "logprobs": None if params.get("logprobs") is None else {"content": content},
        }
        if self.experts:
            start = params.get("routed_experts_prompt_start", 0)
            choice["routed_experts"] = npy(chosen_experts([*job.prompt, *job.ids])[start:-1])
        if self._old:
            del choice["weight_versions"]
        prompt = job.prompt if body.get("return_token_ids") else None
        return self._answer({"request_id": name, "prompt_token_ids": prompt, "choices": [choice]})

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        name = "cmpl-" + http.headers.get("X-Request-Id", "none")
        job = await self._run(http, name, body["prompt"], body, body["model"])
        if job is None:
            return _error(self.busy_status, "busy")
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": job.finish,
            "logprobs": {"token_logprobs": self._logprobs(job)},
            "token_ids": job.ids if body.get("return_token_ids") else None,
            "prompt_token_ids": job.prompt if body.get("return_token_ids") else None,
        }
        return self._answer({"id": name, "object": "text_completion", "choices": [choice]})

    def _logprobs(self, job: Job) -> list[float]:
        return job.processed if self.processed else job.raw

    def _answer(self, answer: dict[str, Any]) -> web.Response:
        changed = self.corrupt(answer) if self.corrupt is not None else answer
        body = changed if isinstance(changed, bytes) else orjson.dumps(changed)
        return web.Response(body=body, content_type="application/json")

    async def _abort(self, http: web.Request) -> web.Response:
        self.sampler.abort((await http.json())["request_ids"])
        return web.Response()

    async def _pause(self, http: web.Request) -> web.Response:
        await self.sampler.pause(http.query.get("mode", "abort"))
        self.cleared += http.query.get("clear_cache") != "false"
        return _json({"status": "paused"})

    async def _resume(self, http: web.Request) -> web.Response:
        self.sampler.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, http: web.Request) -> web.Response:
        return _json({"is_paused": self.sampler.paused})

    async def _weight_info(self, http: web.Request) -> web.Response:
        return _json({"weight_version": self.sampler.label})

    async def _update_version(self, http: web.Request) -> web.Response:
        self.sampler.label = (await http.json())["new_version"]
        return _json({"success": True, "new_version": self.sampler.label})

    def _worker(self, label: str | None = None, with_sums: str = "") -> Mapping[str, object] | None:
        """What a worker with engines.vllm_worker.InsituWorker answers."""
        if label is not None:
            self.sampler.label = label
            return None
        said: dict[str, object] = {"label": self.sampler.label, "rank": 0}
        return said | ({"sums": self._held_sums()} if with_sums else {})

    async def _checker(self, http: web.Request) -> web.Response:
        held = self._held_sums()
        return _json({"checksums": {f"dp0:pp0:pcp0:tp0:{name}": one for name, one in held.items()}})

    def _held_sums(self) -> Mapping[str, str]:
        held = {name: _EMPTY if self.packs and "_proj" in name else held for name, held in self.sums.items()}
        if self.shards:
            held = {name: f"part of {one}" for name, one in held.items()}
        return held

    async def _reset(self, http: web.Request) -> web.Response:
        self.sampler.flush()
        return _json({"success": True})

    async def _rpc(self, http: web.Request) -> web.Response:
        body = await http.json()
        if self.extension and body["method"].startswith("insitu_"):
            return _json({"results": [self._worker(**body["kwargs"])]})
        self.refusals, refused = max(0, self.refusals - 1), self.refusals > 0
        if body["method"] != "reload_weights" or self.loads_fail or refused:
            return _error(500, "EngineCore encountered an issue")
        if not self.loads_nothing:
            self._load(Path(body["kwargs"]["weights_path"]))
        return _json({"results": [None]})

    def _load(self, folder: Path) -> None:
        self.sampler.load(folder)
        self._hold(read_folder(folder))

    def _hold(self, tensors: Mapping[str, StoredTensor]) -> None:
        kept = {self.skips: self.sums[self.skips]} if self.skips else {}
        spoiled = {self.spoils: "spoiled"} if self.spoils else {}
        self.sums = served_sums(tensors) | kept | spoiled

    async def _world_size(self, http: web.Request) -> web.Response:
        engines = 1 if http.query.get("include_dp") == "false" else self.data_parallel
        return _json({"world_size": self.workers * engines})

    async def _transfer_init(self, http: web.Request) -> web.Response:
        self.transfers.append(await http.json())
        if "nccl_unique_id_b64" in self.transfers[-1]["init_info"]:
            await self.broadcast.get()
        return _json({"message": "Weight transfer initialized"})

    async def _transfer_start(self, http: web.Request) -> web.Response:
        self.transfers.append({"start": self.sampler.paused})
        return _json({"message": "Weight update started"})

    async def _transfer_update(self, http: web.Request) -> web.Response:
        info = (await http.json())["update_info"]
        self.transfers.append(info)
        handles = info.get("ipc_handles_pickled")
        held = self.memory[handles] if handles else await self.broadcast.get()
        if [*info["names"]] != [*held] or len(info["dtype_names"]) != len(held):
            return _error(500, "the tensors are not those that were announced")
        self.sampler.model = ChanceModel(self.sampler.model.vocab_size, total(sums_of(held)))
        self._hold(held)
        return _json({"message": "Weights updated"})

    async def _transfer_finish(self, http: web.Request) -> web.Response:
        self.sampler.label = (await http.json())["weight_version"]
        return _json({"message": "Weight update finished"})

    async def _sleep(self, http: web.Request) -> web.Response:
        await self.sampler.pause(http.query.get("mode", "abort"))
        self.sleeping = True
        return _json({"status": "sleeping", "level": int(http.query.get("level", "1"))})

    async def _wake(self, http: web.Request) -> web.Response:
        self.sleeping = False
        return _json({"status": "awake", "tags": None})

    async def _is_sleeping(self, http: web.Request) -> web.Response:
        return _json({"is_sleeping": self.sleeping})


def chosen_experts(ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Of 3 layers, 2 of 200 experts for each token: a function of its id and its place."""
    places = np.arange(len(ids), dtype=np.int64) * 7 + np.array(ids, dtype=np.int64) * 31
    return ((places[:, None, None] + np.arange(6).reshape(3, 2) * 11) % 200).astype(np.uint8)


def npy(array: npt.NDArray[Any]) -> str:
    """As vLLM writes arrays into its JSON (utils/serial_utils.py `numpy2base64`)."""
    out = io.BytesIO()
    np.save(out, array)
    return base64.b64encode(out.getvalue()).decode()


def _is_adapter(folder: Path) -> bool:
    return all((folder / name).exists() for name in ("adapter_config.json", "adapter_model.safetensors"))


def _json(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _words(text: str) -> web.Response:
    """As the real server sends them: neither JSON nor said to be text."""
    return web.Response(body=text.encode(), content_type="application/octet-stream")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "type": "Error", "code": status}}, status)


@asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve `app` on loopback; its origin. Handlers are cancelled when their client leaves."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve_vllm(vocab_size: int, **options: Any) -> AsyncIterator[FakeVllm]:
    """A fake server on a free loopback port."""
    fake = FakeVllm(vocab_size, **options)
    async with listening(fake.app()) as origin:
        fake.url = origin
        yield fake
