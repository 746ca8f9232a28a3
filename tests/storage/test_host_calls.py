"""host_calls.jsonl: whole lines only, whatever tore the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import RecordError
from insitu.storage.host_calls import HostCallLog

CALL = {"index": 0, "name": "report", "arguments": "{}", "source": "model", "error": ""}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_that_a_kill_tore_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "host_calls.jsonl"
    HostCallLog(path).keep("train/00001/000/00", 1, [CALL])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    resumed = HostCallLog(path)
    assert path.stat().st_size > len(whole), "nothing is touched before there is something to write"
    resumed.keep("train/00001/000/00", 2, [CALL, {**CALL, "index": 1}])
    resumed.keep("train/00001/000/01", 1, [CALL])
    assert [(x["rollout_id"][-2:], x["attempt"], x["index"]) for x in lines(path)] == [
        ("00", 1, 0),
        ("00", 2, 0),
        ("00", 2, 1),
        ("01", 1, 0),
    ]
    assert {x["schema_version"] for x in lines(path)} == {1}


def test_a_full_disk_is_named() -> None:
    with pytest.raises(RecordError, match="disk full while writing /dev/full"):
        HostCallLog(Path("/dev/full")).keep("r", 1, [CALL])


def test_what_a_failed_write_tore_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "host_calls.jsonl"
    log = HostCallLog(path)
    with pytest.raises(RecordError, match="cannot write"):
        log.keep("r", 1, [CALL])
    path.parent.mkdir()
    path.write_bytes(b'{"half')
    log.keep("r", 2, [CALL])
    assert [x["attempt"] for x in lines(path)] == [2]
