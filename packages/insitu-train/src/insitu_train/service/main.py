"""The learner process of a run at a training service; `training.learner.main` is the one that trains here.

    controller --engine.*--> ServiceSampler futures --\\
               --train.*---> one worker thread -+--> the service (session.py)

The main thread only reads the socket: requests are sampled while a step is trained, each by the weights that
were published last when it came in. Run as `python -m insitu_train.service.main --socket PATH --model DIR
--parent PID --train JSON --service JSON`.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from insitu import failpoint
from insitu.engines.http import stream_seed
from insitu.engines.response_checks import RawReply, checked
from insitu.errors import EngineError, InsituError, TrainError, boundary
from insitu.types import FloatArray, Generation, IntArray, SamplingParams
from insitu.types.codec import VALUES
from insitu_train.channel.calls import read_request
from insitu_train.channel.parent_watch import child_parser, follow_parent, main_of_child
from insitu_train.channel.rpc import Meta
from insitu_train.channel.server import Handler, RpcCall, RpcServer
from insitu_train.learner.serialization import decode_plan, encode_result
from insitu_train.options import ServiceOptions, TrainConfig, parse_config
from insitu_train.service.checkpoint import ServiceCheckpoint, read_checkpoint, write_checkpoint
from insitu_train.service.reduction import find_reduction
from insitu_train.service.session import Service, ServiceSampler, TrainingRun
from insitu_train.service.trainer import HalfDoneError, ServiceTrainer

_SEEDS = 2**31
_PROBE_TOKENS, _PROBE_IDS = 24, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The weights that requests are sampled with."""

    version: int
    weights: str
    sampler: ServiceSampler


class SamplingCommands:
    """The `engine.*` commands."""

    def __init__(self, published: Published, max_context: int) -> None:
        self.published = published
        self._max_context = max_context
        self._lock = threading.Lock()
        """Of the next two: requests end in threads of the SDK."""
        self._running = 0
        self._pausing: list[RpcCall] = []
        self._waiting: list[RpcCall] | None = None
        """Requests that came in during a pause; None = there is no pause."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "engine.info": self._info,
            "engine.generate": self._generate,
            "engine.pause": self._pause,
            "engine.resume": self._resume,
        }

    @property
    def receipt(self) -> Meta:
        return {"version": self.published.version, "checksum": self.published.weights}

    def _info(self, call: RpcCall) -> None:
        call.reply({"name": "tinker", "max_context": self._max_context, **self.receipt})

    def _generate(self, call: RpcCall) -> None:
        if self._waiting is not None:
            self._waiting.append(call)
            return
        ids, params, key = read_request(call.arrays)
        version = self.published.version
        future = self.published.sampler.sample(ids, params, stream_seed(key) % _SEEDS)
        with self._lock:
            self._running += 1
        call.on_cancel = lambda: _void(future.cancel())
        future.add_done_callback(lambda done: self._answer(call, ids, params, version, done))

    def _answer(
        self, call: RpcCall, ids: IntArray, params: SamplingParams, version: int, done: Future[Any]
    ) -> None:
        try:
            call.reply(arrays=VALUES.pack(_reply(done, ids, params, version)))
        except InsituError as error:
            call.fail(error)
        with self._lock:
            self._running -= 1
            paused = self._pausing if not self._running else []
            if paused:
                self._pausing = []
        for one in paused:
            one.reply()

    def _pause(self, call: RpcCall) -> None:
        self._waiting = self._waiting or []
        with self._lock:
            running = self._running
            if running:
                self._pausing.append(call)
        if not running:
            call.reply()

    def _resume(self, call: RpcCall) -> None:
        waiting, self._waiting = self._waiting or [], None
        for one in waiting:
            if one.open:
                self._generate(one)
        call.reply(self.receipt)


def _reply(done: Future[Any], ids: IntArray, params: SamplingParams, version: int) -> Generation:
    """Return the result of a finished request. Raises EngineError."""
    if done.cancelled():
        raise EngineError("the request was cancelled")
    if (error := done.exception()) is not None:
        line = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"training service: sample: {line[:400]}") from error
    sequences = done.result().sequences
    if len(sequences) != 1:
        raise EngineError(f"training service: sample: {len(sequences)} sequences where one was asked for")
    [sequence] = sequences
    raw = RawReply(
        ids=list(sequence.tokens),
        logprobs=list(sequence.logprobs) if sequence.logprobs is not None else None,
        finish=sequence.stop_reason,
        version_runs=((0, version),),
    )
    return checked(raw, ids, params, "training service")


class TrainingCommands:
    """The `train.*` commands, one after another in a thread."""

    def __init__(
        self,
        trainer: ServiceTrainer | None,
        sampling: SamplingCommands,
        options: ServiceOptions,
        assets: Path,
        probe_gap: float,
    ) -> None:
        self._trainer, self._sampling, self._options = trainer, sampling, options
        self._assets, self._probe_gap = assets, probe_gap
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self.failure: BaseException | None = None
        """Ends the process."""
        self.stop = False
        self.wake: Callable[[], None] = lambda: None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        own = {
            "train.info": self._info,
            "train.step": self._step,
            "train.save": self._save,
            "train.written": lambda call: call.reply({"failed": ""}),
            "train.load": self._load,
            "train.publish": self._publish,
            "train.export": self._export,
        }
        return {**{name: self._queued(handler) for name, handler in own.items()}, "train.shutdown": self._end}

    def close(self) -> None:
        """Drop what is queued; a call that runs ends with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _queued(self, handler: Handler) -> Handler:
        def run(call: RpcCall) -> None:
            try:
                handler(call)
            except HalfDoneError as error:
                self.failure = error
            except InsituError as error:
                call.fail(error)
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                self.failure = error
            self.wake()

        return lambda call: _void(self._thread.submit(run, call))

    def _info(self, call: RpcCall) -> None:
        steps = self._trainer.steps if self._trainer else 0
        found = {"step": steps, "probe_gap": self._probe_gap, "notices": [], "reference": ""}
        call.reply({**found, **self._held()})

    def _held(self) -> Meta:
        return {"version": self._trainer.version if self._trainer else 0, "weights": self._label()}

    def _label(self) -> str:
        """Return a name of the trainer's weights; a service gives no checksum."""
        trainer, options = self._trainer, self._options
        if trainer is None or not trainer.version:
            return f"{options.model} rank {options.rank} seed {options.seed}"
        return f"{trainer.run.id} version {trainer.version}"

    def _required(self) -> ServiceTrainer:
        if self._trainer is None:
            raise TrainError("this learner only samples: set policy.kind = 'tinker' to train")
        return self._trainer

    def _step(self, call: RpcCall) -> None:
        scores = Path(call.meta["scores"]) if call.meta["scores"] else None
        result = self._required().step(decode_plan(call.arrays), scores)
        failpoint.hit("learner.stepped")
        call.reply(self._held(), encode_result(result))

    def _save(self, call: RpcCall) -> None:
        trainer, folder = self._required(), Path(call.meta["folder"])
        checkpoint = ServiceCheckpoint(
            url=self._options.url,
            model=self._options.model,
            state=trainer.run.save(folder.name),
            steps=trainer.steps,
            version=trainer.version,
            weights=self._label(),
        )
        write_checkpoint(folder, checkpoint, self._assets)
        call.reply({"failed": ""})

    def _load(self, call: RpcCall) -> None:
        trainer, held = self._required(), read_checkpoint(Path(call.meta["folder"]))
        trainer.run.load(held.state)
        trainer.steps, trainer.version = held.steps, held.version
        self._info(call)

    def _publish(self, call: RpcCall) -> None:
        """Let later requests be sampled with the trainer's weights."""
        trainer, version = self._required(), int(call.meta["version"])
        if version != trainer.version:
            raise TrainError(f"version {version} is not the trainer's version {trainer.version}")
        if self._sampling.published.weights != self._label():
            path, sampler = trainer.run.publish(f"v{version}")
            print(f"published version {version}: {path}", flush=True)
            self._sampling.published = Published(version=version, weights=self._label(), sampler=sampler)
        failpoint.hit("learner.published")
        call.reply(self._held())

    def _export(self, call: RpcCall) -> None:
        raise TrainError("the weights are at the training service and are not exported to an engine")

    def _end(self, call: RpcCall) -> None:
        self.stop = True
        call.reply()


