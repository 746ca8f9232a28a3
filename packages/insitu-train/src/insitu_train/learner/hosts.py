"""Ranks of other hosts, from the learner's side.

    learner --TCP: start, step, load, end--> agent of a host (host_agent.py) --pipes--> its ranks

Agents come to one address. Each proves the secret, is compared with this machine and waits; the learner takes
as many as it lacks ranks, later ones wait for its next life, which the supervisor begins at a checkpoint for
their sake. Rows travel once per host. A host whose link ends, or is silent, is lost: the next command raises
RankLostError, and a learner that waits for it in a collective is ended, since its supervisor starts another
one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from insitu.config.base import split_address
from insitu.errors import TrainError, boundary
from insitu_train.channel.host_link import (
    BEAT_S,
    HostLink,
    RefusedError,
    reachable,
    secret_of,
    silence_s,
    welcome,
)
from insitu_train.channel.installed import code_identity, torch_version, weights_digest
from insitu_train.channel.rpc import Frame, Meta, encode
from insitu_train.learner.lost_hosts import LostHosts
from insitu_train.learner.rank_process import left_alone
from insitu_train.options import TrainConfig, dump_config
from insitu_train.trainer.distributed import RankLostError

PACKAGES = ("insitu", "insitu_train")
"""What a host must have as the learner has it."""
_MAX_SKEW_S = 30.0
_AGAIN_S = 0.1
_GRACE_S = 3.0
"""Time for the main thread to find a loss by itself."""
_CAUSE_S = 2.5 * BEAT_S
"""Time for a host to say that a rank of its own died, which the ranks of others notice at once."""
_END_S = 4.0
"""Time for hosts to send what is left; the learner is killed 5 s after its end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Host:
    """One agent that was let in."""

    link: HostLink
    name: str
    ranks: int

    @property
    def key(self) -> str:
        """What losses are counted by: several machines may be named localhost."""
        return f"{self.name} {self.link.there}"

    def __str__(self) -> str:
        return f"{self.ranks} of {self.name} ({self.link.there})"


def waits_s(config: TrainConfig, *, again: bool) -> float:
    """Return how long the learner waits for hosts: shorter after a death, when they come by themselves."""
    return min(60.0, config.step_timeout_s / 4) if again else min(600.0, config.step_timeout_s / 2)


def chosen(hosts: Iterable[Host], wanted: int) -> list[Host]:
    """Return those that have together the most ranks, but not more than wanted; larger ones first."""
    best: dict[int, list[Host]] = {0: []}
    for host in sorted(hosts, key=lambda host: (-host.ranks, host.name)):
        for ranks, those in tuple(best.items()):
            if ranks + host.ranks <= wanted:
                best.setdefault(ranks + host.ranks, [*those, host])
    return best[max(best)]


