"""The core's side of the channel: the commands `engine.*`, for any process that hosts an EmbeddedCore.

`EngineService.handlers` goes into an RpcServer together with the host's own commands; the host alternates
`server.poll` and `service.step`. As a program: `python -m insitu_train.embedded.service SOCKET MODEL_FOLDER
[max_context]`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from insitu.errors import EngineError
from insitu.types import Generation
from insitu.types.codec import VALUES
from insitu_train.channel.calls import read_request
from insitu_train.channel.rpc import Meta
from insitu_train.channel.server import Handler, RpcCall, RpcServer
from insitu_train.embedded.core import EmbeddedCore, EngineOptions, SampledFolder


class EngineService:
    """Handles `engine.info`, `.generate`, `.pause` (replies when nothing runs), `.resume` and `.load`."""

    def __init__(self, core: EmbeddedCore) -> None:
        self.core = core
        self._pausing: list[RpcCall] = []

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "engine.info": self._info,
            "engine.generate": self._generate,
            "engine.pause": self._pause,
            "engine.resume": self._resume,
            "engine.load": self._load,
        }

    @property
    def busy(self) -> bool:
        """Whether `step` has work."""
        return self.core.busy or bool(self._pausing)

    def step(self) -> None:
        """Run one step of the core, if it has work; reply to a completed pause."""
        if self.core.busy:
            self.core.step()
        if self._pausing and not self.core.busy:
            pausing, self._pausing = self._pausing, []
            for call in pausing:
                call.reply()

    def _info(self, call: RpcCall) -> None:
        call.reply(
            {"name": "embedded", "max_context": self.core.options.max_context, **_receipt_meta(self.core)}
        )

    def _generate(self, call: RpcCall) -> None:
        ids, params, key = read_request(call.arrays)

        def done(result: Generation | EngineError) -> None:
            if isinstance(result, EngineError):
                call.fail(result)
            else:
                call.reply(arrays=VALUES.pack(result))

        number = self.core.submit(ids, params, key, done)
        call.on_cancel = lambda: _abort(self.core, number)

    def _pause(self, call: RpcCall) -> None:
        self.core.pause()
        self._pausing.append(call)

    def _resume(self, call: RpcCall) -> None:
        self.core.resume()
        call.reply(_receipt_meta(self.core))

    def _load(self, call: RpcCall) -> None:
        """Sample with the weights of a folder once all requests have ended; read nothing new meanwhile."""
        while self.core.busy:
            self.step()
        self.core.load(Path(call.meta["folder"]), int(call.meta["version"]))
        call.reply(_receipt_meta(self.core))


def _abort(core: EmbeddedCore, number: int) -> None:
    core.abort(number)


def _receipt_meta(core: EmbeddedCore) -> Meta:
    return {"version": core.receipt.version, "checksum": core.receipt.checksum}


def serve(core: EmbeddedCore, path: Path) -> None:
    """Serve one core at `path` until the last client disconnects."""
    service = EngineService(core)
    with RpcServer(path, service.handlers) as server:
        while not server.abandoned:
            server.poll(0.0 if service.busy else 0.2)
            service.step()


def main(argv: list[str]) -> int:
    """Run a server process: SOCKET MODEL_FOLDER [max_context]."""
    context = int(argv[2]) if len(argv) > 2 else 2048
    serve(EmbeddedCore(SampledFolder(Path(argv[1])), EngineOptions(max_context=context)), Path(argv[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
