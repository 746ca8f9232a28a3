"""`insitu ranks`: the agent of another host, which runs ranks for a learner and passes its commands on.

It imports no torch. It ends with the run, when the learner refuses it, or after `GIVE_UP_S` without one
(never with --forever);
when a learner dies, its ranks end and it waits for the next.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from insitu.backoff import backoff_s
from insitu.config.base import split_address
from insitu.errors import ConfigError, TrainError, boundary
from insitu.storage.temp_dirs import remove_stale_scratch, scratch_folder
from insitu_train.channel.host_link import BEAT_S, HostLink, RefusedError, greet, secret_of
from insitu_train.channel.installed import code_identity, torch_version, weights_digest
from insitu_train.channel.rpc import Frame, encode
from insitu_train.learner.process import computing
from insitu_train.learner.rank_process import Place, RankChild, end_all, first_dead, left_alone
from insitu_train.options import TrainConfig, parse_config

PACKAGES = ("insitu", "insitu_train")
GIVE_UP_S = 600.0
_CONNECT_S = 10.0
_LONGEST_PAUSE_S = 5.0
clock = time.time
Say = Callable[[str], None]


def attend(address: str, ranks: int, model: Path | None, say: Say, *, forever: bool = False) -> None:
    """Run ranks for the learner at HOST:PORT until its run ends.

    model: folder of the start model here; None = the learner's path. forever: try without a learner until
    this process is ended. Raises ConfigError, TrainError.
    """
    secret, since, failures = secret_of(os.environ), time.monotonic(), 0
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ConfigError(f"{address} {error}") from error
    remove_stale_scratch()
    say(f"{ranks} ranks for the learner at {address}")
    while True:
        try:
            with boundary(TrainError, f"no learner at {address}"):
                link = HostLink(socket.create_connection((host, port), _CONNECT_S))
            agent = _Agent(link, ranks, say)
            try:
                agent.join(secret, model)
                failures = 0
                line = agent.work()
            finally:
                agent.close()
                since = time.monotonic() if agent.known else since
        except RefusedError as error:
            raise TrainError(f"the learner at {address} refuses this host: {error}") from error
        except TrainError as error:
            failures += 1
            if failures == 1:
                say(f"{error}; trying again{'' if forever else f' for {GIVE_UP_S:g} s'}")
            if not forever and time.monotonic() - since > GIVE_UP_S:
                raise
            time.sleep(backoff_s(failures, 0.5, _LONGEST_PAUSE_S))
        else:
            if line:
                raise TrainError(f"the learner at {address} ended: {line}")
            say("the run ended")
            return


class _Agent:
    """Takes part in one life of the learner."""

    def __init__(self, link: HostLink, ranks: int, say: Say) -> None:
        self._link, self._ranks, self._say = link, ranks, say
        self._model = Path()
        self._children: list[RankChild] = []
        self._files = contextlib.ExitStack()
        self._folder = self._files.enter_context(scratch_folder())
        self._inbox: queue.SimpleQueue[Frame | TrainError] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.known = False
        """The learner has proved itself."""

    def join(self, secret: str, model: Path | None) -> None:
        """Prove the secret and show what is here. Raises RefusedError, TrainError."""
        about = {
            "name": socket.gethostname(),
            "ranks": self._ranks,
            "insitu": code_identity(PACKAGES),
            "torch": torch_version(),
            "clock": clock(),
        }
        greet(self._link, secret, about)
        self.known = True
        threading.Thread(target=self._beat, daemon=True).start()
        theirs = self._link.expect("model")
        self._link.quiet_s = float(theirs["quiet_s"])
        self._model = model or Path(theirs["folder"])
        try:
            digest = weights_digest(self._model)
        except TrainError as error:
            line = f"{error} on {about['name']}: give --model FOLDER"
            self._link.send({"op": "refused", "line": line})
            raise RefusedError(line) from error
        self._link.send({"op": "ready", "weights": digest})
        self._link.expect("accepted")
        self._say(f"the learner knows this host ({self._link.here}); its ranks start with the others")
        threading.Thread(target=self._read, daemon=True).start()

    def work(self) -> str:
        """Follow the learner to the end; return why it ended, empty for its run. Raises TrainError."""
        while True:
            frame = self._inbox.get()
            if isinstance(frame, TrainError):
                raise frame
            op = frame.meta["op"]
            if op == "end":
                self._finish()
                return str(frame.meta["line"])
            if op == "start":
                self._start(frame)
            else:
                self._pass_on(frame)

    def close(self) -> None:
        """End the link and kill the ranks that are left."""
        self._stop.set()
        self._link.close()
        end_all(self._children, kill=True)
        self._files.close()

    def _start(self, frame: Frame) -> None:
        first, world = int(frame.meta["first"]), int(frame.meta["world"])
        config = self._prepared(frame)
        for index in range(self._ranks):
            place = Place(
                rank=first + index,
                world=world,
                index=index,
                here=self._ranks,
                store=str(frame.meta["store"]),
                shards=int(frame.meta["shards"]),
                address=self._link.here,
            )
            shares = config.share_gpu
            environment = computing(os.environ, shares_tensors=shares)
            self._children.append(RankChild.start(place, self._model, config, environment))
        self._say(f"started ranks {first} to {first + self._ranks - 1} of {world}")

    def _prepared(self, frame: Frame) -> TrainConfig:
        """Return the configuration, and compare the weights once more. Raises TrainError.

        They are read again only where a file is new.
        """
        theirs, mine = str(frame.meta["weights"]), weights_digest(self._model)
        if mine != theirs:
            line = f"its weights are {mine[:12]}, {theirs[:12]} at the learner: a model folder has changed"
            self._link.send({"op": "died", "line": line})
            raise TrainError(line)
        return parse_config(frame.meta["train"])

    def _pass_on(self, frame: Frame) -> None:
        """Write a command to the pipe of each rank here."""
        meta = frame.meta
        if meta.get("scores"):
            meta = {**meta, "scores": str(self._folder / Path(meta["scores"]).name)}
        data = encode(meta, frame.arrays)
        for child in self._children:
            with contextlib.suppress(OSError):  # it has died: `_beat` says how
                child.send(data)

    def _finish(self) -> None:
        """Send the scores that are left and end the ranks, which may take longer than the learner waits."""
        self._stop.set()
        with contextlib.suppress(TrainError):
            self._send_scores()
            end_all(self._children)
            self._send_scores()
        self._children.clear()

    def _read(self) -> None:
        """Take frames off the link at once, whatever the ranks are doing; kill these when it ends."""
        try:
            while True:
                self._inbox.put(self._link.receive())
        except TrainError as error:
            for child in tuple(self._children):
                child.kill()
            self._inbox.put(error)

    def _beat(self) -> None:
        """Say that this host is there, what its ranks scored, and when one died."""
        waited = False
        while not self._stop.wait(BEAT_S):
            self._link.beat()
            with contextlib.suppress(TrainError):
                self._send_scores()
                line = first_dead(tuple(self._children))
                if left_alone(line) and not waited:
                    waited = True  # the one that did may take longer to end
                elif line:
                    self._say(f"{line}: see its output above")
                    self._link.send({"op": "died", "line": line})
                    self._link.close()
                    return

    def _send_scores(self) -> None:
        for path in sorted(self._folder.glob("*.bin")):
            with boundary(TrainError, "read scores"):
                data = np.frombuffer(path.read_bytes(), np.uint8)
                path.unlink()
            self._link.send({"op": "scores", "name": path.name}, {"data": data})
