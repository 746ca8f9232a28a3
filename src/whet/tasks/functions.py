"""The user's own functions, named by dotted path in [tasks]: they run on the host, in the controller.

transform_sample(row: dict) -> dict | None                  before the schema; None leaves the row out
build_action(response: str, task: Task) -> {path: text}     a reply without an agent becomes files
evaluate_response(row: dict, answer: dict, verdict) -> float  the reward, 0 to 1, of a graded answer
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whet.errors import ConfigError
from whet.tasks.rows import RawRow
from whet.types import Outcome, Task, Tree, Verdict

log = logging.getLogger(__name__)

FINAL = (Outcome.INFRA, Outcome.TAMPERED, Outcome.REFUSED)
"""Outcomes that no function of the user's may turn into a reward."""
MAX_SAID_CHARS = 300


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
    that the answer changed, and the verdict. The answer is the model's: where the function raises, or gives
    no number from 0 to 1, that answer earns nothing and the run goes on."""
    if verdict.outcome in FINAL:
        return verdict
    changed = {
        path: entry.content.decode("utf-8", "replace")
        for path, entry in after.items()
        if task.files.get(path) != entry
    }
    try:
        reward = function(dict(row), changed, verdict)
        number = isinstance(reward, int | float) and not isinstance(reward, bool)
        problem = "" if number and 0 <= reward <= 1 else f"gave {reward!a}, not a number from 0 to 1"
    except Exception as error:  # noqa: BLE001 - the boundary: what an odd answer makes of it must not end the run
        reward, problem = 0.0, f"raised {error!a}"
    if not problem:
        return replace(verdict, reward=float(reward))
    reason = f"evaluate_response {problem[:MAX_SAID_CHARS]}"
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    log.warning("reward 0 task=%s function=%s: %s", task.id, name, reason)
    return replace(verdict, reward=0.0, reason=f"{reason}; {verdict.reason}" if verdict.reason else reason)