def _void(_: object) -> None:
    """Discard a value."""


def _probe(
    sampler: ServiceSampler, run: TrainingRun, ids: IntArray, limit: float, deadline_s: float
) -> float:
    """Return the largest |trainer - sampler| log-probability of a sampled text; EngineError above `limit`."""
    params = SamplingParams(max_tokens=_PROBE_TOKENS, temperature=1.0)
    future = sampler.sample(ids, params, 0)
    with boundary(EngineError, "training service: probe"):
        _wait_for(future, deadline_s)
    made = _reply(future, ids, params, 0)
    whole = np.concatenate([ids, made.ids]).astype(np.int32)
    found = run.logprobs([whole])[0][len(ids) - 1 :]
    gap = float(np.abs(found - cast(FloatArray, made.logprobs)).max())
    if not gap <= limit:
        raise EngineError(
            f"training service: its sampler's log-probabilities differ by {gap:.3g} from its trainer's, above"
            f" the limit of {limit:g} (train.max_logprob_gap)"
        )
    return gap


def _wait_for(future: Future[Any], deadline_s: float) -> None:
    """Wait until the future is done, whatever its outcome. Raises TimeoutError."""
    deadline = time.monotonic() + deadline_s
    while not future.done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no reply within {deadline_s:g} s")
        time.sleep(0.02)


def probe_ids() -> IntArray:
    """Return a prompt for the probes, of ids that every vocabulary has."""
    return np.random.default_rng(0).integers(0, _PROBE_IDS, 2 * _PROBE_TOKENS).astype(np.int32)


def run(args: argparse.Namespace) -> None:
    follow_parent(args.parent)
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    config: TrainConfig = parse_config(args.train)
    options = ServiceOptions.model_validate_json(args.service)
    service = Service(options)
    sampler, trainer, gap = service.sampler(), None, 0.0
    if options.rank:
        ids = probe_ids()
        training = service.train()
        gap = _probe(sampler, training, ids, config.max_logprob_gap, options.timeout_s)
        # last, since a service may load a checkpoint into new adapters only
        trainer = ServiceTrainer(training, config, find_reduction(training, ids))
    weights = f"{options.model} rank {options.rank} seed {options.seed}"
    sampling = SamplingCommands(
        Published(version=0, weights=weights, sampler=sampler), options.max_context_tokens
    )
    commands = TrainingCommands(trainer, sampling, options, args.model, gap)
    with RpcServer(args.socket, {**sampling.handlers, **commands.handlers}) as server:
        commands.wake = server.wake
        while not (server.abandoned or commands.stop or commands.failure):
            server.poll(0.2)
    commands.close()
    if commands.failure is not None:
        raise commands.failure


def main(argv: list[str]) -> int:
    """Return 0, or 1 with one line on standard error."""
    module = "insitu_train.service.main"
    parser = child_parser(module, __doc__, socket=Path, model=Path, parent=int, train=str, service=str)
    code = main_of_child(parser, run, argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the SDK's threads would be waited for.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
