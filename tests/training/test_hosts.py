"""The meeting of a learner and hosts: who is let in, who is refused and why, and what a lost host does.
Both ends are threads of this process; ranks are not started."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts_lab import KEY, free_port
from train_lab import small_model

from insitu.config import load_config
from insitu.errors import ConfigError, TrainError
from insitu.storage import temp_dirs
from insitu.storage.files import sha256_of
from insitu_train.channel import installed
from insitu_train.channel.host_link import SECRET, HostLink, greet
from insitu_train.channel.installed import code_identity, torch_version, weights_digest
from insitu_train.channel.rpc import encode
from insitu_train.embedded.model import save_model
from insitu_train.learner import host_agent, hosts
from insitu_train.learner.host_agent import attend
from insitu_train.learner.hosts import Hosts
from insitu_train.learner.lost_hosts import LostHosts
from insitu_train.learner.process import describe_hosts
from insitu_train.options import TrainConfig, shards_of
from insitu_train.trainer.distributed import RankLostError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(small_model(0), folder)
    return folder


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(SECRET, KEY)
    monkeypatch.setattr(hosts, "_GRACE_S", 0.0)
    return free_port()


@pytest.fixture
def met(port: int, model: Path) -> Iterator[Hosts]:
    found = Hosts(TrainConfig(ranks=f"1+2@127.0.0.1:{port}", step_timeout_s=20.0), model)
    yield found
    found.close()


class Started:
    """In the place of the process of a rank."""

    every: list[Started]

    def __init__(self, place: Any) -> None:
        self.place, self.frames, self.exit_line, self.killed = place, list[bytes](), "", False
        self.every.append(self)

    @classmethod
    def start(cls, place: Any, *_: object) -> Started:
        return cls(place)

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def kill(self) -> None:
        self.killed = True

    def end(self) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    Started.every = []
    monkeypatch.setattr(host_agent, "RankChild", Started)
    return Started.every


class Agent:
    """`insitu ranks` in a thread."""

    def __init__(
        self,
        port: int,
        ranks: int,
        model: Path | None = None,
        *,
        forever: bool = False,
        address: str = "127.0.0.1",
    ) -> None:
        self.lines: list[str] = []
        self.error = ""
        args = (f"{address}:{port}", ranks, model, forever)
        self._thread = threading.Thread(target=self._run, args=args, daemon=True)
        self._thread.start()

    def _run(self, learner: str, ranks: int, model: Path | None, forever: bool) -> None:
        try:
            attend(learner, ranks, model, self.lines.append, forever=forever)
        except (TrainError, ConfigError) as error:
            self.error = str(error)

    def ended(self) -> str:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.error


def until(true: Any) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_host_gets_its_ranks_and_every_command_once(
    met: Hosts, port: int, started: list[Started], tmp_path: Path
) -> None:
    agent = Agent(port, 2)
    assert met.meet(again=False) == 2
    met.start(4321, 3)
    until(lambda: len(started) == 2)
    places = [(one.place.rank, one.place.world, one.place.index, one.place.here) for one in started]
    assert places == [(1, 3, 0, 2), (2, 3, 1, 2)]
    assert {one.place.store for one in started} == {"tcp://127.0.0.1:4321"}
    assert {one.place.shards for one in started} == {0}
    rows = {"rows": np.arange(1000, dtype=np.int32)}
    met.send(encode({"op": "step", "scores": ""}, rows))
    until(lambda: all(len(one.frames) == 1 for one in started))
    assert started[0].frames == started[1].frames == [encode({"op": "step", "scores": ""}, rows)]
    met.end()
    assert agent.ended() == ""
    assert agent.lines[-1] == "the run ended"


def test_a_learner_that_could_not_start_tells_its_hosts_why(met: Hosts, port: int) -> None:
    agent = Agent(port, 1)
    until(lambda: met._waiting)
    met.end("no memory")
    assert agent.ended() == f"the learner at 127.0.0.1:{port} ended: no memory"


def test_hosts_that_do_not_come_are_named_at_first_and_done_without_after_a_death(
    port: int, model: Path
) -> None:
    config = TrainConfig(ranks=f"1+2@127.0.0.1:{port}", step_timeout_s=2.0)
    met = Hosts(config, model)
    try:
        agent = Agent(port, 1)
        until(lambda: met._waiting)
        with pytest.raises(
            TrainError, match=r"1 of 2 ranks of other hosts came within 1 s \(1 of .*\): start"
        ):
            met.meet(again=False)
        met.end()
        agent.ended()
    finally:
        met.close()
    met = Hosts(config, model)
    try:
        assert met.meet(again=True) == 0
    finally:
        met.close()


@pytest.mark.parametrize("there", [(3, 2, 2), (1, 3, 2, 2, 2)])
def test_hosts_that_fill_the_ranks_exactly_are_taken(
    port: int, model: Path, started: list[Started], there: tuple[int, ...]
) -> None:
    """By size alone the host of 3 would keep the two of 2 out."""
    met = Hosts(TrainConfig(ranks=f"1+4@127.0.0.1:{port}", step_timeout_s=20.0), model)
    try:
        agents = [Agent(port, ranks) for ranks in there]
        until(lambda: len(met._waiting) == len(there))
        assert met.meet(again=False) == 4
        met.end()
        assert [agent.ended() for agent in agents] == [""] * len(there)
    finally:
        met.close()


def test_hosts_that_cannot_be_put_together_are_waited_for_and_named(
    port: int, model: Path, started: list[Started]
) -> None:
    met = Hosts(TrainConfig(ranks=f"1+4@127.0.0.1:{port}", step_timeout_s=2.0), model)
    try:
        agents = [Agent(port, 3), Agent(port, 3)]
        until(lambda: len(met._waiting) == 2)
        began = time.monotonic()
        with pytest.raises(TrainError, match=r"3 of 4 ranks .* within 1 s \(3 of .*\); too many: 3 of"):
            met.meet(again=False)
        assert time.monotonic() - began >= 1
        met.end()
        for agent in agents:
            agent.ended()
    finally:
        met.close()


def test_a_host_that_reads_its_weights_is_waited_for_after_a_death(
    port: int, model: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of some hundred GB takes longer to read than a life waits for hosts that do not come."""
    read = threading.Event()

    def slow(folder: Path) -> str:
        read.wait(20)
        return weights_digest(folder)

    monkeypatch.setattr(host_agent, "weights_digest", slow)
    monkeypatch.setattr(hosts, "waits_s", lambda config, *, again: 0.0 if again else 20.0)
    met = Hosts(TrainConfig(ranks=f"1+2@127.0.0.1:{port}"), model)
    try:
        agent = Agent(port, 2)
        until(lambda: met._reading)
        threading.Timer(0.3, read.set).start()
        assert met.meet(again=True) == 2
        met.end()
        assert agent.ended() == ""
    finally:
        met.close()