class Hosts:
    """The hosts that came to a learner."""

    def __init__(self, config: TrainConfig, model: Path, losses: Path | None = None) -> None:
        """Listen.

        losses: file of the hosts that earlier lives of this learner lost; beside it the first life leaves the
        digest of the weights.
        Raises ConfigError without a secret, TrainError if the address is not this machine's.
        """
        self._losses = LostHosts(losses)
        self._config, self._model, self._secret = config, model, secret_of(os.environ)
        with boundary(TrainError, f"train.ranks: listen at {config.meeting}"):
            self._listener = socket.create_server(split_address(config.meeting))
        self._changed = threading.Condition()
        self._digest_lock = threading.Lock()
        self._kept = losses and losses.with_name("weights-digest")
        self._links: list[HostLink] = []
        self._threads: list[threading.Thread] = []
        self._reading: list[HostLink] = []
        self._waiting: list[Host] = []
        self._world: list[Host] = []
        self._scores: Path | None = None
        self._lost, self._cause = "", ""
        self._working = 0
        self._ended = False
        self._stop = threading.Event()
        for work in (self._accept, self._beat):
            threading.Thread(target=work, daemon=True).start()

    @property
    def world(self) -> Sequence[Host]:
        """The hosts that take part, in the order of their ranks."""
        return self._world

    @property
    def here(self) -> str:
        """Address of this machine that the hosts reach. Raises TrainError where not all can reach it."""
        first = self._world[0]
        for host in self._world:
            if _is_loopback(host.link.here) != _is_loopback(first.link.here):
                raise TrainError(
                    f"train.ranks: {host.name} reached the learner at {host.link.here}, {first.name} at"
                    f" {first.link.here}: give all hosts one address that each of them reaches"
                )
        return first.link.here

    def meet(self, *, again: bool) -> int:
        """Wait for the configured ranks and return how many there are.

        again: after a death; it goes on with those that came, but waits as long as at first for one that is
        known and reads its weights. Raises TrainError where some do not come.
        """
        wanted, limit = self._wanted, waits_s(self._config, again=again)
        awaited = wanted - self._losses.paused_ranks()

        def enough() -> bool:
            return _ranks(chosen(self._ready(), wanted)) >= awaited

        with self._changed:
            if not self._changed.wait_for(enough, limit) and again:
                longest = waits_s(self._config, again=False) - limit
                self._changed.wait_for(lambda: enough() or not self._reading, longest)
            ready = self._ready()
            self._world.extend(chosen(ready, wanted))
            self._waiting = [host for host in self._waiting if host not in self._world]
        found = _ranks(self._world)
        if found < wanted and not again:
            more = ", ".join(str(host) for host in ready if host not in self._world)
            those = f"{', '.join(map(str, self._world)) or 'no host'}){f'; too many: {more}' if more else ''}"
            raise TrainError(
                f"train.ranks: {found} of {wanted} ranks of other hosts came within {limit:g} s"
                f" ({those}: start `insitu ranks {reachable(self._config.meeting)}` there"
            )
        return found

    def waiting(self) -> str:
        """Return the hosts that came late and could take part in another life; empty if there are none."""
        with self._changed:
            best = chosen([*self._world, *self._ready()], self._wanted)
        if _ranks(best) <= _ranks(self._world):
            return ""
        return ", ".join(str(host) for host in best if host not in self._world)

    @property
    def _wanted(self) -> int:
        return self._config.world - self._config.ranks_here

    def _ready(self) -> list[Host]:
        return [host for host in self._waiting if not self._losses.pause_s(host.key)]

    def start(self, port: int, world: int, shards: int = 0) -> None:
        """Let the hosts start their ranks, which meet at this port of this machine. Raises TrainError."""
        first = self._config.ranks_here
        meta: Meta = {"op": "start", "world": world, "store": f"tcp://{self.here}:{port}", "shards": shards}
        # again: a folder may have changed while its host waited for others
        meta |= {"weights": self._weights(), "train": dump_config(self._config)}
        for host in self._world:
            self._give(host, encode({**meta, "first": first}))
            first += host.ranks

    def send(self, frame: bytes, scores: Path | None = None) -> None:
        """Send an encoded command to each host. Raises RankLostError.

        scores: where those of this step go that the hosts send back, beside earlier ones.
        """
        self._check()
        self._scores = scores or self._scores
        for host in self._world:
            self._give(host, frame)

    def _give(self, host: Host, frame: bytes) -> None:
        try:
            host.link.send_bytes(frame)
        except TrainError as error:
            raise RankLostError(self._why() or f"host {host.name} is lost: {error}") from error

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work with all hosts: the process ends if one is lost meanwhile. Raises RankLostError."""
        self._check()
        try:
            self._working += 1
            try:
                yield
            finally:
                self._working -= 1
        except RankLostError as error:
            raise RankLostError(self._why() or str(error)) from error

    def end(self, line: str = "") -> None:
        """Tell all hosts that the run is over, or why it ends."""
        self._ended = True
        for host in (*self._world, *self._waiting):
            with suppress(TrainError):
                host.link.send({"op": "end", "line": line})

    def close(self) -> None:
        """Close all links; hosts that know of the end leave before, others come back."""
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        self._listener.close()
        until = time.monotonic() + _END_S * self._ended
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for link in tuple(self._links):
            link.close()

    def _check(self) -> None:
        if self._lost:
            raise RankLostError(self._why())

    def _why(self) -> str:
        """Return which host is lost and why, once its own word has come; empty where none is."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause, _CAUSE_S)
        return self._lost

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._stop.wait(_AGAIN_S)
                continue
            try:
                link = HostLink(sock)
            except OSError:  # reset meanwhile
                continue
            self._links.append(link)
            thread = threading.Thread(target=self._serve, args=(link,), daemon=True)
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            for link in tuple(self._links):
                link.beat()

    def _serve(self, link: HostLink) -> None:
        """Let one host in and read what it sends until it leaves."""
        host, why = None, "it left"
        who = link.there
        try:
            about = welcome(link, self._secret)
            who = f"{about['name']} ({link.there})"
            host = self._let_in(link, about)
            _say(f"host {host.name}: {host.ranks} ranks, same insitu, torch and weights ({link.there})")
            while True:
                self._take(link.receive())
        except RefusedError as error:
            _say(f"host {who}: refused: {error}")
            with suppress(TrainError):
                link.send({"op": "refused", "line": str(error)})
        except (TrainError, OSError) as error:
            why = str(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it does not speak this protocol ({error!r})"
        finally:
            self._links.remove(link)
            link.close()
        if host is not None and not (self._stop.is_set() or self._ended):
            self._leave(host, why)

    def _let_in(self, link: HostLink, about: Meta) -> Host:
        """Compare a host with this machine. Raises RefusedError."""
        link.quiet_s = silence_s(self._config.step_timeout_s)
        wanted = self._wanted
        skew = float(about["clock"]) - time.time()
        for name, theirs, ours in (
            ("insitu", about["insitu"], code_identity(PACKAGES)),
            ("torch", about["torch"], torch_version()),
        ):
            if theirs != ours:
                raise RefusedError(f"{name} {theirs} there, {ours} at the learner")
        if about["ranks"] > wanted:
            raise RefusedError(f"--ranks {about['ranks']}: train.ranks takes {wanted} of other hosts")
        if abs(skew) > _MAX_SKEW_S:
            raise RefusedError(f"the clocks differ by {skew:+.0f} s, by at most {_MAX_SKEW_S:.0f} s allowed")
        with self._awaited(link):
            link.send({"op": "model", "folder": str(self._model), "quiet_s": link.quiet_s})
            host = self._compared(link, about)
            link.send({"op": "accepted"})
            with self._changed:
                self._waiting.append(host)
                self._changed.notify_all()
        return host

    @contextmanager
    def _awaited(self, link: HostLink) -> Iterator[None]:
        """Count a host that is known as one that comes."""
        with self._changed:
            self._reading.append(link)
        try:
            yield
        finally:
            with self._changed:
                self._reading.remove(link)
                self._changed.notify_all()

    def _compared(self, link: HostLink, about: Meta) -> Host:
        if (theirs := str(link.expect("ready")["weights"])) != (ours := self._weights()):
            raise RefusedError(f"its weights are {theirs[:12]}, {ours[:12]} at the learner ({self._model})")
        return Host(link=link, name=str(about["name"]), ranks=int(about["ranks"]))

    def _weights(self) -> str:
        with self._digest_lock:
            return weights_digest(self._model, self._kept)

    def _take(self, frame: Frame) -> None:
        """Handle a message of a host: a file of scores, or a rank that died."""
        if frame.meta["op"] == "died":
            raise TrainError(str(frame.meta["line"]))
        if frame.meta["op"] == "scores" and self._scores is not None:
            path = self._scores.with_name(Path(frame.meta["name"]).name)
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(frame.arrays["data"].tobytes())

    def _leave(self, host: Host, why: str) -> None:
        with self._changed:
            if host in self._waiting:
                self._waiting.remove(host)
                return
            line = f"host {host.name} is lost: {why}"
            # a rank that another one has left alone is no cause, whichever host says so first
            if not (self._cause or left_alone(why)):
                pause = self._losses.note(host.key, host.ranks)
                self._lost = self._cause = line
                _say(f"{line}; it may take part again after {pause:.0f} s" if pause else line)
            self._lost = self._lost or line
            self._changed.notify_all()
        time.sleep(_GRACE_S)
        if self._working and not self._stop.is_set():
            _say(f"RankLostError: {self._lost}")
            os._exit(1)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _ranks(hosts: Iterable[Host]) -> int:
    return sum(host.ranks for host in hosts)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
