"""The tables [[eval]]: which tasks, which agent, and what is refused in one line."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from insitu.config import dump_toml, load_config
from insitu.errors import ConfigError
from insitu.runtime.preflight import check_names, open_mix, prepare
from insitu.storage.run_dir import name_run
from insitu_train.evaluations import check_evaluations

SETS = [
    {"name": "plus", "kinds": ["operator"]},
    {"name": "swaps", "kinds": ["swapped"], "weight": 0, "limits": {"wall_s": 9.0}},
]


def tables(*evaluations: dict[str, Any], **run: Any) -> dict[str, Any]:
    return {"tasks": SETS, "eval": list(evaluations), "run": run, "harness": {"agent": "script"}}


def test_an_evaluation_lays_its_tables_over_those_of_its_sets() -> None:
    other = {"name": "other", "tasks": ["swaps"], "harness": {"agent": "single_turn"}}
    config = load_config(None, (), tables({"count": 4}, {**other, "limits": {"max_calls": 1}}))
    assert list(config.arms) == ["plus", "swaps", "swaps@other"]
    own = config.arms["swaps@other"].config
    assert (own.harness.agent, own.limits.wall_s, own.limits.max_calls) == ("single_turn", 9.0, 1)
    assert config.agent_names == "script"
    stored = name_run(config)
    assert load_config(base=tomllib.loads(dump_toml(stored))) == stored


@pytest.mark.parametrize(
    ("evaluation", "why"),
    [
        ({"tasks": ["swap"]}, "eval.heldout.tasks: no task set 'swap'; there are: plus, swaps"),
        ({"samples": 0}, "^eval.samples: input should be greater than or equal to 1, got 0$"),
        ({"temperature": 0.01}, "temperature is 0, for that of the engine, or at least 0.05"),
        ({"harness": {"workers": 2}}, "eval.heldout: harness.workers is that of the run"),
        ({"harness": {"agnet": "pi"}}, "in eval: unknown key harness.agnet; did you mean harness.agent"),
        ({"limits": {"wall_s": -1.0}}, "eval.heldout.limits.wall_s: Input should be greater than 0"),
        ({"name": "a.b"}, "eval.name: string should match"),
    ],
)
def test_a_wrong_evaluation_is_named(evaluation: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, (), tables(evaluation))


OWN = {"command": ["a.py"], "files": ["a.py"], "env": {"A": "b"}}


@pytest.mark.parametrize(
    ("run", "of_set", "of_eval", "found"),
    [
        (OWN, {}, {"agent": "script"}, ("script", "", ())),
        (OWN, {"agent": "pi", "version": "1.0.0"}, {}, ("pi", "1.0.0", ())),
        ({"agent": "pi", "version": "1.0.0"}, {}, OWN, ("pi", "", ("a.py",))),
        ({"agent": "pi", "version": "1.0.0"}, OWN, {"agent": "pi"}, ("pi", "1.0.0", ())),
        ({"agent": "pi", "version": "1.0.0"}, {}, {"agent": "codex"}, ("codex", "", ())),
        ({"agent": "pi", "version": "1.0.0"}, {}, {"compact": True}, ("pi", "1.0.0", ())),
        ({"agent": "codex"}, {"agent": "script"}, OWN, ("pi", "", ("a.py",))),
        (OWN, {}, {"command": ["b.py"]}, ("pi", "", ("b.py",))),
    ],
)
def test_a_layer_replaces_the_agent_below_it_whole(
    run: dict[str, Any], of_set: dict[str, Any], of_eval: dict[str, Any], found: tuple[object, ...]
) -> None:
    given = {"tasks": [{"name": "a", "harness": of_set}], "eval": [{"harness": of_eval}], "harness": run}
    config = load_config(None, (), given)
    own = list(config.arms.values())[-1].config.harness
    assert (own.agent, own.version, own.command) == found
    assert own.files == (("a.py",) if own.command else ())
    stored = name_run(config)
    assert load_config(base=tomllib.loads(dump_toml(stored))) == stored


def test_an_evaluation_of_no_tasks_needs_nothing() -> None:
    none = {"name": "none", "count": 0, "harness": {"agent": "claude_code"}, "limits": {"wall_s": 9e9}}
    config = load_config(None, (), tables({}, none))
    assert list(config.arms) == ["plus", "swaps"]
    check_evaluations(config.eval, open_mix(config))


def test_stopping_early_needs_evaluations_during_training() -> None:
    with pytest.raises(ConfigError, match=r"run.stop_after_evals needs eval.heldout.every_steps"):
        load_config(None, (), tables({"count": 4}, stop_after_evals=2))
    assert load_config(None, (), tables({"every_steps": 5}, stop_after_evals=2)).run.stop_after_evals == 2


@pytest.mark.parametrize("name", ["heldout", "all", "loss", "time", "other"])
def test_a_set_with_the_name_of_other_metrics_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^tasks.{name}.name: metrics of a run have this name"):
        check_names(load_config(None, (), {"tasks": [{"name": name}]}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "context", "tokens"), [("claude_code", 2048, "46,300"), ("terminus", 512, "729")]
)
def test_an_agent_that_the_context_cannot_hold_is_refused_by_name(
    agent: str, context: int, tokens: str
) -> None:
    other = {"name": "other", "count": 1, "harness": {"agent": agent}}
    config = load_config(None, [f"model.max_context_tokens={context}"], tables({}, other))
    with pytest.raises(
        ConfigError, match=rf"eval.other: harness.agent {agent}: its first prompt has about {tokens}"
    ):
        prepare(config, lambda line: None, lambda config, mix: mix.examples())
