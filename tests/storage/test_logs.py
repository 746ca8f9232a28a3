"""Logs are bounded, redacted and silent; scratch folders of dead processes are found and removed."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers_record import make_rollout

from insitu.storage.logs import MAX_LOG_BYTES, AgentLogs, log_to
from insitu.storage.temp_dirs import remove_stale_scratch, scratch_folder
from insitu.types import Rollout


def failed(name: str, attempt: int = 1) -> Rollout:
    return dataclasses.replace(make_rollout(name, reward=None), attempt=attempt, error="sandbox vanished")


def test_one_file_per_rollout_holds_all_its_tries(tmp_path: Path) -> None:
    logs = AgentLogs(tmp_path)
    logs.keep(failed("train/00001/002/03"), b"one")
    logs.keep(failed("train/00001/002/03", 2), b"two")
    (file,) = tmp_path.iterdir()
    assert file.name == "train-00001-002-03.log"
    assert file.read_text() == (
        "--- attempt 1: infra_failed sandbox vanished\none\n"
        "--- attempt 2: infra_failed sandbox vanished\ntwo\n"
    )


def test_number_and_size_are_bounded_also_after_a_resume(tmp_path: Path) -> None:
    (tmp_path / "learner.log").write_text("")
    for slots in (range(4), (3, 4, 4)):
        logs = AgentLogs(tmp_path, max_logs=3)
        for slot in slots:
            logs.keep(failed(f"t/{slot}"), b"x" * MAX_LOG_BYTES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["learner.log", "t-2.log", "t-3.log", "t-4.log"]
    assert all(p.stat().st_size <= MAX_LOG_BYTES for p in tmp_path.iterdir())


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    logs = AgentLogs(tmp_path / "none")
    logs.keep(failed("a/b"), b"x")


def test_insitus_log_is_redacted_and_nothing_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = secrets.token_urlsafe(32)
    log = logging.getLogger("insitu.test")
    with log_to(tmp_path / "insitu.log"):
        log.warning("slow request key=%s", secret)
        try:
            raise ValueError(f"Bearer {secret}")
        except ValueError:
            log.exception("request failed")
        logging.getLogger("asyncio").error("Task exception was never retrieved")
    text = (tmp_path / "insitu.log").read_text()
    assert "WARNING insitu.test: slow request key=***" in text
    assert "ValueError: Bearer ***" in text
    assert "never retrieved" in text
    assert secret not in text
    assert capsys.readouterr() == ("", "")
    assert not [h for h in logging.getLogger().handlers if "insitu.log" in str(h)]


@pytest.mark.slow
def test_scratch_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("insitu.storage.temp_dirs.SOCKET_PARENT_BYTES", 4096)
    code = (
        "import os, sys, tempfile; from insitu.storage.temp_dirs import scratch_folder\n"
        "import insitu.storage.temp_dirs as scratch; scratch.SOCKET_PARENT_BYTES = 4096\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "with scratch_folder() as folder: (folder / 'g0').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=30)
    (left,) = tmp_path.iterdir()
    foreign = tmp_path / "insitu-notes"
    foreign.mkdir()
    with scratch_folder() as mine:
        remove_stale_scratch()
        assert sorted(tmp_path.iterdir()) == sorted([foreign, mine])
    assert not left.exists()
    assert list(tmp_path.iterdir()) == [foreign]
