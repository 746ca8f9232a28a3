"""The learner as the controller sees it: a child process that trains and samples. Never imports torch.

    async with Learner.start(spec) as learner:
        learner.engine                          # engines.base.Engine; none with `samples=False`
        result = await learner.step(plan)       # trains; the engine goes on with the weights it has
        await learner.save(folder)
        await learner.publish(result.version)   # now it samples with them; weights/files.py for other engines

Every wait has a deadline. When the child dies, whatever waits or is asked for next fails with one line that
ends with the last of its standard error. Leaving the context ends the child; a cancelled one is killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from insitu.engines.base import Engine, EngineInfo, Receipt
from insitu.engines.embedded.engine import EmbeddedEngine
from insitu.engines.rpc import Frame, Meta, RpcClient
from insitu.errors import EngineError, TrainError
from insitu.storage.temp_dirs import scratch_folder
from insitu.training.learner.process import Child, LearnerSpec, absolute
from insitu.training.learner.serialization import decode_result, encode_plan
from insitu.training.options import StepResult
from insitu.training.plan.step import StepPlan
from insitu.training.weights.files import ExportRequest, ExportResult
from insitu.types import Generation, IntArray, RequestKey, SamplingParams

__all__ = ["Learner", "LearnerSpec", "StepResult"]


class _Engine:
    """The learner's engine (`engines.base.Engine`); an error says why the learner died, if it did."""

    def __init__(
        self, inner: EmbeddedEngine, explain: Callable[[EngineError], Awaitable[EngineError]]
    ) -> None:
        self._inner, self._explain = inner, explain

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    @property
    def receipt(self) -> Receipt:
        return self._inner.receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        try:
            return await self._inner.generate(ids, params, key)
        except EngineError as error:
            raise await self._explain(error) from error

    async def pause(self) -> None:
        await self._inner.pause()

    async def resume(self) -> None:
        await self._inner.resume()

    async def refresh(self) -> None:
        await self._inner.refresh()

    def replace(
        self, inner: EmbeddedEngine, explain: Callable[[EngineError], Awaitable[EngineError]]
    ) -> None:
        """The learner was started again."""
        self._inner, self._explain = inner, explain

    async def close(self) -> None:
        """Nothing to do: the learner's context owns the channel."""


