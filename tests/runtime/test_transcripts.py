"""What a reward function reads of a provider's session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.gateway.text_log import TextCall, TextRecord, Usage, record_path
from insitu.runtime.transcripts import transcript_reader
from insitu.storage.run_dir import SESSIONS
from insitu.types import Ledger, Rollout, Status, Timings, Trajectory

USAGE = Usage(prompt_tokens=1, cached_tokens=0, sampled_tokens=1)


@pytest.mark.parametrize("code", [0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029])
async def test_a_record_is_read_whole_whatever_line_breaks_its_text_has(tmp_path: Path, code: int) -> None:
    said = f"one{chr(code)}two"
    arguments = ["engine.kind=upstream", "engine.urls=http://a", "engine.model=m", f"run.dir={tmp_path}"]
    record = TextRecord(record_path(tmp_path / SESSIONS, "r/0"), "r/0")
    for turn in range(2):
        await record.append(
            TextCall(
                turn=turn,
                path="chat/completions",
                status=200,
                complete=True,
                request=json.dumps({"turn": turn, "text": said}).encode(),
                reply=json.dumps({"text": said}, ensure_ascii=code < 0x20).encode(),
                truncated=False,
                usage=USAGE,
                cost=0.0,
                ms=1.0,
            )
        )
    rollout = Rollout(
        id="r/0",
        task_id="t",
        category="",
        status=Status.OK,
        reward=None,
        trajectory=Trajectory(segments=(), turns=(), ledger=Ledger()),
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(),
        attempt=1,
        error="",
    )
    read = json.loads(transcript_reader(load_config(None, arguments))(rollout))
    assert read == {"request": {"turn": 1, "text": said}, "reply": {"text": said}}