def test_weights_are_read_once_while_they_do_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process, and by the lives of a learner, which hand the digest on in a file."""
    reads: list[str] = []
    monkeypatch.setattr(installed, "sha256_of", lambda path: reads.append(path.name) or sha256_of(path))
    folder, kept = tmp_path / "model", tmp_path / "digest"
    save_model(small_model(0), folder)
    first = weights_digest(folder, kept)
    assert weights_digest(folder) == first
    files = len(reads)
    installed._digest_of.cache_clear()
    assert weights_digest(folder, kept) == first
    assert len(reads) == files
    save_model(small_model(1), folder)
    assert weights_digest(folder, kept) != first
    kept.write_text("cut off")
    assert weights_digest(folder, kept) == weights_digest(folder)


def test_connections_that_are_reset_leave_nothing(met: Hosts, port: int, capfd: Any) -> None:
    for _ in range(20):
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
    Agent(port, 2)
    assert met.meet(again=False) == 2
    until(lambda: len(met._links) == 1)
    until(lambda: sum(thread.is_alive() for thread in met._threads) == 1)
    assert len(met._threads) < 20
    assert "Traceback" not in capfd.readouterr().err


def test_an_agent_of_a_job_outlasts_the_start_of_the_engine(
    met: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_agent, "GIVE_UP_S", 0.0)
    monkeypatch.setattr(host_agent, "_LONGEST_PAUSE_S", 0.05)
    later = free_port()
    assert "no learner at" in Agent(later, 2).ended()
    agent = Agent(later, 2, forever=True)
    until(lambda: agent.lines[1:])
    assert agent.lines[1].endswith("; trying again")
    other = Hosts(met._config.changed(ranks=f"1+2@127.0.0.1:{later}"), met._model)
    try:
        assert other.meet(again=False) == 2
        other.end()
        assert agent.ended() == ""
    finally:
        other.close()


def test_the_folder_of_a_host_is_one_that_is_removed_after_a_kill(
    met: Hosts, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temp_dirs, "socket_parent", lambda: tmp_path)
    agent = Agent(port, 2)
    assert met.meet(again=False) == 2
    assert [temp_dirs._NAME.fullmatch(one.name)[1] for one in tmp_path.iterdir()] == [str(os.getpid())]  # type: ignore[index]
    met.end()
    agent.ended()
    until(lambda: not list(tmp_path.iterdir()))


def test_a_host_too_many_waits_for_the_next_life(met: Hosts, port: int, started: list[Started]) -> None:
    first = Agent(port, 2)
    assert met.meet(again=False) == 2
    late = Agent(port, 1)
    until(lambda: met._waiting)
    assert met.waiting() == "", "all ranks are there"
    met.end()
    assert (first.ended(), late.ended()) == ("", "")


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("secret", r"another secret \(INSITU_RANKS_SECRET\)"),
        ("insitu", r"insitu 9\.9 \(other\) there, .* at the learner"),
        ("torch", r"torch 1\.0 there, .* at the learner"),
        ("clock", r"the clocks differ by \+60 s"),
        ("ranks", r"--ranks 3: train\.ranks takes 2 of other hosts"),
        ("model", r"its weights are \w{12}, \w{12} at the learner"),
        ("folder", r"no-such has no model on .*: give --model FOLDER"),
    ],
)
def test_a_host_that_does_not_fit_gets_the_reason_in_a_line(
    met: Hosts, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any, what: str, line: str
) -> None:
    model = None
    if what == "secret":
        monkeypatch.setenv(SECRET, "wrong")
    elif what == "insitu":
        monkeypatch.setattr(host_agent, "code_identity", lambda names: "9.9 (other)")
    elif what == "torch":
        monkeypatch.setattr(host_agent, "torch_version", lambda: "1.0")
    elif what == "clock":
        monkeypatch.setattr(host_agent, "clock", lambda: time.time() + 60)
    elif what == "model":
        model = tmp_path / "other"
        save_model(small_model(1), model)
    elif what == "folder":
        model = tmp_path / "no-such"
    error = Agent(port, 3 if what == "ranks" else 1, model).ended()
    assert re.fullmatch(rf"the learner at 127\.0\.0\.1:{port} refuses this host: .*{line}.*", error)
    until(lambda: "refused: " in capfd.readouterr().err)
    assert not met._waiting
    assert "wrong" not in error


def test_a_learner_that_does_not_know_the_secret_learns_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        agent = Agent(port, 1)
        link = HostLink(server.accept()[0])
        link.send({"op": "challenge", "nonce": "00"})
        said = link.expect("hello")
        assert KEY not in str(said)
        link.send({"op": "welcome", "proof": "00"})
        assert "the learner has another secret" in agent.ended()
        link.close()


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", encode({"op": "hello"}), b"x" * 200_000])
def test_strangers_are_dropped(met: Hosts, port: int, junk: bytes, started: list[Started]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(20)
        stranger.sendall(junk)
        try:
            while stranger.recv(1 << 16):
                pass
        except ConnectionError:
            pass
    agent = Agent(port, 2)
    assert met.meet(again=False) == 2
    met.end()
    assert agent.ended() == ""


def test_a_host_whose_link_ends_is_lost_and_comes_back(
    met: Hosts, port: int, started: list[Started], model: Path
) -> None:
    agent = Agent(port, 2)
    met.meet(again=False)
    met.start(1, 3)
    until(lambda: len(started) == 2)
    (host,) = met.world
    host.link.close()
    until(lambda: met._lost)
    with pytest.raises(RankLostError, match=r"host .* is lost"):
        met.send(b"")
    with pytest.raises(RankLostError), met.working():
        pass
    until(lambda: all(one.killed for one in started))
    met.close()
    again = Hosts(met._config, model)
    try:
        assert again.meet(again=True) == 2
        again.end()
        assert agent.ended() == ""
    finally:
        again.close()


def test_a_host_that_is_silent_is_lost(met: Hosts, port: int, capfd: Any) -> None:
    """As behind a cut cable: nothing closes the link."""
    sock = socket.create_connection(("127.0.0.1", port))
    link = HostLink(sock)
    about = {"name": "mute", "ranks": 2, "insitu": code_identity(hosts.PACKAGES), "torch": torch_version()}
    greet(link, KEY, {**about, "clock": time.time()})
    folder = Path(link.expect("model")["folder"])
    link.send({"op": "ready", "weights": weights_digest(folder)})
    met.meet(again=False)
    until(lambda: met._lost)
    assert met._lost == "host mute is lost: nothing was heard for 5 s"
    link.close()


def test_a_rank_that_dies_ends_the_work_of_its_host(met: Hosts, port: int, started: list[Started]) -> None:
    Agent(port, 2)
    met.meet(again=False)
    met.start(1, 3)
    until(lambda: len(started) == 2)
    started[1].exit_line = "rank 2 died (exit status -9)"
    until(lambda: met._lost)
    assert met._lost.endswith("is lost: rank 2 died (exit status -9)")


def test_the_key_takes_a_number_or_ranks_of_hosts() -> None:
    made = TrainConfig.of(load_config(None, ["train.ranks=2+4@10.0.0.1:29400"]))
    assert (made.ranks_here, made.world, made.meeting) == (2, 6, "10.0.0.1:29400")
    named = describe_hosts(load_config(None, ["train.ranks=2+4@0.0.0.0:29400"]))
    assert f"insitu ranks {socket.gethostname()}:29400 --ranks K" in named[0]
    made = TrainConfig.of(load_config(None, ["train.ranks=3"]))
    assert (made.ranks_here, made.world, made.meeting) == (3, 3, "")
    for wrong in ("0", "2+4", "2+0@h:1", "2@h:1", "2+2@h", "2+2@h:0", "2+2@h:70000", "2+2@:1", "x"):
        with pytest.raises(ConfigError, match=r"train\.ranks.*must be a number from 1, or HERE\+THERE@HOST"):
            load_config(None, [f"train.ranks={wrong}"])


def test_hosts_of_equally_many_ranks_have_a_copy_each_of_a_sharded_model() -> None:
    assert TrainConfig.model_validate({"ranks": "1+1@h:1", "shard": True, "policy": {"kind": "hf"}}).shard
    assert [shards_of(hosts) for hosts in ([2, 2], [4, 4, 4], [2], [2, 1], [1, 1, 1])] == [2, 4, 2, 3, 3]


def test_a_host_that_is_lost_again_and_again_is_not_waited_for(
    port: int, model: Path, started: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "waits_s", lambda config, *, again: 1e6)
    config = TrainConfig(ranks=f"1+2@127.0.0.1:{port}", step_timeout_s=80.0)
    losses = LostHosts(tmp_path / "lost")
    for _ in range(2):
        losses.note(f"{socket.gethostname()} 127.0.0.1", 2)
    met = Hosts(config, model, tmp_path / "lost")
    try:
        Agent(port, 2)
        until(lambda: met._waiting)
        assert met.meet(again=True) == 0
        assert met.waiting() == ""
        met._losses = LostHosts(None)
        assert met.waiting().startswith("2 of ")
        met.end()
    finally:
        met.close()


def test_without_the_secret_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(ConfigError, match=f"{SECRET} is not set"):
        attend("127.0.0.1:1", 1, None, print)
    monkeypatch.setenv(SECRET, KEY)
    with pytest.raises(ConfigError, match="is neither HOST:PORT nor a port"):
        attend("nowhere", 1, None, print)
