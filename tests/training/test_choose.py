"""Which stored rollouts are imitated: every one is chosen, or left out for one named reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sft_lab import said
from train_lab import segment

from insitu.config.training import RowRules
from insitu.errors import TrainError
from insitu.storage.store import Store
from insitu.types import Rollout, Status
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.step import PlanConfig
from insitu_train.sft.run import plan_examples, schedule
from insitu_train.sft.selection import Selection, SelectionRules, choose, explain, stored_tokens

pytestmark = pytest.mark.slow

WANTED = SelectionRules(min_reward=1.0, per_task=2, held_out=False, truncated=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "run.sqlite") as made:
        yield made


def put(store: Store, made: Rollout) -> None:
    phase, step, group, slot = made.id.split("/")
    store.put_rollout(phase, int(step), int(group), int(slot), made)


def chosen(store: Store, wanted: SelectionRules = WANTED, *, rollouts_held_out: bool = False) -> Selection:
    choice = choose(store, wanted, stored_tokens(store), rollouts_held_out=rollouts_held_out)
    assert choice.seen == len(choice.lessons) + sum(choice.left_out.values())
    return choice


def names(choice: Selection) -> list[str]:
    return [lesson.rollout_id for lesson in choice.lessons]


def test_each_reason_is_told_and_counted_once(store: Store) -> None:
    put(store, said("eval_before/0/0/0", "a", "held out"))
    put(store, said("train/1/0/0", "a", "good"))
    put(store, said("train/1/0/1", "a", "wrong", 0.0))
    put(store, said("train/1/0/2", "a", "lost", None, Status.INFRA_FAILED))
    put(store, said("train/1/0/3", "a", "crashed", 1.0, Status.AGENT_FAILED))
    put(store, said("train/1/0/4", "a", "cut", 1.0, Status.TRUNCATED))
    empty = said("train/1/0/5", "b", "no tokens")
    put(
        store,
        replace(
            empty, trajectory=replace(empty.trajectory, segments=(), ledger=type(empty.trajectory.ledger)())
        ),
    )
    choice = chosen(store, WANTED.changed(truncated=False))
    assert names(choice) == ["train/1/0/0"]
    assert choice.left_out == {
        "agent_failed": 1, "held_out": 1, "low_reward": 1, "no_tokens": 1, "not_graded": 1, "truncated": 1,
    }  # fmt: skip
    assert explain(choice).startswith("7 rollouts, 1 chosen; 1 of an agent that failed; 1 of held-out tasks")
    assert names(chosen(store)) == ["train/1/0/0", "train/1/0/4"]


def test_a_task_gives_its_best_and_of_equals_the_latest_up_to_the_cap(store: Store) -> None:
    for step, reward in ((1, 0.5), (2, 1.0), (3, 0.7), (4, 0.7)):
        put(store, said(f"train/{step}/0/0", "a", f"reply {step}", reward))
    wanted = WANTED.changed(min_reward=0.5)
    assert names(chosen(store, wanted)) == ["train/2/0/0", "train/4/0/0"]
    assert chosen(store, wanted).left_out == {"per_task": 2}
    assert len(chosen(store, wanted.changed(per_task=0)).lessons) == 4


def test_the_same_words_for_the_same_task_are_taken_once(store: Store) -> None:
    put(store, said("train/1/0/0", "a", "same"))
    put(store, said("train/1/0/1", "a", "same"))
    put(store, said("train/1/1/0", "b", "same"))
    choice = chosen(store)
    assert names(choice) == ["train/1/0/1", "train/1/1/0"]
    assert choice.left_out == {"duplicate": 1}


def test_rollouts_of_held_out_tasks_are_used_only_when_asked_for(store: Store) -> None:
    put(store, said("rollout/0/0/0", "a", "x"))
    put(store, said("eval_after/3/0/0", "b", "y"))
    assert chosen(store, rollouts_held_out=True).left_out == {"held_out": 2}
    assert names(chosen(store)) == ["rollout/0/0/0"]
    asked = chosen(store, WANTED.changed(held_out=True), rollouts_held_out=True)
    assert names(asked) == ["rollout/0/0/0", "eval_after/3/0/0"]


def test_every_pass_has_each_rollout_once_in_an_order_of_its_own() -> None:
    ids = [f"train/1/0/{n}" for n in range(10)]
    steps = schedule(ids, per_step=4, epochs=2, seed=0)
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    first, second = [i for s in steps[:3] for i in s], [i for s in steps[3:] for i in s]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert steps == schedule(ids, per_step=4, epochs=2, seed=0) != schedule(ids, per_step=4, epochs=2, seed=1)


def test_a_step_weighs_every_token_alike_and_shares_prefixes(store: Store) -> None:
    for slot, text in enumerate(("one", "two words", "three words here")):
        put(store, said(f"train/1/0/{slot}", "a task with a prompt of some length", text))
    lessons = chosen(store, WANTED.changed(per_task=0)).lessons
    plan = plan_examples(lessons, PlanConfig(token_budget=4096))
    tokens = sum(x.tokens for x in lessons)
    assert [row.weight for row in plan.rows] == [1 / tokens] * 3
    assert {row.advantage for row in plan.rows} == {1.0}
    assert plan.tokens == tokens == sum(int(row.mask.sum()) for row in plan.rows)
    assert isinstance(plan.batches[0], MicroBatch)
    assert plan.batches[0].prefix == int(plan.rows[0].mask.argmax())


def test_a_first_token_cannot_be_a_target(store: Store) -> None:
    put(store, said("train/1/0/0", "a", "x"))
    lesson = chosen(store).lessons[0]
    whole = replace(lesson.segments[0], mask=~lesson.segments[0].mask | True)
    with pytest.raises(TrainError, match="train/1/0/0 segment 0 token 0: the first token has no predecessor"):
        plan_examples([replace(lesson, segments=(whole,))], PlanConfig())


def forked(name: str) -> Rollout:
    """A sub-agent's row of 5 trained tokens, then the final row, which has 3 of its own of 6."""
    made = said(name, "a", "x")
    rows = [
        replace(segment(name, 0, range(20), [False] * 15 + [True] * 5, [-1.0] * 20), label="subagent"),
        segment(name, 1, [*range(17), 30, 31, 32], [False] * 17 + [True] * 3, [-1.0] * 20),
    ]
    ledger = type(made.trajectory.ledger)(captured=8, trained=8)
    return replace(made, trajectory=replace(made.trajectory, segments=tuple(rows), ledger=ledger))


