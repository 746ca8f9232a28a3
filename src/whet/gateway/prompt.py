"""The ids between what a request continues and the reply to it: only what is new. Pure.

Callers: turn, which samples behind them; retold, which puts a teacher's words there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from whet.capture.drift import PromptPlan
from whet.capture.forest import Forest
from whet.render.family import Family
from whet.types import IntArray, Message, ModelRequest


def leading_system(messages: Sequence[Message]) -> list[Message]:
    """The system messages that a conversation begins with: they belong to the root block."""
    return list(takewhile(lambda m: m.role == "system", messages))


def new_ids(family: Family, forest: Forest, plan: PromptPlan, request: ModelRequest) -> IntArray:
    """Raises RenderError."""
    if plan.base is None:
        parts = [family.open(leading_system(request.messages), request.tools)]
        parts.append(family.append(plan.replace))
    else:
        said = forest.sampled(plan.base)
        parts = [family.join(said.ids, said.finish, plan.replace)]
    parts.append(family.generation_prompt(request.messages[-1].role))
    return np.concatenate(parts).astype(np.int32, copy=False)