class Learner:
    """See the module. Make one with `Learner.start`."""

    _child: Child
    _channel: RpcClient

    def __init__(self, spec: LearnerSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._engine: _Engine | None = None
        self._lives = 0
        self.version = 0
        """Policy version of the trainer's weights, which the engine need not hold yet."""
        self.weights = ""
        """Hex digest over all the trainer's tensors in name order."""
        self.probe_gap = 0.0
        """Largest |trainer - sampler| log-probability of the start-up probe."""

    @property
    def engine(self) -> Engine:
        """The sampler, holding the weights that were published last. Raises EngineError if it has none."""
        if self._engine is None:
            raise EngineError("this learner only trains: a server elsewhere samples")
        return self._engine

    @property
    def model(self) -> Path:
        """The folder it was started from."""
        return self._spec.model

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @classmethod
    @asynccontextmanager
    async def start(cls, spec: LearnerSpec) -> AsyncIterator[Learner]:
        """A learner that has passed the engine probe. Raises EngineError with the child's own words."""
        # Unix socket paths are limited to 107 bytes, a run directory may be deep.
        with scratch_folder() as folder:
            learner = cls(spec, folder)
            await learner._begin()
            try:
                yield learner
            except BaseException:
                learner._child.kill_if_cancelled()
                raise
            finally:
                await learner._end()

    async def restart(self) -> None:
        """A new process in the place of one that is gone; it holds the start model, and so does its engine.
        Raises EngineError, TrainError."""
        await self._end()
        await self._begin()

    async def _begin(self) -> None:
        """Come up; one that is killed meanwhile is started again, one that ends by itself is not."""
        for left in reversed(range(self._spec.restarts + 1)):
            log = self._spec.log or self._folder / "learner.log"
            self._lives += 1
            self._child = await Child.spawn(self._spec, self._folder / f"learner{self._lives}", log)
            try:
                self._channel = await self._child.connect(self._spec.start_deadline_s)
                await self._attach()
            except BaseException as error:
                killed = self._child.killed
                self._child.kill_if_cancelled()
                if self._child.connected():
                    await self._channel.close()
                await self._child.end()
                if not (left and killed and isinstance(error, EngineError | TrainError)):
                    raise
            else:
                return

    async def _attach(self) -> None:
        if self._spec.samples:
            inner = await EmbeddedEngine.attach(self._channel, call_deadline_s=self._spec.call_deadline_s)
            if self._engine is None:
                self._engine = _Engine(inner, self._child.explain)
            else:
                self._engine.replace(inner, self._child.explain)
        info = await self._call("train.info", {}, self._spec.start_deadline_s)
        self.probe_gap = float(info.meta["probe_gap"])
        self._note(info)

    async def _end(self) -> None:
        try:
            await _farewell(self._channel)
        finally:
            await self._child.end()

    def _note(self, frame: Frame) -> None:
        self.version, self.weights = int(frame.meta["version"]), str(frame.meta["weights"])

    @property
    def alive(self) -> bool:
        return self._channel.alive

    async def death(self) -> EngineError:
        """How a learner that is gone ended."""
        return await self._child.explain(EngineError("the connection to the learner ended"))

    async def check(self) -> None:
        """Raises EngineError, saying how it ended, when the learner is gone; returns at once otherwise."""
        if not self.alive:
            raise await self.death()

    async def step(self, plan: StepPlan) -> StepResult:
        """Train one plan; nothing samples with the result before it is published.

        Raises TrainError when the trainer refused (weights unchanged) or the learner died.
        """
        meta, arrays = encode_plan(plan)
        async with self._failing("train.step"):
            frame = await self._channel.call(
                "train.step", {"plan": meta}, arrays, deadline_s=self._spec.train.step_timeout_s
            )
        self._note(frame)
        return decode_result(frame.meta)

    async def publish(self, version: int) -> Receipt:
        """The learner's own engine samples with the trainer's weights from now on; requests under way end
        first, under the version they came to. Raises TrainError when it does not."""
        engine = self._engine
        if engine is None:
            raise TrainError("this learner has no engine of its own to publish to")
        frame = await self._call("train.publish", {"version": version}, self._spec.start_deadline_s)
        async with self._failing("engine.info"):
            await engine.refresh()
        self._note(frame)
        held = engine.receipt
        if (held.version, held.checksum) != (version, self.weights):
            raise TrainError(
                f"the engine's receipt is for version {held.version} with checksum {held.checksum[:12]},"
                f" published was version {version} with {self.weights[:12]}"
            )
        return held

    def training(self) -> AbstractAsyncContextManager[None]:
        """Do nothing around a training step: the trainer's own engine gives up no GPU memory."""
        return contextlib.nullcontext()

    async def export(self, wanted: ExportRequest) -> ExportResult:
        """Write the trainer's weights for an engine elsewhere. Raises TrainError."""
        meta: Meta = {
            "folder": absolute(wanted.folder),
            "version": wanted.version,
            "dtype": wanted.dtype,
            "own_head": wanted.own_head,
            "adapter": wanted.adapter,
            "base": absolute(wanted.base) if wanted.base else "",
            "delta": absolute(wanted.delta) if wanted.delta else "",
        }
        said = (await self._call("train.export", meta, self._spec.start_deadline_s)).meta
        return ExportResult(checksum=said["checksum"], tensors=said["tensors"], sent_bytes=int(said["bytes"]))

    async def transfer(self, do: str, **more: Any) -> dict[str, Any]:
        """The trainer's half of a publication without files (transfer.py). Raises TrainError."""
        limit = self._spec.start_deadline_s
        meta: Meta = {"do": do, "deadline_s": 0.9 * limit, **more}
        return dict((await self._call("train.transfer", meta, limit)).meta)

    async def save(self, folder: Path) -> None:
        """Checkpoint into `folder`, whole or not at all. Raises TrainError."""
        await self._call("train.save", {"folder": absolute(folder)}, self._spec.start_deadline_s)

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint, whose weights are to be published then. Raises TrainError."""
        self._note(await self._call("train.load", {"folder": absolute(folder)}, self._spec.start_deadline_s))

    async def _call(self, op: str, meta: Meta, deadline_s: float) -> Frame:
        async with self._failing(op):
            return await self._channel.call(op, meta, deadline_s=deadline_s)

    @asynccontextmanager
    async def _failing(self, op: str) -> AsyncIterator[None]:
        """The learner's own TrainError passes; an EngineError becomes one, with the cause of its death or the
        key that would have given it more time."""
        try:
            yield
        except EngineError as error:
            told = str(await self._child.explain(error))
            if isinstance(error.__cause__, TimeoutError) and told == str(error):
                told += " (train.step_timeout_s)" if op == "train.step" else " (train.start_timeout_s)"
            raise TrainError(f"{op}: {told}") from error


async def _farewell(channel: RpcClient) -> None:
    """Ask for a clean end; a learner that is gone or busy is ended by other means."""
    with contextlib.suppress(EngineError):
        await channel.call("train.shutdown", deadline_s=2.0)
    await channel.close()
