"""A host that is lost again and again takes part again after pauses that grow."""

from __future__ import annotations

from pathlib import Path

from insitu_train.learner.lost_hosts import FIRST_PAUSE_S, LONGEST_PAUSE_S, LostHosts


def test_the_pause_doubles_with_each_loss_after_the_first(tmp_path: Path) -> None:
    now = [1000.0]
    lost = LostHosts(tmp_path / "lost", lambda: now[0])
    assert lost.pause_s("a") == 0
    assert [lost.note("a", 2) for _ in range(4)] == [0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert (lost.pause_s("b"), lost.paused_ranks()) == (0, 2)
    now[0] += 4 * FIRST_PAUSE_S
    assert (lost.pause_s("a"), lost.paused_ranks()) == (0, 0)
    for _ in range(20):
        lost.note("a", 2)
    assert lost.pause_s("a") == LONGEST_PAUSE_S


def test_the_next_life_of_the_learner_knows_the_losses(tmp_path: Path) -> None:
    for _ in range(2):
        LostHosts(tmp_path / "lost", lambda: 5.0).note("a", 3)
    again = LostHosts(tmp_path / "lost", lambda: 6.0)
    assert (again.pause_s("a"), again.paused_ranks()) == (FIRST_PAUSE_S - 1, 3)
    (tmp_path / "lost").write_text("cut off")
    assert LostHosts(tmp_path / "lost").paused_ranks() == 0
    assert LostHosts(None).note("a", 1) == 0
