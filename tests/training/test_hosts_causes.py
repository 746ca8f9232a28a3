# ruff: noqa: F811
"""What a run says of a host that is lost, and what it counts: the cause, whoever notices first.
Both ends are threads of this process; ranks are not started."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hosts_lab import KEY, free_port
from test_hosts import Agent, Started, model, port, started, until  # noqa: F401
from train_lab import small_model

from insitu.errors import TrainError
from insitu_train.channel.host_link import SECRET
from insitu_train.channel.rpc import encode
from insitu_train.embedded.model import save_model
from insitu_train.learner import host_agent
from insitu_train.learner.hosts import Hosts
from insitu_train.learner.lost_hosts import LostHosts
from insitu_train.options import TrainConfig
from insitu_train.trainer.distributed import RankLostError


def two_hosts(port: int, model: Path, losses: Path | None = None) -> Hosts:
    """Return a learner with two hosts of a rank each that have started theirs."""
    found = Hosts(TrainConfig(ranks=f"1+2@127.0.0.1:{port}", step_timeout_s=20.0), model, losses)
    for _ in range(2):
        Agent(port, 1)
    assert found.meet(again=False) == 2
    found.start(1, 3)
    until(lambda: len(Started.every) == 2)
    return found


def test_a_rank_that_was_killed_is_the_cause_though_the_learner_notices_first(
    port: int, model: Path, started: list[Started], tmp_path: Path
) -> None:
    """Its connections end at once; its agent says so a second later."""
    losses = tmp_path / "lost"
    found = two_hosts(port, model, losses)
    try:
        line = "rank 2 died (exit status -9)"
        with pytest.raises(RankLostError, match=rf"^host .* is lost: {re.escape(line)}$"), found.working():
            next(one for one in started if one.place.rank == 2).exit_line = line
            raise RankLostError("sum over ranks: another rank died or did not answer (closed)")
    finally:
        found.close()
    assert LostHosts(losses).paused_ranks() == 0
    assert len(losses.read_text().splitlines()) == 1, "a host whose ranks die again and again waits"


def test_a_rank_that_was_left_alone_is_no_cause(
    port: int, model: Path, started: list[Started], tmp_path: Path
) -> None:
    """The host that says so first is not the one that is lost."""
    losses = tmp_path / "lost"
    found = two_hosts(port, model, losses)
    try:
        left, killed = started
        left.exit_line = f"rank {left.place.rank} died (exit status 3)"
        until(lambda: found._lost)
        assert not losses.exists()
        killed.exit_line = f"rank {killed.place.rank} died (exit status -9)"
        with pytest.raises(RankLostError, match=r"died \(exit status -9\)"):
            found.send(b"")
        assert losses.exists()
    finally:
        found.close()


def test_a_host_that_leaves_before_its_ranks_start_is_named(
    port: int, model: Path, started: list[Started]
) -> None:
    found = Hosts(TrainConfig(ranks=f"1+1@127.0.0.1:{port}", step_timeout_s=20.0), model)
    try:
        Agent(port, 1)
        assert found.meet(again=False) == 1
        found.world[0].link.close()
        with pytest.raises(RankLostError, match="^host .* is lost: "):
            found.start(1, 2)
    finally:
        found.close()


def test_a_folder_that_changes_while_its_host_waits_is_noticed(
    port: int, started: list[Started], tmp_path: Path
) -> None:
    """The first host may wait minutes for the last one: its ranks would read other weights than compared."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        save_model(small_model(0), folder)
    found = Hosts(TrainConfig(ranks=f"1+1@127.0.0.1:{port}", step_timeout_s=20.0), mine)
    try:
        agent = Agent(port, 1, theirs)
        assert found.meet(again=False) == 1
        save_model(small_model(1), theirs)
        found.start(1, 2)
        until(lambda: found._cause)
        assert "a model folder has changed" in found._cause
        assert not started
        until(lambda: "a model folder has changed; trying again" in agent.lines[-1])
    finally:
        found.close()


def test_all_ranks_meet_at_the_address_that_the_first_host_reached(
    port: int, model: Path, started: list[Started]
) -> None:
    """The store listens there only, and so does the group of rank 0."""
    found = Hosts(TrainConfig(ranks=f"1+2@0.0.0.0:{port}", step_timeout_s=20.0), model)
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            Agent(port, 1, address=address)
        assert found.meet(again=False) == 2
        found.start(4321, 3)
        until(lambda: len(started) == 2)
        assert {one.place.store for one in started} == {f"tcp://{found.here}:4321"}
        found.world[1].link.here = "10.0.0.1"
        with pytest.raises(TrainError, match=r"reached the learner at 10\.0\.0\.1, .* one address that each"):
            found.start(4321, 3)
    finally:
        found.close()


def test_hosts_that_did_not_come_are_told_an_address_that_they_can_reach(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setenv(SECRET, KEY)
    at = free_port()
    found = Hosts(TrainConfig(ranks=f"1+2@0.0.0.0:{at}", step_timeout_s=0.2), model)
    try:
        with pytest.raises(TrainError, match=rf"start `insitu ranks {socket.gethostname()}:{at}` there"):
            found.meet(again=False)
    finally:
        found.close()


def test_a_connection_that_is_reset_at_once_is_tried_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a learner that ends while a host connects."""

    def reset(*_: Any) -> socket.socket:
        return socket.socket()

    monkeypatch.setattr(host_agent, "GIVE_UP_S", 0.0)
    monkeypatch.setattr(host_agent.socket, "create_connection", reset)
    assert "no learner at" in Agent(port, 1).ended()


def test_a_host_says_which_of_its_ranks_died_of_itself(
    port: int, model: Path, started: list[Started], tmp_path: Path
) -> None:
    """The others end with it, at once."""
    found = Hosts(TrainConfig(ranks=f"1+2@127.0.0.1:{port}", step_timeout_s=20.0), model, tmp_path / "lost")
    try:
        Agent(port, 2)
        assert found.meet(again=False) == 2
        found.start(1, 3)
        until(lambda: len(started) == 2)
        for one, how in zip(started, (3, -9), strict=True):
            one.exit_line = f"rank {one.place.rank} died (exit status {how})"
        until(lambda: found._lost)
        assert found._lost.endswith("is lost: rank 2 died (exit status -9)")
    finally:
        found.close()


def test_a_rank_that_is_dead_before_a_command_is_named_too(
    port: int, model: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipe ends before its agent has looked."""

    def broken(one: Started, _: bytes) -> None:
        one.exit_line = f"rank {one.place.rank} died (exit status -9)"
        raise BrokenPipeError

    monkeypatch.setattr(Started, "send", broken)
    found = two_hosts(port, model)
    try:
        found.send(encode({"op": "step", "scores": ""}))
        until(lambda: found._cause)
        assert found._cause.endswith("died (exit status -9)")
    finally:
        found.close()
