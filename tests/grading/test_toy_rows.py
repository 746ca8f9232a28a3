"""The row gate over the tasks that ship: each family's base must fail, each gold must pass."""

from __future__ import annotations

import pytest

from insitu.grading.grader import Grader
from insitu.sandbox.local import LocalBackend
from insitu.tasks.toy import FAMILIES, ToySource
from insitu.types import Limits

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("category", FAMILIES)
async def test_toy_tasks_pass_the_row_gate(category: str) -> None:
    grader = Grader(LocalBackend())
    source = ToySource(Limits(), kinds=[category])
    for task in (*source.tasks("train", 0, 1), *source.tasks("eval", 0, 1)):
        assert task.category == category
        await grader.validate(task, source.oracle(task), repeats=1)
