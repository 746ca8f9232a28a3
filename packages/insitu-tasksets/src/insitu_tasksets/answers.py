"""Tasks of environments that score an answer: the content of a file that the agent writes.

With `harness.agent = "single_turn"` the whole reply becomes that file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.errors import TaskError, boundary
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.shared import LimitsRow, make_item, text_tree
from insitu.types import FinishedRollout, GradingPlan, Oracle

ANSWER = "answer.txt"
_ASKED = f"\n\nPut your answer into the file {ANSWER}; without tools, your reply is its content."


def answer_task(id: str, prompt: str, runner: str, options: LoadOptions, wall_s: float | None = None) -> Item:
    """Return a task without hidden tests whose result is the answer; raise TaskError.

    runner: one of `REWARD_ONLY`.
    """
    options.allow_untested()
    return make_item(
        id=id,
        prompt=prompt + _ASKED,
        files=text_tree({ANSWER: "\n"}, ANSWER),
        grading=GradingPlan(runner=runner, entry=ANSWER),
        limits=LimitsRow.model_validate({"wall_s": wall_s}).over(options.limits),
        oracle=Oracle(task_id=id),
    )


def answer_of(rollout: FinishedRollout) -> str:
    """Return the agent's answer; empty if the file is missing."""
    entry = rollout.files.get(ANSWER)
    return "" if entry is None else entry.content.decode("utf-8", "replace").strip()


def named_or_file(path: str, key: str, *others: str) -> Mapping[str, Any]:
    """Return `{key: path}`, or the keys of a TOML file with `key` or another; raise TaskError."""
    if not path.endswith(".toml"):
        # `Path` makes one slash of the two in a URL.
        return {key: path.replace(":/", "://", 1) if "://" not in path else path}
    with boundary(TaskError, f"read {path}"):
        keys = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    if not any(isinstance(keys.get(name), str) for name in (key, *others)):
        raise TaskError(f"{path} needs the key {' or '.join((key, *others))}")
    return keys
