"""EmbeddedCore: continuous-batching sampler in torch fp32 on CPU, inside the learner's process.

Invariant: a request's ids and logprobs, bit for bit, are a function of the weights, its prompt, its
parameters and its key; not of other requests, cache hits, prefill chunks or arrival order. The owner calls
`submit`, then `step` until `busy` is False; results come through each request's callback, inside `step`. Not
thread-safe.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from insitu.engines.base import Receipt
from insitu.errors import EngineError
from insitu.types import CallTimes, Finish, Generation, IntArray, RequestKey, SamplingParams
from insitu_train.embedded.architecture import ModelConfig, read_architecture
from insitu_train.embedded.attention import Layout, round_up
from insitu_train.embedded.batch_invariance import verify_batch_invariance
from insitu_train.embedded.forward import ROWS, CachedForward, PrefillTile
from insitu_train.embedded.model_files import read_tensors
from insitu_train.embedded.pages import PAGE, TILE, TILES, Page, PagePool, tile_names
from insitu_train.embedded.slots import DecodeSlots, stream
from insitu_train.embedded.weights import SamplerWeights, checksum_of

_PATIENCE = 4
"""Prefill passes that decoding rows wait for: a step with more rows costs little more."""

Done = Callable[[Generation | EngineError], None]


class Sampled(Protocol):
    """A model that the engine samples, such as the trainer's."""

    @property
    def config(self) -> ModelConfig: ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the current weights by their names in a checkpoint; they are copied."""
        ...


class SampledFolder:
    """Implements Sampled for a model folder, read each time."""

    def __init__(self, folder: Path) -> None:
        """Read config.json. Raises EngineError for a model that the engine does not run."""
        self._folder, self.config = folder, read_architecture(folder)

    def tensors(self) -> Mapping[str, Tensor]:
        return read_tensors(self._folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Shape of the engine; results may depend on `threads` only."""

    max_rows: int = 32
    """Concurrent requests; a multiple of 4."""
    max_context: int = 2048
    """Prompt plus sampled tokens of one request."""
    threads: int = 1
    """Torch threads while the engine runs, set again at each step."""
    prefill_tiles: int = 8
    """Most 16-token tiles of prompt per forward pass."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of products, keys and values. Results are the same in any batch in float32 only."""
    cache_tokens: int = 65536
    """Tokens that the prefix cache holds besides what `max_rows` requests may need; 0 = no cache."""

    @property
    def pages(self) -> int:
        """Pages of keys and values: those that all requests together may need, and the cache."""
        return self.max_rows * round_up(self.max_context, PAGE) // PAGE + self.cache_tokens // PAGE


@dataclass(slots=True, eq=False)
class _Request:
    """One request: waiting, prefilling (slot set), decoding (`filled` == prompt - 1)."""

    number: int
    prompt: IntArray
    params: SamplingParams
    uniform: npt.NDArray[np.float64]
    names: list[bytes]
    done: Done
    limit: int
    """Most tokens to sample: max_tokens or what the context leaves."""
    slot: int = -1
    pages: list[Page] = field(default_factory=list)
    filled: int = 0
    """Prompt tiles whose keys and values are in `pages`."""
    count: int = 0
    """Tokens sampled."""
    first_s: float | None = None
    cached: int = 0


