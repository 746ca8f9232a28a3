"""Text of a rollout's main line, for reward functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from insitu.config import Config, model_folder
from insitu.errors import RecordError, boundary
from insitu.gateway.text_log import last_record
from insitu.grading.reward import Transcript, main_line
from insitu.storage.run_dir import SESSIONS
from insitu.types import Rollout


def transcript_reader(config: Config) -> Transcript:
    """Return a function from a rollout to its text."""
    if config.engine.kind == "upstream":
        records = Path(config.run.dir) / SESSIONS
        return lambda rollout: _recorded(records, rollout)

    @lru_cache(maxsize=1)
    def tokenizer() -> Any:
        return Tokenizer.from_file(str(model_folder(config) / "tokenizer.json"))

    def decode(rollout: Rollout) -> str:
        parts = [part for turn in main_line(rollout.turns) for part in (turn.context_ids, turn.ids)]
        ids = np.concatenate(parts).tolist() if parts else []
        return str(tokenizer().decode(ids, skip_special_tokens=False))

    return decode


def _recorded(records: Path, rollout: Rollout) -> str:
    """Return request and reply of the last call of the rollout's last attempt as JSON."""
    record = last_record(records, rollout.id)
    calls = [entry for entry in _lines(record) if entry.get("reply")] if record else []
    if not calls:
        return ""
    return json.dumps({"request": calls[-1]["request"], "reply": calls[-1]["reply"]}, ensure_ascii=False)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    # Text has more line breaks than bytes, and JSON has them within its strings.
    with boundary(RecordError, f"read {file}"), file.open("rb") as lines:
        yield from map(json.loads, lines)
