"""Tasks of one's own, a few of them, on the model that ships: what is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.config import WARM_START, load_config
from insitu.errors import ConfigError
from insitu.evaluate.run import chosen_tasks, prepare_rollouts
from insitu.runtime.preflight import open_mix
from insitu.runtime.prompt_sizes import foreign_words
from insitu.types import Task
from insitu_train.evaluations import check_evaluations

CASE = {"function": "add", "args": [2, 3], "expected": 5}


def own_tasks(path: Path, prompt: str = "Repair app.py: add gives the wrong sum.", count: int = 3) -> Path:
    rows = [
        {"id": f"t{n}", "prompt": f"{prompt} {n}", "files": {"app.py": f"def add(a, b):\n    return {n}\n"}}
        for n in range(count)
    ]
    more = {"entry": "app.py", "cases": [CASE]}
    path.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    return path


def settings(tasks: Path, *more: str) -> list[str]:
    return ["tasks.source=jsonl", f"tasks.path={tasks}", "harness.agent=script", *more]


@pytest.mark.slow
def test_the_demos_model_is_named_where_it_cannot_know_the_tasks(tmp_path: Path) -> None:
    notes: list[str] = []
    own = settings(own_tasks(tmp_path / "t.jsonl"), "rollout.split=train", "tasks.eval_share=0.1")
    prepare_rollouts(load_config(None, own), notes.append)
    (note,) = [note for note in notes if "model.path" in note]
    assert note.startswith("the model is the demo's, which knows ")
    notes.clear()
    prepare_rollouts(load_config(None, ["harness.agent=script", "rollout.count=8"]), notes.append)
    assert [note for note in notes if "model.path" in note] == []


def test_another_model_and_toy_tasks_from_a_file_are_quiet(tmp_path: Path) -> None:
    mix = open_mix(load_config(None, []))
    assert foreign_words(WARM_START, mix.spread("train", 32)) == ""
    other = tmp_path / "model"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    strange = Task(id="t", prompt="Zwölf Boxkämpfer jagen Viktor.", files={})
    assert foreign_words(other, [strange]) == ""
    assert "knows 0 of the 6 words" in foreign_words(WARM_START, [strange])


@pytest.mark.parametrize(
    ("more", "cure"),
    [
        (
            ["rollout.count=4"],
            'the eval split has 0 of 3 tasks (tasks.eval_share); rollout.split = "train" takes',
        ),
        ([], 'rollout.split = "train" takes the others'),
        (["rollout.split=train", "rollout.count=4"], "the train split has 3 tasks: lower rollout.count"),
    ],
)
def test_too_few_tasks_are_an_error_with_its_cure(tmp_path: Path, more: list[str], cure: str) -> None:
    config = load_config(None, settings(own_tasks(tmp_path / "t.jsonl"), "tasks.eval_share=0.001", *more))
    with pytest.raises(ConfigError) as raised:
        chosen_tasks(config, open_mix(config))
    assert cure in str(raised.value)


def test_an_evaluation_of_more_tasks_than_are_held_out_names_the_key(tmp_path: Path) -> None:
    own = settings(own_tasks(tmp_path / "t.jsonl"), "tasks.eval_share=0.001", "eval.count=5")
    config = load_config(None, own)
    with pytest.raises(
        ConfigError, match=r"has 0 tasks in the eval split \(tasks.eval_share\); lower the count"
    ):
        check_evaluations(config.eval, open_mix(config))
