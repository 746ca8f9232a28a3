"""Several task sets in one run: their configuration, their shares of the draws, and tasks by set."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from insitu.config import dump_toml, load_config
from insitu.errors import ConfigError, TaskError
from insitu.evaluate.resume import TRAINING, resumed_config
from insitu.runtime.preflight import check_names, open_mix, prepare
from insitu.storage.run_dir import RunDir, name_run
from insitu.tasks.mix import _shares, schedule
from insitu_train.evaluations import check_evaluations
from insitu_train.samplers import TaskDraws

ROW = {
    "entry": "m.py",
    "files": {"m.py": "def f():\n    return 1\n"},
    "cases": [{"function": "f", "args": [], "expected": 2}],
}


def rows(folder: Path, count: int, **more: Any) -> str:
    path = folder / "rows.jsonl"
    lines = [{**ROW, "id": f"row-{n}", "prompt": f"Fix number {n}.", **more} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def mixed(path: str, **second: Any) -> dict[str, Any]:
    own = {"name": "own", "source": "jsonl", "path": path, "eval_share": 0.0, **second}
    return {"tasks": [{"name": "toy", "source": "toy", "weight": 3.0}, own]}


def test_each_set_has_its_share_of_every_prefix_of_the_draws() -> None:
    weights = (3.0, 1.0, 0.5, 0.0)
    place = schedule(weights)
    drawn = Counter[int]()
    for draw in range(900):
        number, within = place(draw)
        assert within == drawn[number]
        drawn[number] += 1
        assert all(abs(drawn[i] - w / 4.5 * (draw + 1)) < 1.5 for i, w in enumerate(weights))
    assert [drawn[i] for i in range(4)] == [600, 200, 100, 0]
    assert [schedule(weights)(draw) for draw in (899, 0)] == [place(899), place(0)]


def test_tasks_are_drawn_without_replacement_and_carry_their_set(tmp_path: Path) -> None:
    mix = open_mix(load_config(None, (), mixed(rows(tmp_path, 4))))
    draw = TaskDraws(mix)
    tasks = [draw(number) for number in range(32)]
    assert Counter(task.part for task in tasks) == {"toy": 24, "own": 8}
    own = [task.id for task in tasks if task.part == "own"]
    assert sorted(own[:4]) == sorted(own[4:]) == ["row-0", "row-1", "row-2", "row-3"]
    assert [TaskDraws(mix)(number) for number in (31, 7)] == [tasks[31], tasks[7]]
    assert mix.oracle(tasks[0]) != mix.oracle(next(task for task in tasks if task.part == "own"))
    assert (mix.size("train"), mix.name) == (None, "toy + jsonl")


def test_a_set_has_its_own_tables(tmp_path: Path) -> None:
    second = {"limits": {"wall_s": 7.0}, "harness": {"agent": "script"}, "grade": {"timeout_s": 9.0}}
    config = load_config(None, ["limits.max_calls=3"], mixed(rows(tmp_path, 1), **second))
    own = config.arms["own"].config
    assert (own.limits.wall_s, own.limits.max_calls, own.harness.agent) == (7.0, 3, "script")
    assert config.arms["toy"].config.harness.agent == "pi"
    assert (own.task_set.name, config.agent_names, config.longest_wall_s) == ("own", "pi + script", 120.0)
    (task,) = open_mix(config).sets[1].tasks("train", 0, 1)
    assert (task.limits.wall_s, task.part) == (7.0, "own")
    stored = name_run(config)
    assert load_config(base=tomllib.loads(dump_toml(stored))) == stored


def test_an_override_holds_for_every_set(tmp_path: Path) -> None:
    config = load_config(None, ["tasks.sampler=epochs", "tasks.weight=2"], mixed(rows(tmp_path, 1)))
    assert [table.weight for table in config.tasks] == [2.0, 2.0]


def test_an_override_may_hold_for_one_set(tmp_path: Path) -> None:
    more = {"harness": {"agent": "script"}, "limits": {"max_calls": 2}, "name": "own"}
    changes = ["tasks.own.weight=2", "tasks.own.limits.wall_s=7", "tasks.toy.kinds=swapped,operator"]
    config = load_config(None, changes, mixed(rows(tmp_path, 1), **more))
    toy, own = config.tasks
    assert (toy.weight, toy.kinds, toy.limits) == (3.0, ("swapped", "operator"), {})
    assert (own.weight, own.limits, own.harness["agent"]) == (2.0, {"max_calls": 2, "wall_s": 7.0}, "script")


def test_a_resumed_run_may_move_the_teacher_of_one_set(tmp_path: Path) -> None:
    second = {"reference": "https://one.example/v1"}
    values = {"run.dir": str(tmp_path / "run"), "train.kl": "k3"}
    with RunDir.create(load_config(None, values, mixed(rows(tmp_path, 1), **second))) as run:
        moved = resumed_config(run.path, ["tasks.own.reference=https://two.example/v1"], TRAINING)
        with pytest.raises(ConfigError, match="a resumed run keeps its configuration; drop tasks.own.weight"):
            resumed_config(run.path, ["tasks.own.weight=2"], TRAINING)
    assert [table.reference for table in moved.tasks] == ["", "https://two.example/v1"]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("tasks.oen.weight=2", "no tasks named 'oen'; there are: toy, own"),
        ("tasks.own.wieght=2", "unknown key tasks.own.wieght; did you mean tasks.weight?"),
        ("tasks.own.limits.wal_s=2", "unknown key tasks.own.limits.wal_s; did you mean limits.wall_s?"),
        ("tasks.own.weight.x=2", "unknown key tasks.own.weight.x"),
    ],
)
def test_a_wrong_override_of_one_set_is_named(tmp_path: Path, override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        load_config(None, [override], mixed(rows(tmp_path, 1)))


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"name": "toy"}, "each of several .* needs a name of its own"),
        ({"name": ""}, "each of several .* needs a name of its own"),
        ({"name": "a/b"}, "tasks.a/b.name: string should match"),
        ({"weight": -1.0}, "^tasks.own.weight: input should be greater than or equal to 0, got -1.0$"),
        ({"limits": {"wal_s": 1}}, r"in tasks: unknown key limits.wal_s; did you mean limits.wall_s"),
        ({"limits": {"wall_s": -1.0}}, "tasks.own.limits.wall_s: Input should be greater than 0"),
        ({"harness": {"agent": "script", "compact": True}}, "tasks.own: harness.compact = true is pi's own"),
        ({"harness": {"workers": 2}}, "tasks.own: harness.workers is that of the run"),
        ({"sampler": "epoch"}, "tasks.own.sampler: unknown name 'epoch'"),
    ],
)
def test_a_wrong_set_is_named(tmp_path: Path, second: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, (), mixed(rows(tmp_path, 1), **second))


def test_weights_that_sum_to_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights of .* sum to 0"):
        load_config(None, ["tasks.weight=0"], mixed(rows(tmp_path, 1)))


@pytest.mark.slow
def test_a_set_without_its_sandbox_or_rows_is_refused_by_name(tmp_path: Path) -> None:
    def choose(config: Any, mix: Any) -> Any:
        return mix.examples()

    images = mixed(rows(tmp_path, 1, image="python:3.12"), harness={"agent": "script"})
    with pytest.raises(ConfigError, match=r"tasks\.own: task row-0 cannot run with sandbox.backend = local"):
        prepare(load_config(None, ["harness.agent=script"], images), lambda line: None, choose)
    with pytest.raises(TaskError, match=r"tasks\.own: .*no-such.jsonl"):
        open_mix(load_config(None, (), mixed(str(tmp_path / "no-such.jsonl"))))


def test_an_evaluation_takes_equally_many_tasks_of_its_sets(tmp_path: Path) -> None:
    tables = mixed(rows(tmp_path, 3), eval_share=1.0) | {
        "eval": [
            {"name": "all", "count": 10},
            {"name": "own", "tasks": ["own"]},
            {"name": "cheap", "tasks": ["own"], "count": 2, "limits": {"wall_s": 3.0}},
        ]
    }
    config = load_config(None, (), tables)
    mix = open_mix(config)
    every, own, cheap = (mix.evaluated(table) for table in config.eval)
    assert Counter(task.part for task in every) == {"toy": 7, "own": 3}
    assert [task.id for task in own] == ["row-0", "row-1", "row-2"]
    assert {(task.part, task.limits.wall_s) for task in cheap} == {("own@cheap", 3.0)}
    assert mix.oracle(cheap[0]) == mix.oracle(own[0])


def test_an_evaluation_without_names_covers_the_trained_sets(tmp_path: Path) -> None:
    tables = mixed(rows(tmp_path, 3), eval_share=1.0, weight=0)
    tables |= {"eval": [{"count": 10}, {"name": "layered", "count": 4, "limits": {"wall_s": 3.0}}]}
    config = load_config(None, (), tables)
    plain, layered = (open_mix(config).evaluated(table) for table in config.eval)
    assert {task.part for task in plain} == {"toy"}
    assert {task.part for task in layered} == {"toy@layered"}


def test_tasks_without_training_are_spread_over_the_sets(tmp_path: Path) -> None:
    mix = open_mix(load_config(None, (), mixed(rows(tmp_path, 3), eval_share=1.0)))
    whole = mix.spread("eval", 9)
    assert [task.part for task in whole] == ["toy"] * 6 + ["own"] * 3
    assert Counter(task.part for task in mix.spread("eval", 3)) == {"toy": 2, "own": 1}


@pytest.mark.parametrize("sizes", [[None, 3, 1], [2, 5, 3], [4], [0, 2], [None, None]])
def test_the_shares_of_the_sets_are_those_of_giving_one_task_after_another(sizes: list[int | None]) -> None:
    for count in range(14):
        given = [0] * len(sizes)
        while sum(given) < count:
            open_sets = [n for n, size in enumerate(sizes) if size is None or given[n] < size]
            if not open_sets:
                break
            for n in open_sets[: count - sum(given)]:
                given[n] += 1
        assert _shares(sizes, count) == given


@pytest.mark.parametrize(
    ("evaluation", "why"),
    [
        ({"tasks": ["own"], "count": 4}, "eval.more.count = 4: jsonl has 3 tasks in the eval split"),
        ({"tasks": ["own"], "split": "train"}, "eval.more.count = 128: jsonl has 0 tasks in the train split"),
        ({"tasks": ["own"]}, ""),
        ({"count": 500}, ""),
    ],
)
def test_an_evaluation_larger_than_its_tasks_is_refused(
    tmp_path: Path, evaluation: dict[str, Any], why: str
) -> None:
    tables = mixed(rows(tmp_path, 3), eval_share=1.0) | {"eval": [{}, {"name": "more", **evaluation}]}
    config = load_config(None, (), tables)
    with pytest.raises(ConfigError, match=why) if why else contextlib.nullcontext():
        check_evaluations(config.eval, open_mix(config))


AGENTS = [{"agent": "script"}, {"command": ["my-agent", "{task}"]}]


def test_rollouts_of_a_group_take_the_agents_of_its_set_in_turn(tmp_path: Path) -> None:
    second = {"agents": AGENTS, "limits": {"wall_s": 7.0}}
    evaluations = [{"name": "heldout"}, {"name": "short", "limits": {"wall_s": 5.0}}]
    evaluations += [{"name": "pi", "harness": {"agent": "pi"}}]
    config = load_config(None, (), {**mixed(rows(tmp_path, 3), **second), "eval": evaluations})
    arms = config.arms
    assert {name: arm.config.harness.label for name, arm in arms.items() if name.startswith("own")} == {
        "own": "script", "own@+script": "script", "own@+my-agent": "my-agent",
        "own@short": "script", "own@short+script": "script", "own@short+my-agent": "my-agent",
        "own@pi": "pi",
    }  # fmt: skip
    assert [arms[name].config.limits.wall_s for name in ("own@+my-agent", "own@short+my-agent")] == [7.0, 5.0]
    assert (config.agent_names, config.agent_of("own")) == ("pi + script + my-agent", "script + my-agent")
    mix = open_mix(config)
    (task,) = mix.sets[1].tasks("train", 0, 1)
    given = [task.of_rollout(number) for number in range(3)]
    assert [one.part for one in given] == ["own@+script", "own@+my-agent", "own@+script"]
    later = [task.of_rollout(0).part for task in mix.sets[1].tasks("train", 0, 3)]
    assert later == ["own@+script", "own@+my-agent", "own@+script"]
    assert [mix.of(one).name for one in (task, *given)] == ["own"] * 4
    stored = name_run(config)
    assert load_config(base=tomllib.loads(dump_toml(stored))) == stored


def test_keys_of_one_agent_do_not_reach_another(tmp_path: Path) -> None:
    agents = [{"agent": "script", "artifacts": ["b"]}, {"artifacts": ["c"]}, {"agent": "pi"}]
    second = {"agents": agents, "harness": {"command": ["mine"], "artifacts": ["a"]}}
    config = load_config(None, (), mixed(rows(tmp_path, 1), **second))
    for one in (config, load_config(base=tomllib.loads(dump_toml(name_run(config))))):
        found = [arm.config.harness for arm in one.agent_arms]
        assert [own.label for own in found] == ["script", "mine", "pi"]
        assert [own.artifacts for own in found] == [("b",), ("c",), ("a",)]


def test_an_evaluation_inside_one_agent_has_no_key_of_the_others(tmp_path: Path) -> None:
    agents = [{"agent": "script"}, {"agent": "pi", "artifacts": ["a"]}]
    tables = {**mixed(rows(tmp_path, 1), agents=agents), "eval": [{"harness": {"agent": "mini_swe"}}]}
    config = load_config(None, (), tables)
    own = config.arms["own@heldout"].config
    assert (own.harness.agent, own.harness.artifacts) == ("mini_swe", ())
    assert [name for name in config.arms if "@heldout" in name] == ["toy@heldout", "own@heldout"]


def test_keys_of_an_evaluation_must_fit_each_agent(tmp_path: Path) -> None:
    agents = [{"agent": "script"}, {"command": ["mine"]}]
    tables = {**mixed(rows(tmp_path, 1), agents=agents), "eval": [{"harness": {"version": "1"}}]}
    with pytest.raises(ConfigError, match="agent and version have no effect with command"):
        load_config(None, (), tables)


def test_metrics_of_an_agent_need_a_name_of_their_own() -> None:
    agents = [{"command": ["loss"]}, {"command": ["other"]}]
    with pytest.raises(ConfigError, match="tasks.agents: metrics of a run have the name loss; name the task"):
        check_names(load_config(None, (), {"tasks": [{"agents": agents}]}))


@pytest.mark.parametrize(
    ("agents", "why"),
    [
        (5, "in tasks.agents: must be a list of tables"),
        ("pi", "in tasks.agents: must be a list of tables"),
        ({"agent": "pi"}, "in tasks.agents: must be a list of tables"),
        ([1, 2], "in tasks.agents: must be a list of tables"),
        ([{"command": [str(n)]} for n in range(9)], "tasks.own.agents: 9 agents need collect.group_size of"),
        ([{"agent": "script"}], "agents names several agents"),
        ([{"agent": "pi"}, {"version": "0.1"}], "tasks.own.agents: two of them have the same name"),
        ([{"agent": "script"}, {"agent": "pie"}], "tasks.own.harness.agent: unknown name 'pie'"),
        ([{"agent": "script"}, {"agnt": "pi"}], r"in tasks.agents: unknown key harness.agnt; did you mean"),
        ([{"agent": "script"}, {"agent": "pi", "workers": 2}], "tasks.own: harness.workers is that"),
    ],
)
def test_wrong_agents_are_named(tmp_path: Path, agents: list[Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, (), mixed(rows(tmp_path, 1), agents=agents))
