"""Names of arms: what is stored of them is read back, and a configuration resolves its arms once."""

from __future__ import annotations

import pytest

from insitu.config import load_config
from insitu.types import ArmName, arm_of


@pytest.mark.parametrize(
    ("arm", "part", "label"),
    [
        (ArmName(task_set=""), "", ""),
        (ArmName(task_set="a"), "a", "a"),
        (ArmName(task_set="a", evaluation="e"), "a@e", "a@e"),
        (ArmName(task_set="", evaluation="e"), "@e", "@e"),
        (ArmName(task_set="a", agent="pi"), "a@+pi", "a+pi"),
        (ArmName(task_set="", agent="pi"), "@+pi", "pi"),
        (ArmName(task_set="a", evaluation="e", agent="pi"), "a@e+pi", "a+pi"),
    ],
)
def test_a_stored_name_is_read_back(arm: ArmName, part: str, label: str) -> None:
    assert (arm.part, arm.label) == (part, label)
    assert arm_of(part) == arm


def test_arms_are_resolved_once_and_not_copied_or_compared() -> None:
    config, again = (load_config(None, (), {"tasks": [{"name": "a"}, {"name": "b"}]}) for _ in range(2))
    assert list(config.arms) == ["a", "b"]
    assert config.arms is config.arms
    assert config == again
    changed = config.model_copy(update={"tasks": config.tasks[:1]})
    assert list(changed.arms) == ["a"]
    assert "arms" not in dict(config)
    assert "_arms" not in dict(config)
