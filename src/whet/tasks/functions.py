"""The user's own functions, named by dotted path in [tasks]: they run on the host, in the controller.

transform_sample(row: dict) -> dict | None                  before the schema; None leaves the row out
build_action(response: str, task: Task) -> {path: text}     a reply without an agent becomes files
evaluate_response(row: dict, answer: dict, verdict) -> float  the reward, 0 to 1, of a graded answer
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whet.errors import ConfigError, TaskError
from whet.tasks.rows import RawRow
from whet.types import Outcome, Task, Tree, Verdict

FINAL = (Outcome.INFRA, Outcome.TAMPERED, Outcome.REFUSED)
"""Outcomes that no function of the user's may turn into a reward."""


def load_function(dotted: str) -> Callable[..., Any]:
    """The function at `package.module:name` or `package.module.name`. Raises ConfigError."""
    module, colon, name = dotted.partition(":")
    if not colon:
        module, _, name = dotted.rpartition(".")
    if not module or not name:
        raise ConfigError(f"{dotted!r} is no dotted path like package.module:function")
    try:
        found = importlib.import_module(module)
    except (ImportError, SyntaxError, ValueError) as error:
        raise ConfigError(f"cannot import {module} for {dotted}: {error}") from error
    value = vars(found).get(name)
    if not callable(value):
        raise ConfigError(f"{dotted}: {module} has no function {name}")
    return value  # type: ignore[no-any-return]


def reward_of(
    function: Callable[..., Any], row: RawRow, task: Task, after: Tree, verdict: Verdict
) -> Verdict:
    """`verdict` with the reward of the user's function. The function gets the row, the text of each file
    that the answer changed, and the verdict. Raises TaskError when it gives no number from 0 to 1."""
    if verdict.outcome in FINAL:
        return verdict
    changed = {
        path: entry.content.decode("utf-8", "replace")
        for path, entry in after.items()
        if task.files.get(path) != entry
    }
    reward = function(dict(row), changed, verdict)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise TaskError(f"task {task.id}: evaluate_response gave {ascii(reward)[:60]}, not a number")
    if not 0 <= reward <= 1:
        raise TaskError(f"task {task.id}: evaluate_response gave {reward}, not between 0 and 1")
    return replace(verdict, reward=float(reward))
