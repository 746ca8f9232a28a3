"""The learner from the controller's side: a child process that trains and samples.

    async with Learner.start(spec) as learner:
        learner.engine                          # a server for an EngineSet; none with `samples=False`
        result = await learner.step(plan)       # trains; the engine keeps its weights
        await learner.save(folder)              # begins a checkpoint, `written` waits for it
        await learner.publish(result.version)   # now the engine has them; weights/files.py for other engines

Every wait has a deadline. When the child dies, pending and later calls fail with one line that ends with its
last standard error. Leaving the context ends the child; cancellation kills it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from insitu.engines.base import Receipt
from insitu.errors import EngineError, TrainError
from insitu.storage.temp_dirs import scratch_folder
from insitu_train.channel.child import Child
from insitu_train.channel.rpc import Frame, Meta, RpcClient
from insitu_train.learner.engine import LearnerEngine
from insitu_train.learner.process import LearnerSpec, absolute, spawn_learner
from insitu_train.learner.serialization import decode_result, encode_plan
from insitu_train.options import StepResult
from insitu_train.plan.step import StepPlan
from insitu_train.weights.files import ExportRequest, ExportResult

log = logging.getLogger(__name__)


class Learner:
    """A learner process; use `Learner.start`."""

    _child: Child
    _channel: RpcClient

    def __init__(self, spec: LearnerSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._engine: LearnerEngine | None = None
        self._lives = 0
        self.version = 0
        """Policy version of the trainer's weights; the engine's may be older."""
        self.weights = ""
        """Hex digest over all the trainer's tensors in name order."""
        self.reference = ""
        """Checksum of the reference policy; empty without one."""
        self.hosts = ""
        """Which ranks take part; empty where all are here."""
        self.waiting = ""
        """Hosts that came late and could take part in another life."""
        self.probe_gap = 0.0
        """Largest |trainer - sampler| log-probability of the start-up probe."""

    @property
    def engine(self) -> LearnerEngine:
        """The sampler, with the last published weights. Raises EngineError if there is none."""
        if self._engine is None:
            raise EngineError("this learner has no engine: a server samples")
        return self._engine

    def working(self) -> AbstractAsyncContextManager[None]:
        """Return the context of other work than sampling: its own engine sleeps, if it cannot do both."""
        return self._engine.working() if self._engine else contextlib.nullcontext()

    @property
    def model(self) -> Path:
        """The start model."""
        return self._spec.model

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @classmethod
    @asynccontextmanager
    async def start(cls, spec: LearnerSpec) -> AsyncIterator[Learner]:
        """Start a learner that has passed the engine probe. Raises EngineError with the child's error."""
        # Unix socket paths are limited to 107 bytes
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
        """Replace the process, dead or not; it and its engine hold the start model.

        Raises EngineError, TrainError.
        """
        if self._engine is not None:
            self._engine.fed = False
        await self._end(again=True)
        await self._begin()

    async def _begin(self) -> None:
        """Start; a child that is killed meanwhile is restarted, one that exits is not."""
        for remaining in reversed(range(self._spec.restarts + 1)):
            log = self._spec.log or self._folder / "learner.log"
            self._lives += 1
            socket = self._folder / f"learner{self._lives}"
            self._child = await spawn_learner(self._spec, socket, log, again=self._lives > 1)
            try:
                self._channel = await self._child.connect(self._spec.start_deadline_s)
                await self._attach()
            except BaseException as error:
                killed = self._child.killed
                self._child.kill_if_cancelled()
                if self._child.connected():
                    await self._channel.close()
                await self._child.end()
                if not (remaining and killed and isinstance(error, EngineError | TrainError)):
                    raise
            else:
                return

    async def _attach(self) -> None:
        if self._engine is not None:
            self._engine.use(self._channel, self._child.explain)
        elif self._spec.samples:
            limit = self._spec.call_deadline_s
            self._engine = await LearnerEngine.attach(
                self._channel, self._child.explain, call_deadline_s=limit
            )
            self._engine.one_thread = self._spec.service is None
        info = await self._call("train.info", {}, self._spec.start_deadline_s)
        self.probe_gap, self.reference = float(info.meta["probe_gap"]), str(info.meta["reference"])
        self.hosts = str(info.meta.get("hosts", ""))
        for line in info.meta["notices"]:
            log.warning("%s", line)
        self._note(info)

    async def _end(self, *, again: bool = False) -> None:
        try:
            await _request_shutdown(self._channel, again=again)
        finally:
            await self._child.end()

    def _note(self, frame: Frame) -> None:
        self.version, self.weights = int(frame.meta["version"]), str(frame.meta["weights"])
        self.waiting = str(frame.meta.get("waiting", ""))

    @property
    def alive(self) -> bool:
        return self._channel.alive

    async def death(self) -> EngineError:
        """Return how a dead learner ended."""
        return await self._child.explain(EngineError("the connection to the learner ended"))

    async def check(self) -> None:
        """Raise EngineError with the cause when the learner is dead."""
        if not self.alive:
            raise await self.death()

    async def step(self, plan: StepPlan, scores: Path | None = None) -> StepResult:
        """Train one plan; the engine keeps its weights until they are published.

        scores: file for scores of trained tokens (storage/scores.py); None = none are written.
        Raises TrainError when the trainer refused (weights unchanged) or the learner died.
        """
        meta: Meta = {"scores": absolute(scores) if scores else ""}
        async with self._failing("train.step"):
            frame = await self._channel.call(
                "train.step", meta, encode_plan(plan), deadline_s=self._spec.train.step_timeout_s
            )
        self._note(frame)
        return decode_result(frame.arrays)

    async def publish(self, version: int) -> Receipt:
        """Let the learner's own engine sample with the trainer's weights.

        Running requests finish first, under their old version. Raises TrainError.
        """
        engine = self._engine
        if engine is None:
            raise TrainError("this learner has no engine to publish to")
        frame = await self._call("train.publish", {"version": version}, self._spec.start_deadline_s)
        async with self._failing("engine.info"):
            held = await engine.recognise()
        self._note(frame)
        if (held.version, held.checksum) != (version, self.weights):
            raise TrainError(
                f"the engine's receipt is for version {held.version} with checksum {held.checksum[:12]},"
                f" published was version {version} with {self.weights[:12]}"
            )
        return held

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
        out = (await self._call("train.export", meta, self._spec.start_deadline_s)).meta
        return ExportResult(checksum=out["checksum"], tensors=out["tensors"], sent_bytes=int(out["bytes"]))

    async def transfer(self, do: str, **more: Any) -> dict[str, Any]:
        """Run the trainer's side of a publication without files (learner/transfer.py). Raises TrainError."""
        limit = self._spec.start_deadline_s
        meta: Meta = {"do": do, "deadline_s": 0.9 * limit, **more}
        return dict((await self._call("train.transfer", meta, limit)).meta)

    async def save(self, folder: Path) -> str:
        """Begin to write a checkpoint; return why the one before was not written, or empty.

        Later steps do not change it. Raises TrainError.
        """
        saving = await self._call("train.save", {"folder": absolute(folder)}, self._spec.start_deadline_s)
        return str(saving.meta["failed"])

    async def written(self) -> str:
        """Wait for the checkpoint; return why it was not written, or empty. Raises TrainError."""
        return str((await self._call("train.written", {}, self._spec.start_deadline_s)).meta["failed"])

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint, whose weights are not published yet. Raises TrainError."""
        self._note(await self._call("train.load", {"folder": absolute(folder)}, self._spec.start_deadline_s))

    async def _call(self, op: str, meta: Meta, deadline_s: float) -> Frame:
        async with self._failing(op):
            return await self._channel.call(op, meta, deadline_s=deadline_s)

    @asynccontextmanager
    async def _failing(self, op: str) -> AsyncIterator[None]:
        """Turn an EngineError into a TrainError with the cause of death, or the key of the timeout."""
        try:
            yield
        except EngineError as error:
            late = isinstance(error.__cause__, TimeoutError)
            late_error = EngineError(f"{error} (train.step_timeout_s)")
            cause = await self._child.explain(late_error if late else error)
            raise TrainError(f"{op}: {cause}") from error


async def _request_shutdown(channel: RpcClient, *, again: bool) -> None:
    """Ask for a clean exit; a dead or busy learner is ended otherwise."""
    with contextlib.suppress(EngineError):
        await channel.call("train.shutdown", {"again": again}, deadline_s=2.0)
    await channel.close()
