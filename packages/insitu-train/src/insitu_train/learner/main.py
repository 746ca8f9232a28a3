"""The learner process: trainer and embedded engine over one set of weights, on one unix socket.

    controller --engine.*--> EngineService -> EmbeddedCore --\\
               --train.*---> Commands -----> Trainer --------+--> one model

One thread alternates between the socket and the sampler; a training step blocks both. The sampler takes new
weights at `train.publish` only; pending requests are finished before a step or a publication. With `--engine
""` there is no sampler. The process ends when its parent dies, its client disconnects, or at
`train.shutdown`. Run as `python -m insitu_train.learner.main --socket PATH --model DIR --parent PID
--train JSON --engine JSON`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from insitu import failpoint
from insitu.errors import TrainError
from insitu_train.channel.parent_watch import child_parser, follow_parent, main_of_child
from insitu_train.channel.rpc import Meta
from insitu_train.channel.server import Handler, RpcCall, RpcServer
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.embedded.model import Qwen3
from insitu_train.embedded.service import EngineService
from insitu_train.learner import ranks as peers
from insitu_train.learner.probe import probe_engine
from insitu_train.learner.ranks import RankProcesses
from insitu_train.learner.serialization import decode_plan, encode_result
from insitu_train.learner.transfer import Transfers
from insitu_train.model.base import Policy
from insitu_train.model.hf import HfPolicy
from insitu_train.options import TrainConfig, parse_config
from insitu_train.trainer import checkpoint
from insitu_train.trainer.checkpoint import CheckpointWriter
from insitu_train.trainer.checksum import WeightChecksum
from insitu_train.trainer.distributed import RankLostError
from insitu_train.trainer.trainer import Trainer
from insitu_train.weights.delta import write_delta


class Commands:
    """The `train.*` commands; each replies before it returns."""

    def __init__(
        self,
        trainer: Trainer,
        service: EngineService | None,
        assets: Path,
        probe_gap: float,
        others: RankProcesses | None = None,
    ) -> None:
        self._trainer, self._service, self._assets = trainer, service, assets
        self._probe_gap = probe_gap
        self._transfers = Transfers(trainer.model)
        self._checksum = WeightChecksum(trainer.model, trainer.ranks)
        self._digest = ""
        """Checksum of the weights; empty = changed since."""
        self._others = others or RankProcesses(trainer.ranks, [])
        self._writer = CheckpointWriter(trainer.config.step_timeout_s, self._others.dead)
        self.stop = False

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "train.info": self._info,
            "train.step": self._step,
            "train.save": self._save,
            "train.written": self._written,
            "train.load": self._load,
            "train.publish": self._publish,
            "train.export": self._export,
            "train.transfer": self._transfer,
            "train.shutdown": self._shutdown,
        }

    def _info(self, call: RpcCall) -> None:
        trainer = self._trainer
        notices = trainer.model.notices if isinstance(trainer.model, HfPolicy) else []
        reference = checkpoint.reference_of(trainer)
        found = {"step": trainer.steps, "probe_gap": self._probe_gap, "notices": notices}
        found["hosts"] = self._others.described()
        call.reply({**found, "reference": reference, **self._held()})

    def _step(self, call: RpcCall) -> None:
        plan = decode_plan(call.arrays)
        self._drain()
        with self._exit_on_lost_rank():
            scores = call.meta["scores"]
            self._others.send("step", {"scores": scores}, call.arrays)
            try:
                result = self._trainer.step(plan, Path(scores) if scores else None)
            finally:
                self._digest = ""
                self._trainer.release_cache()
        failpoint.hit("learner.stepped")
        call.reply(self._held(), encode_result(result))

    def _save(self, call: RpcCall) -> None:
        """Begin a checkpoint; reply as soon as a step may change the weights again."""
        failed, folder = self._writer.wait(), Path(call.meta["folder"])
        owners = self._others.place.here
        with self._together("save", {"folder": str(folder), "owners": owners}):
            checkpoint.begin(self._trainer, self._writer, folder, self._assets, owners)
        call.reply({"failed": failed})

    def _written(self, call: RpcCall) -> None:
        call.reply({"failed": self._writer.wait()})

    def _load(self, call: RpcCall) -> None:
        self._drain()
        with self._exit_on_lost_rank():
            self._others.load(self._trainer, Path(call.meta["folder"]))
        self._digest = ""
        self._info(call)

    def _publish(self, call: RpcCall) -> None:
        """Give the sampler the trainer's weights, under the trainer's version."""
        if self._service is None:
            raise TrainError("this learner has no engine to publish to")
        version = self._current(int(call.meta["version"]))
        self._drain()
        self._service.core.refresh(version, str(self._held()["weights"]))
        failpoint.hit("learner.published")
        call.reply(self._held())

    def _export(self, call: RpcCall) -> None:
        """Write the weights as a model folder, and as the difference to `base` if requested."""
        meta, folder = call.meta, Path(call.meta["folder"])
        self._current(int(meta["version"]))
        owners = self._others.place.here
        with self._together("export", {**meta, "op": "export", "owners": owners}):
            manifest = peers.export(self._trainer, meta, self._assets, owners)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if meta["delta"]:
            size = write_delta(Path(meta["delta"]), Path(meta["base"]), folder)
        call.reply({"checksum": manifest.checksum, "tensors": dict(manifest.tensors), "bytes": size})

    def _transfer(self, call: RpcCall) -> None:
        """Run the trainer's side of a publication without files; see transfer.py."""
        if "version" in call.meta:
            self._current(int(call.meta["version"]))
        if self._trainer.ranks.sharded:
            raise TrainError("train.shard: sharded weights reach an engine as files only (engine.publish)")
        call.reply(self._transfers.answer(call.meta))

    def _current(self, version: int) -> int:
        if version != self._trainer.version:
            raise TrainError(f"version {version} is not the trainer's version {self._trainer.version}")
        return version

    def _held(self) -> Meta:
        if not self._digest:
            with self._together("digest", {}):
                self._digest = self._checksum.now()
        waiting = self._others.waiting()
        return {"version": self._trainer.version, "weights": self._digest, "waiting": waiting}

    def _shutdown(self, call: RpcCall) -> None:
        self.stop = True
        if self._others.hosts is not None and not call.meta.get("again"):
            self._others.hosts.end()
        call.reply()

    @contextmanager
    def _together(self, op: str, meta: Meta) -> Iterator[None]:
        """Let sharded ranks do the same meanwhile."""
        with self._exit_on_lost_rank():
            if self._trainer.ranks.sharded:
                self._others.send(op, meta)
            yield

    @contextmanager
    def _exit_on_lost_rank(self) -> Iterator[None]:
        """Exit when a rank is lost: the learner may be restarted."""
        try:
            with self._others.working():
                yield
        except RankLostError as error:
            raise SystemExit(f"RankLostError: {error}") from error

    def _drain(self) -> None:
        """Finish all submitted requests; read nothing new meanwhile."""
        while self._service is not None and self._service.core.busy:
            self._service.step()


