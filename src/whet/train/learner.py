"""The learner process: trainer and embedded engine over one set of weights, behind one unix socket.

    controller --engine.*--> EngineService -> EmbeddedCore --\\
               --train.*---> Commands -----> Trainer --------+--> one Qwen3

One thread alternates between the socket and the sampler; a training step blocks both. Engine requests that
are there when a step begins are finished first, under the version they came to. The process ends when its
parent dies, when its client has gone, or at `train.shutdown`. Run by client.py:
`python -m whet.train.learner --socket PATH --model DIR --parent PID --train JSON --engine JSON`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from whet.engine.channel import Meta
from whet.engine.channel_server import Call, ChannelServer, Handler
from whet.engine.embedded_core import EmbeddedCore, EngineOptions
from whet.engine.embedded_model import load_model
from whet.engine.embedded_serve import EngineService
from whet.errors import TrainError, WhetError
from whet.train import checkpoint
from whet.train.options import parse_config
from whet.train.probe import probe_engine
from whet.train.publish import InProcess
from whet.train.trainer import Trainer
from whet.train.wire import decode_plan

_PR_SET_PDEATHSIG = 1


class Commands:
    """The `train.*` commands. Each answers before it returns."""

    def __init__(self, trainer: Trainer, service: EngineService, assets: Path, probe_gap: float) -> None:
        self._trainer, self._service, self._assets = trainer, service, assets
        self._publisher = InProcess(service.core)
        self._probe_gap = probe_gap
        self.stop = False

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "train.info": self._info,
            "train.step": self._step,
            "train.save": self._save,
            "train.load": self._load,
            "train.shutdown": self._shutdown,
        }

    def _info(self, call: Call) -> None:
        trainer = self._trainer
        call.reply({"step": trainer.steps, "version": trainer.version, "probe_gap": self._probe_gap})

    def _step(self, call: Call) -> None:
        plan = decode_plan(call.meta["plan"], call.arrays)
        self._drain()
        result = self._trainer.step(plan)
        if not result.skipped:
            self._publisher.publish(self._trainer.version)
        call.reply(asdict(result))

    def _save(self, call: Call) -> None:
        checkpoint.save(self._trainer, Path(call.meta["folder"]), self._assets)
        call.reply()

    def _load(self, call: Call) -> None:
        self._drain()
        checkpoint.load(self._trainer, Path(call.meta["folder"]))
        self._publisher.publish(self._trainer.version)
        self._info(call)

    def _shutdown(self, call: Call) -> None:
        self.stop = True
        call.reply()

    def _drain(self) -> None:
        """Let every request that was submitted end; nothing new is read meanwhile."""
        while self._service.core.busy:
            self._service.step()


def follow_parent(parent: int) -> None:
    """Be killed when the parent dies, however it dies (Linux). Raises TrainError if it is already gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise TrainError(f"the controller (process {parent}) is gone")


def serve(path: Path, commands: Commands, service: EngineService) -> None:
    """Answer until the client has gone or asks to stop."""
    with ChannelServer(path, {**service.handlers, **commands.handlers}) as server:
        while not (server.abandoned or commands.stop):
            server.poll(0.0 if service.busy else 0.2)
            service.step()


def run(args: argparse.Namespace) -> None:
    follow_parent(args.parent)
    config = parse_config(args.train)
    model = load_model(args.model)
    raw: Meta = json.loads(args.engine)
    core = EmbeddedCore(model, EngineOptions(**raw))
    gap = probe_engine(core, model, temperature=config.temperature, limit=config.max_logprob_gap)
    service = EngineService(core)
    serve(args.socket, Commands(Trainer(model, config), service, args.model, gap), service)


def main(argv: list[str]) -> int:
    """0, or 1 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="whet.train.learner", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--engine", required=True)
    # a terminal's ^C goes to the whole group; the controller decides when the learner ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(parser.parse_args(argv))
    except WhetError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
