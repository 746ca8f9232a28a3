"""The order of training tasks is that of the configured sampler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, TaskError
from insitu.runtime.preflight import open_mix
from insitu.tasks.base import TaskSource
from insitu.tasks.mix import TaskMix, TaskSet
from insitu.tasks.toy import ToySource
from insitu.types import Limits, Task
from insitu_train.samplers import (
    ADMITTED,
    FLOOR,
    UNSEEN,
    GroupOutcome,
    History,
    Indices,
    TaskDraws,
    check_draws,
    learning_signal,
    signal,
    within_limits,
)

MINE = """
def backwards(draws, size, seed):
    return 9 - draws
def wrong(draws, size, seed):
    return draws / 2
def broken(draws, size, seed):
    return draws[7]
"""


def draws(source: TaskSource, *overrides: str) -> Callable[[int], Task]:
    return TaskDraws(TaskMix([TaskSet(arm=load_config(None, overrides).arms[""], source=source)]))


def test_each_draw_is_the_next_task_by_default() -> None:
    source = ToySource(Limits())
    draw = draws(source)
    assert [draw(number).id for number in (0, 3)] == [source.tasks("train", n, 1)[0].id for n in (0, 3)]


def test_a_sampler_of_the_user_chooses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    source = ToySource(Limits())
    draw = draws(source, f"tasks.sampler={tmp_path}/mine.py:backwards")
    assert draw(2) == source.tasks("train", 7, 1)[0]
    with pytest.raises(TaskError, match="backwards returned .* expected an index"):
        draw(10)
    with pytest.raises(TaskError, match="wrong returned .* expected an index"):
        draws(source, f"tasks.sampler={tmp_path}/mine.py:wrong")(1)
    with pytest.raises(TaskError, match=r"mine.py:broken raised IndexError\(.*mine.py line 7"):
        draws(source, f"tasks.sampler={tmp_path}/mine.py:broken")(1)
    with pytest.raises(ConfigError, match="unknown name 'epoch' of kind samplers; did you mean epochs"):
        load_config(None, ["tasks.sampler=epoch"])


def history(*groups: tuple[int, int, int]) -> History:
    """Rows of (task, graded, solved) for rewards 0 and 1."""
    rows = [(task, graded, solved, solved, 0) for task, graded, solved in groups]
    return np.array(rows, np.float64).reshape(-1, 5)


def counts(size: int, seen: History, n: int = 1000, seed: int = 0) -> list[int]:
    return np.bincount(signal(np.arange(n), size, seed, seen), minlength=size).tolist()


def test_the_signal_of_a_task_is_p_times_1_minus_p_of_its_newest_groups() -> None:
    seen = history((0, 8, 0), (0, 8, 4), (0, 8, 8), (1, 8, 8), (1, 8, 8), (2, 4, 1), (4, 0, 0))
    assert learning_signal(5, seen).tolist() == [0.75 * 0.25, 0.0, 0.75 * 0.25, UNSEEN, UNSEEN]
    partial = np.array([(0, 4, 2.0, 1.0), (1, 4, 2.0, 2.0)])
    assert learning_signal(2, partial).tolist() == [0.0, 0.25]


def test_the_signal_of_long_histories_is_that_of_each_task_alone() -> None:
    random = np.random.default_rng(0)
    tasks, graded = random.integers(0, 300, 2000), random.integers(0, 9, 2000)
    rewards = [random.choice([0.0, 0.3, 1.0], n) for n in graded]
    seen = np.array([(t, len(r), r.sum(), (r * r).sum()) for t, r in zip(tasks, rewards, strict=True)])
    expected = []
    for task in range(400):
        newest = [row for row in seen if row[0] == task and row[1] > 0][-2:]
        n, total, squares = np.sum(newest, axis=0)[1:] if newest else (0, 0, 0)
        expected.append(max(0.0, squares / n - (total / n) ** 2) if n else UNSEEN)
    assert learning_signal(400, seen).tolist() == expected


def test_the_history_is_made_once_for_all_draws_of_a_step(tmp_path: Path) -> None:
    found: list[History] = []

    def kept(draws: Indices, size: int | None, seed: int, history: History) -> Indices:
        found.append(history)
        return draws

    settled: list[GroupOutcome] = []
    mix = open_mix(load_config(None, {"tasks.sampler": kept}, {"tasks": sets(tmp_path)[:1]}))
    draw = TaskDraws(mix, lambda: settled)
    for number in (0, 1):
        draw(number)
    settled = [GroupOutcome(task_set="a", task_id="a4", graded=2, reward_sum=1.0, square_sum=1.0)]
    for number in (2, 3):
        draw(number)
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert [history[:, 1:].tolist() for history in found[1:3]] == [[], [[2.0, 1.0, 1.0, 0.0]]]


def test_each_task_is_drawn_by_its_signal_and_none_is_forgotten() -> None:
    seen = history((0, 8, 4), (1, 8, 1), (2, 8, 8), (3, 8, 0))
    drawn = counts(4, seen)
    share = [0.25, 0.109375, 0.0, 0.0]
    expected = [1000 * (FLOOR / 4 + (1 - FLOOR) * s / sum(share)) for s in share]
    assert all(abs(n - e) < 5 for n, e in zip(drawn, expected, strict=True))
    # a retired task that fails again in a draw of the floor comes back
    assert counts(4, np.concatenate([seen, history((2, 8, 4))]))[2] > 200


def test_a_draw_is_a_pure_function_and_steps_seldom_repeat_a_task() -> None:
    seen = history((5, 8, 8), (7, 8, 2))
    chosen = signal(np.arange(40), 60, 3, seen)
    assert [int(signal(np.array([n]), 60, 3, seen)[0]) for n in range(40)] == chosen.tolist()
    assert len({*chosen[:20].tolist()}) >= 19
    assert signal(np.arange(40), 60, 4, seen).tolist() != chosen.tolist()


def test_tasks_are_admitted_in_order_as_others_retire() -> None:
    size = ADMITTED + 100
    assert max(signal(np.arange(5000), size, 0, history())) == ADMITTED - 1
    solved = history(*[(task, 8, 8) for task in range(30)])
    drawn = counts(size, solved, 5000)
    assert max(n for n, times in enumerate(drawn) if times) == ADMITTED + 29
    assert sum(drawn[:30]) < 5000 * FLOOR
    everything = history(*[(task, 8, 8) for task in range(size)])
    assert min(counts(size, everything, 5000)) > 0


def test_the_history_is_that_of_the_own_set(tmp_path: Path) -> None:
    mix = open_mix(load_config(None, ["tasks.sampler=signal"], {"tasks": sets(tmp_path)}))
    assert [one.name for one in mix.sets] == ["a", "b"]
    settled: list[GroupOutcome] = []
    draw = TaskDraws(mix, lambda: settled)
    ids = mix.sets[0].train_ids()
    settled += [
        GroupOutcome(task_set="a", task_id=name, graded=4, reward_sum=4.0, square_sum=4.0) for name in ids[1:]
    ]
    tasks = [draw(number) for number in range(400)]
    of_a, of_b = (Counter(task.id for task in tasks if task.part == part) for part in "ab")
    assert of_a[ids[0]] > 170
    assert len(of_b) == 6
    assert max(of_b.values()) < 40
    # a draw of an earlier process is found by its stored name, whatever the history is now
    assert [draw.again(number, tasks[number].id) for number in (3, 4)] == tasks[3:5]


def test_a_task_whose_rollouts_reach_limits_again_and_again_is_left_out() -> None:
    def after(*groups: tuple[int, int]) -> list[int]:
        seen = np.array([(task, 8, 0, 0, reached) for task, reached in groups], np.float64).reshape(-1, 5)
        return within_limits(np.arange(6), 3, 0, seen).tolist()

    plain = after((0, 2), (2, 2))
    assert [sorted(plain[:3]), sorted(plain[3:])] == [[0, 1, 2], [0, 1, 2]]
    assert plain == after()
    left = after((1, 1), (1, 2))
    assert {*left} == {0, 2}
    assert [one for one, was in zip(left, plain, strict=True) if was != 1] == [
        one for one in plain if one != 1
    ]
    assert {*after((1, 8), (2, 3))} == {0}
    with pytest.raises(TaskError, match="3 rollouts of each task reached a limit"):
        after((0, 3), (1, 3), (2, 4))
    with pytest.raises(TaskError, match="needs a set with an end"):
        within_limits(np.arange(1), None, 0, history())


def test_a_task_left_out_stays_out_in_later_epochs(tmp_path: Path) -> None:
    tables = sets(tmp_path)[:1]
    mix = open_mix(load_config(None, ["tasks.sampler=within_limits"], {"tasks": tables}))
    ids = mix.sets[0].train_ids()
    settled: list[GroupOutcome] = []
    draw = TaskDraws(mix, lambda: settled)
    assert Counter(draw(number).id for number in range(18)) == dict.fromkeys(ids, 3)
    out = GroupOutcome(task_set="a", task_id=ids[3], graded=8, reward_sum=0, square_sum=0, truncated=3)
    settled = [out]
    later = Counter(draw(number).id for number in range(18, 36))
    assert later.keys() == {*ids} - {ids[3]}
    assert min(later.values()) >= 3


def test_a_set_that_cannot_be_drawn_from_is_refused(tmp_path: Path) -> None:
    everything = {"eval_share": 1.0}
    tables = [sets(tmp_path)[0], {**sets(tmp_path)[1], **everything, "weight": 0.0}]
    check_draws(open_mix(load_config(None, tables={"tasks": tables})))
    tables[0] |= everything
    tables[1]["weight"] = 1.0
    with pytest.raises(ConfigError, match=r"^tasks.a: the train split of jsonl has 0 tasks"):
        check_draws(open_mix(load_config(None, tables={"tasks": tables})))
    with pytest.raises(ConfigError, match=r"tasks.sampler = signal: toy has tasks without end"):
        check_draws(open_mix(load_config(None, ["tasks.sampler=signal"])))


@pytest.mark.parametrize("sampler", ["epochs", "signal"])
def test_a_draw_of_an_earlier_process_is_of_the_same_task_or_refused(tmp_path: Path, sampler: str) -> None:
    tables = sets(tmp_path)
    config = load_config(None, [f"tasks.sampler={sampler}"], {"tasks": tables})
    before = TaskDraws(open_mix(config))
    drawn = [before(number) for number in range(12)]
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace('"id": "a', '"id": "new'))
    again = TaskDraws(open_mix(config)).again
    assert [again(number, drawn[number].id) for number in range(1, 12, 2)] == drawn[1::2]
    now = "no longer there" if sampler == "signal" else f"now new{drawn[2].id[1:]}"
    was = f"draw 1 of tasks.a was task {drawn[2].id}, {now}"
    with pytest.raises(TaskError, match=f"the data set has changed since the run began: {was}"):
        again(2, drawn[2].id)


def sets(folder: Path) -> list[dict[str, object]]:
    row = {"entry": "m.py", "files": {"m.py": "x = 1\n"}}
    row["cases"] = [{"function": "f", "args": [], "expected": 2}]
    found: list[dict[str, object]] = []
    for name in "ab":
        path = folder / f"{name}.jsonl"
        lines = [{**row, "id": f"{name}{n}", "prompt": f"Fix {name}{n}."} for n in range(6)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found.append({"name": name, "source": "jsonl", "path": str(path), "eval_share": 0.0})
    return found