def serve(path: Path, commands: Commands, service: EngineService | None) -> None:
    """Answer until the client disconnects or requests shutdown."""
    own = service.handlers if service is not None else {}
    with RpcServer(path, {**own, **commands.handlers}) as server:
        while not (server.abandoned or commands.stop):
            server.poll(0.0 if service is not None and service.busy else 0.2)
            if service is not None:
                service.step()


def _sampler(model: Policy, raw: str, config: TrainConfig) -> tuple[EngineService | None, float]:
    """Return the engine and the gap of its probe; None for an empty description."""
    if not raw:
        return None, 0.0
    if not isinstance(model, Qwen3 | HfPolicy):
        raise TrainError(f"the embedded engine does not sample a {type(model).__name__}")
    options: Meta = json.loads(raw)
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if model.compute_dtype == torch.bfloat16 else "float32"
    core = EmbeddedCore(model, EngineOptions(**options, dtype=dtype))
    gap = probe_engine(core, model, temperature=config.temperature, limit=config.max_logprob_gap)
    return EngineService(core), gap


def run(args: argparse.Namespace) -> None:
    follow_parent(args.parent)
    config = parse_config(args.train)
    losses = args.socket.with_name("lost-hosts")
    with peers.started(args.model, config, again=args.again, losses=losses) as others:
        with others.working():
            model = peers.open_model(args.model, config, others.ranks, others.place)
            service, gap = _sampler(model, args.engine, config)
            reserved = 0 if service is None else service.core.cache.nbytes
            trainer = peers.make_trainer(model, args.model, config, others.ranks, reserved)
        serve(args.socket, Commands(trainer, service, args.model, gap, others), service)


def main(argv: list[str]) -> int:
    """Return 0, or 1 with one line on standard error."""
    module = "insitu_train.learner.main"
    parser = child_parser(module, __doc__, socket=Path, model=Path, parent=int, train=str, engine=str)
    parser.add_argument("--again", action="store_true", help="a learner of this run ended before")
    return main_of_child(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