@pytest.mark.parametrize(
    ("rules", "rows", "tokens", "counted", "words"),
    [
        (RowRules(), 2, 8, 8, ""),
        (RowRules(max_rows=1), 1, 3, 3, "5 tokens of the chosen in more rows than train.max_rows"),
        (RowRules(rows="collapse"), 1, 5, 5, "3 tokens of the chosen not on the final row of their rollout"),
        (RowRules(rows="final"), 1, 5, 8, "3 tokens of the chosen not on the final row of their rollout"),
    ],
)
def test_rows_are_those_that_training_would_take(
    store: Store, rules: RowRules, rows: int, tokens: int, counted: int, words: str
) -> None:
    put(store, forked("train/1/0/0"))
    choice = chosen(store, WANTED.changed(**rules.model_dump()))
    (lesson,) = choice.lessons
    plan = plan_examples([lesson], PlanConfig())
    assert (len(plan.rows), lesson.tokens, plan.tokens, lesson.counted) == (rows, tokens, tokens, counted)
    assert {row.weight for row in plan.rows} == {1 / counted}
    assert words in explain(choice)
    assert ("tokens of the chosen" in explain(choice)) == bool(words)


def test_a_rollout_of_too_long_rows_is_left_out_by_name(store: Store) -> None:
    put(store, forked("train/1/0/0"))
    put(store, said("train/1/1/0", "b", "x y z " * 20))
    choice = chosen(store, WANTED.changed(max_row_tokens=20))
    assert names(choice) == ["train/1/0/0"]
    assert choice.left_out == {"overlong": 1}
    assert "1 with all rows longer than train.max_row_tokens" in explain(choice)


def test_a_step_is_laid_out_as_configured(store: Store) -> None:
    put(store, forked("train/1/0/0"))
    (lesson,) = chosen(store).lessons
    tree = plan_examples([lesson], PlanConfig(layout="tree"))
    assert [(b.layout, b.tokens) for b in tree.batches] == [("tree", 23)]
    assert {b.layout for b in plan_examples([lesson], PlanConfig()).batches} == {"prefix"}
    # where attention costs much, rows that would be padded stay apart
    longer = segment("train/1/0/0", 1, range(100, 160), [False] * 55 + [True] * 5, [-1.0] * 60)
    unlike = replace(lesson, segments=(lesson.segments[0], longer))
    assert len(plan_examples([unlike], PlanConfig()).batches) == 1
    assert len(plan_examples([unlike], PlanConfig(pair_cost=1.0)).batches) == 2
