"""What a fake engine server does behind its HTTP routes: a model of chance, jobs, pause modes, weight labels.

The model is a softmax over logits that follow from the last ids and the weights by hash, so temperature,
seeds and changed weights mean what they mean at a real server. Jobs run token by token on the event loop and
can be aborted, frozen or cut. Callers: fake_vllm, fake_sglang.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from insitu.errors import EngineError

FloatRow = np.ndarray[tuple[int], np.dtype[np.float64]]
REACH = 3
"""How many last ids the model looks at."""


def folder_digest(folder: Path) -> str:
    """Return the hex SHA-256 over name and bytes of every safetensors file, in name order."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} contains no safetensors file")
    total = hashlib.sha256()
    for path in files:
        total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


class ChanceModel:
    """A next-token distribution that follows from `weights` and the last ids."""

    def __init__(self, vocab_size: int, weights: str) -> None:
        self.vocab_size, self.weights = vocab_size, weights

    def logits(self, ids: Sequence[int]) -> FloatRow:
        name = f"{self.weights}\0{list(ids[-REACH:])}".encode()
        random = np.random.default_rng(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big"))
        return random.normal(scale=2.5, size=self.vocab_size)

    def logprobs(self, ids: Sequence[int], temperature: float) -> FloatRow:
        scaled = self.logits(ids) / temperature
        scaled -= scaled.max()
        row: FloatRow = scaled - np.log(np.exp(scaled).sum())
        return row


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One request under way, and what it has sampled so far."""

    name: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop_ids: frozenset[int] = frozenset()
    model: ChanceModel | None = None
    """Of an adapter; None = the sampler's own, whichever it is then."""
    ids: list[int] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    """Logprobs of the sampled distribution."""
    raw: list[float] = field(default_factory=list)
    """Logprobs before the temperature."""
    labels: list[str] = field(default_factory=list)
    """Weight label per token."""
    finish: str = ""
    """stop, length or abort; empty while it runs."""

    @property
    def spans(self) -> list[dict[str, object]]:
        """Runs of equal labels as {version, start, end}."""
        found: list[dict[str, object]] = []
        for index, label in enumerate(self.labels):
            if not found or found[-1]["version"] != label:
                found.append({"version": label, "start": index, "end": index})
            found[-1]["end"] = index + 1
        return found


class FakeSampler:
    """The scheduler of a fake server."""

    def __init__(
        self, vocab_size: int, *, label: str, token_delay_s: float = 0.0, max_tokens: int = 1 << 16
    ) -> None:
        self.label, self.token_delay_s, self.max_context = label, token_delay_s, max_tokens
        self.model = ChanceModel(vocab_size, "start")
        self.jobs: list[Job] = []
        """Under way."""
        self.received: list[Job] = []
        """Every job, in order of arrival."""
        self.aborted: list[str] = []
        self.flushes = 0
        self._running = asyncio.Event()
        self._running.set()
        self._admitting = asyncio.Event()
        self._admitting.set()

    @property
    def paused(self) -> bool:
        return not self._admitting.is_set()

    async def run(self, job: Job) -> Job:
        """Sample until the job ends. Cancelling the coroutine aborts it."""
        self.received.append(job)
        await self._admitting.wait()
        self.jobs.append(job)
        draws = np.random.default_rng(job.seed)
        try:
            while not job.finish:
                await asyncio.sleep(self.token_delay_s)
                await self._running.wait()
                if not job.finish:
                    self._step(job, draws)
        except asyncio.CancelledError:
            self.aborted.append(job.name)
            raise
        finally:
            self.jobs.remove(job)
        return job

    def _step(self, job: Job, draws: np.random.Generator) -> None:
        seen = job.prompt + job.ids
        model = job.model or self.model
        row = model.logprobs(seen, job.temperature)
        token = int(np.argmax(row + draws.gumbel(size=len(row))))
        job.ids.append(token)
        job.processed.append(float(np.float32(row[token])))
        job.raw.append(float(np.float32(model.logprobs(seen, 1.0)[token])))
        job.labels.append(self.label)
        if token in job.stop_ids:
            job.finish = "stop"
        elif len(job.ids) >= job.max_tokens:
            job.finish = "length"

    def abort(self, names: Collection[str] | None) -> int:
        """End jobs by name, or all of them for None; says how many."""
        ended = [job for job in self.jobs if names is None or job.name in names]
        for job in ended:
            job.finish = "abort"
            self.aborted.append(job.name)
        return len(ended)

    async def pause(self, mode: str) -> None:
        """`wait`: return when all have ended; `abort`: end them; `keep`: freeze them."""
        self._admitting.clear()
        if mode == "keep":
            self._running.clear()
            return
        if mode == "abort":
            self.abort(None)
        while self.jobs:  # noqa: ASYNC110 - a fake; jobs end within a few steps of the loop
            await asyncio.sleep(0.002)

    def resume(self) -> None:
        self._running.set()
        self._admitting.set()

    def load(self, folder: Path) -> None:
        """Other files give another model."""
        self.model = ChanceModel(self.model.vocab_size, folder_digest(folder))

    def flush(self) -> None:
        self.flushes += 1