@dataclass(slots=True)
class _EngineStats:
    """Counters since the start."""

    steps: int = 0
    decoded: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens computed, padding included."""
    reused: int = 0
    """Prompt tokens taken from the prefix cache."""
    shared: int = 0
    """Decode steps that read a page once for several requests."""


class EmbeddedCore:
    """Continuous-batching sampler; `refresh` loads the model's current weights under a new version."""

    def __init__(self, model: Sampled, options: EngineOptions, *, version: int = 0) -> None:
        """Create the sampler; raise EngineError for invalid options or a failed self-check."""
        _check_options(model.config, options)
        self.options = options
        self.stats = _EngineStats()
        self._model = model
        self._pin_threads()
        tensors = model.tensors()
        with torch.inference_mode():
            self._pool = PagePool(model.config, options.pages, dtype=getattr(torch, options.dtype))
            weights = self._copied(tensors)
            self._forward = CachedForward(weights, self._pool, options.max_rows, options.prefill_tiles)
        self._receipt = Receipt(version=version, checksum=checksum_of(tensors))
        self._numbers = itertools.count(1)
        self._waiting: deque[_Request] = deque()
        self._prefilling: list[_Request] = []
        self._settled: deque[tuple[Done, Generation | EngineError]] = deque()
        self._decoding: list[_Request] = []
        self._free = list(range(options.max_rows))
        self._paused = False
        self._held: list[_Request] = []
        """Requests that came in during a pause."""
        self._rows = DecodeSlots(self._forward, options.max_context)
        self._slots = np.zeros(0, np.int64)
        """Slots of `_decoding`, in its order."""
        self._layout: Layout | None = None
        """Pages of `_decoding`; None = to be made again, as after `_moves` more moves."""
        self._moves = 0
        self._passes = 0
        """Prefill passes since the last decode step."""
        verify_batch_invariance(self._forward, round_up(options.max_context, PAGE) // PAGE)

    # ------------------------------------------------------------------ control

    @property
    def receipt(self) -> Receipt:
        """Receipt of the current weights."""
        return self._receipt

    @property
    def shapes_pinned(self) -> bool:
        """Whether the self-check pinned every shape (slower)."""
        return self._forward.fixed

    @property
    def keeps_sampled(self) -> bool:
        """Whether sampled tokens' keys and values may be cached."""
        return self._forward.unified

    @property
    def cache(self) -> PagePool:
        return self._pool

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def busy(self) -> bool:
        """True when `step` has something to do."""
        return bool(self.running or self._waiting)

    def pause(self) -> None:
        """Hold requests that come from now on; earlier ones are finished. Idle when `busy` is False."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._waiting += self._held
        self._held.clear()

    def refresh(self, version: int, checksum: str = "") -> Receipt:
        """Copy the model's current weights. Raises EngineError while a request runs.

        checksum: of these weights, if the caller knows it; empty = it is computed.
        """
        self._check_idle()
        tensors = self._model.tensors()
        try:
            self._forward.weights.update(tensors)
        except BaseException:
            self._forward.weights.layers.clear()  # some are old and some new
            raise
        return self._taken(tensors, version, checksum)

    def load(self, folder: Path, version: int) -> Receipt:
        """Sample with the weights of a folder from now on. Raises EngineError for another model's."""
        found = SampledFolder(folder)
        if found.config != self._model.config:
            raise EngineError(f"{folder} holds another model: {found.config}")
        self._check_idle()
        tensors = found.tensors()
        self._forward.weights = self._copied(tensors)  # not in place: the files may lack something
        return self._taken(tensors, version, "")

    def _check_idle(self) -> None:
        if self.running:
            raise EngineError(f"cannot load weights while {self.running} requests run: pause first")

    def _taken(self, tensors: Mapping[str, Tensor], version: int, checksum: str) -> Receipt:
        self._pool.clear()
        self._receipt = Receipt(version=version, checksum=checksum or checksum_of(tensors))
        return self._receipt

    def _copied(self, tensors: Mapping[str, Tensor]) -> SamplerWeights:
        length, dtype = self.options.max_context, getattr(torch, self.options.dtype)
        return SamplerWeights(self._model.config, tensors, length, dtype)

    # ------------------------------------------------------------------ requests

    def submit(self, ids: IntArray, params: SamplingParams, key: RequestKey, done: Done) -> int:
        """Queue a request; `done` gets its Generation, or an EngineError, inside a later `step`.

        ids [n] int32, n >= 1. Returns a number for `abort`. Raises EngineError for no ids, ids outside the
        vocabulary, or a prompt that leaves no room in the context.
        """
        room = self.options.max_context - len(ids)
        if not self._forward.weights.layers:
            raise EngineError("the last publication failed midway: no weights are held")
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self._model.config.vocab_size:
            raise EngineError(f"a prompt needs ids between 0 and {self._model.config.vocab_size - 1}")
        if room < 1:
            raise EngineError(
                f"context overflow: a prompt of {len(ids)} tokens leaves no room"
                f" in a context of {self.options.max_context}"
            )
        if params.max_tokens < 1 or not (0 <= params.temperature < math.inf):
            raise EngineError(f"max_tokens={params.max_tokens} temperature={params.temperature} is not valid")
        limit = min(params.max_tokens, room)
        request = _Request(
            number=next(self._numbers),
            prompt=ids,
            params=params,
            uniform=stream(key, limit),
            names=tile_names(ids[:-1]),
            done=done,
            limit=limit,
        )
        (self._held if self._paused else self._waiting).append(request)
        return request.number

    def abort(self, number: int) -> bool:
        """End a request with finish `abort` and the tokens so far; return False if it is unknown."""
        for request in [*self._held, *self._waiting, *self._prefilling, *self._decoding]:
            if request.number == number:
                self._end(request, "abort")
                self._deliver()
                return True
        return False

    def step(self) -> None:
        """Admit, run one prefill pass and one decode step, then call back for ended requests."""
        self._pin_threads()
        self.stats.steps += 1
        with torch.inference_mode():
            self._admit()
            if self._prefilling:
                self._prefill()
                self._passes += 1
            if self._decoding and (not self._prefilling or self._passes >= _PATIENCE):
                self._decode()
                self._passes = 0
        self._deliver()

    def _pin_threads(self) -> None:
        if torch.get_num_threads() != self.options.threads:
            torch.set_num_threads(self.options.threads)

    def _admit(self) -> None:
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = self._free.pop()
            self._prefilling.append(request)

    def _prefill(self) -> None:
        """Run one pass over the next tiles, oldest request first, without computing a tile twice."""
        jobs: list[PrefillTile] = []
        owners: list[tuple[_Request, bytes]] = []
        made: set[bytes] = set()
        for request in self._prefilling:
            self._reuse(request)
            for index in range(request.filled, len(request.names)):
                name = request.names[index]
                if len(jobs) == self.options.prefill_tiles or name in made:
                    break
                made.add(name)
                jobs.append(self._tile(request, index))
                owners.append((request, name))
        if jobs:
            self._forward.prefill(jobs)
            self.stats.prefilled += len(jobs) * TILE
        for job, (request, name) in zip(jobs, owners, strict=True):
            self._filled(request, job.index, name)
        ready = [r for r in self._prefilling if r.filled == len(r.names)]
        self._prefilling = [r for r in self._prefilling if r.filled < len(r.names)]
        for request in ready:
            self._start_decoding(request)

    def _tile(self, request: _Request, index: int) -> PrefillTile:
        self._room(request, index)
        ids = np.zeros(TILE, np.int64)
        piece = request.prompt[:-1][index * TILE : (index + 1) * TILE]
        ids[: len(piece)] = piece
        return PrefillTile(request.pages, index, ids)

    def _room(self, request: _Request, index: int) -> None:
        """Take a page for a tile that has none."""
        if index // TILES == len(request.pages):
            request.pages.append(self._pool.take())

    def _reuse(self, request: _Request) -> None:
        """Take tiles of the prompt that are held: complete pages as they are, others as copies."""
        names, pool, first = request.names, self._pool, request.filled
        while request.filled < len(names):
            index = request.filled
            last = index + TILES - 1
            if index % TILES == 0 and self._complete(request, last) and (found := pool.find(names[last])):
                request.pages.append(pool.share(found))
                request.filled += TILES
            elif pool.find(names[index]):
                self._room(request, index)  # which may give up the page that was found
                if (source := pool.find(names[index])) is None:
                    break
                pool.copy(source, request.pages[-1], index % TILES)
                self._filled(request, index, names[index])
            else:
                break
        self.stats.reused += (request.filled - first) * TILE
        request.cached += (request.filled - first) * TILE

    def _complete(self, request: _Request, index: int) -> bool:
        """Return whether the prompt fills the tile: its page is never written again."""
        return (index + 1) * TILE < len(request.prompt)

    def _filled(self, request: _Request, index: int, name: bytes) -> None:
        """Note a tile; where another request has completed the same page, share that one."""
        request.filled = index + 1
        own = request.pages[index // TILES]
        if not self.options.cache_tokens:
            return
        self._pool.name(own, index % TILES, name)
        held = self._pool.find(name)
        if index % TILES == TILES - 1 and self._complete(request, index) and held is not own and held:
            request.pages[-1] = self._pool.share(held)
            self._pool.release([own])

    def _start_decoding(self, request: _Request) -> None:
        """Start decoding; the last prompt token is the first decode input."""
        self._pool.show(request.pages, len(request.prompt) - 1)
        self._rows.start(request.slot, request.prompt, request.params.temperature, request.uniform)
        self._decoding.append(request)
        self._layout = None

    def _decode(self) -> None:
        """Sample one token per decoding request; end those that are complete."""
        layout = self._arranged()
        self.stats.shared += layout.most > 1
        self.stats.decoded += len(self._decoding)
        ids, logprobs = self._rows.step(self._slots, layout)
        for request, token, logprob in zip(list(self._decoding), ids, logprobs, strict=True):
            request.count += 1
            if request.count == 1:
                request.first_s = time.time()
            if not math.isfinite(logprob):
                line = f"version {self._receipt.version} of the weights gives logits that are not finite"
                self._settle(request, EngineError(line))
            elif token in request.params.stop_ids:
                self._end(request, "stop")
            elif request.count == request.limit:
                self._end(request, "length")

    def _arranged(self) -> Layout:
        """Return the layout of the next step, with a page for the token of every request."""
        if self._layout is None:
            self._slots = np.array([request.slot for request in self._decoding])
            self._pool.compact()
        wanted = self._rows.positions(self._slots) // PAGE
        for at in np.flatnonzero(wanted == [len(request.pages) for request in self._decoding]):
            self._decoding[at].pages.append(self._pool.take())
            self._layout = None
        if self._layout is None or self._moves != self._pool.moves:
            self._layout = self._forward.layout([request.pages for request in self._decoding])
            self._moves = self._pool.moves
        return self._layout

    def _end(self, request: _Request, finish: Finish) -> None:
        ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        if request.count:
            ids, logprobs = self._rows.result(request.slot)
            self._keep_sampled(request, ids)
        runs = ((0, self._receipt.version),)
        times = CallTimes(first_s=request.first_s, cached=min(request.cached, len(request.prompt)))
        self._settle(
            request, Generation(ids=ids, logprobs=logprobs, finish=finish, version_runs=runs, times=times)
        )

    def _keep_sampled(self, request: _Request, ids: IntArray) -> None:
        """Name the full tiles that sampling completed: the next call of a rollout continues them."""
        if not (self._forward.unified and self.options.cache_tokens):
            return
        first = (len(request.prompt) - 1) // TILE
        held = np.concatenate([request.prompt[first * TILE :], ids[:-1]])
        full = held[: len(held) // TILE * TILE]
        parent = request.names[first - 1] if first else b""
        for index, name in enumerate(tile_names(full, parent), first):
            self._pool.name(request.pages[index // TILES], index % TILES, name)

    def _deliver(self) -> None:
        """Call back outside inference mode, when the engine's state is consistent."""
        while self._settled:
            done, result = self._settled.popleft()
            done(result)

    def _settle(self, request: _Request, result: Generation | EngineError) -> None:
        """Remove a request, free its slot, and queue its callback."""
        self._settled.append((request.done, result))
        for queue in (self._held, self._waiting, self._prefilling, self._decoding):
            if request in queue:
                queue.remove(request)
        self._layout = None
        if request.slot >= 0:
            self._pool.release(request.pages)
            request.pages = []
            self._free.append(request.slot)
            request.slot = -1


def _check_options(config: ModelConfig, options: EngineOptions) -> None:
    limit = config.max_position_embeddings
    if not 2 <= options.max_context <= limit:
        raise EngineError(f"max_context={options.max_context} must be between 2 and the model's {limit}")
    if options.max_rows < ROWS or options.max_rows % ROWS:
        raise EngineError(f"max_rows={options.max_rows} must be a multiple of {ROWS}")
    if min(options.threads, options.prefill_tiles) < 1 or options.cache_tokens < 0:
        raise EngineError("threads and prefill_tiles must be at least 1, cache_tokens at least 0")
