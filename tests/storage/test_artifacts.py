"""What is kept of agents' sandboxes: where it lies, that no name leads elsewhere, and that it stays
bounded."""

from __future__ import annotations

from pathlib import Path

from helpers_record import make_rollout

from insitu.storage.artifacts import AgentArtifacts


def kept(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_they_lie_by_rollout_attempt_and_path(tmp_path: Path) -> None:
    odd = {"/work/a/../../../b": b"x", "relative": b"x", "/": b"x", "/work/\0": b"x", "/w/" + "n" * 300: b"x"}
    AgentArtifacts(tmp_path / "artifacts").keep(
        make_rollout("train/00001/000/00"), {"/home/agent/log": b"one", "/work/é": b"two", **odd}
    )
    assert kept(tmp_path) == {
        "artifacts/train-00001-000-00/2/home/agent/log": b"one",
        "artifacts/train-00001-000-00/2/work/é": b"two",
    }


def test_the_newest_rollouts_are_kept_also_after_a_resume(tmp_path: Path) -> None:
    for start in (0, 3):
        artifacts = AgentArtifacts(tmp_path, max_rollouts=2)
        for number in range(start, start + 3):
            artifacts.keep(make_rollout(f"train/00001/000/{number:02}"), {"/work/n": b"%d" % number})
    assert kept(tmp_path) == {f"train-00001-000-0{n}/2/work/n": b"%d" % n for n in (4, 5)}
