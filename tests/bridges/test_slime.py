"""Contracts of the bridge to slime: samples, fan-out, rewards; its own suites with INSITU_SLIME_SRC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from row_lab import PLAN, groups, rollout
from slime_lab import Source
from trl_cpu import toy_config

from insitu.config import load_config
from insitu.errors import ConfigError
from insitu.types import Group, Ledger, Rollout, Status
from insitu_bridges import slime
from insitu_bridges.rows import rows_of
from insitu_bridges.thread import SourceThread
from sources import SOURCES


class State(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """The fields of slime's Sample that the bridge reads and fills."""

    group_index: int | None = 0
    index: int | None = 0
    rollout_id: int | None = None
    prompt: Any = "toy-1"
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: State = State.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


def use(
    monkeypatch: pytest.MonkeyPatch, one: Rollout, groups: Sequence[Group] = (), *overrides: str
) -> Source:
    source, config = Source(one, groups), load_config(None, overrides)
    monkeypatch.setattr(slime, "_source", lambda args, parameters=None: (source, config))
    monkeypatch.setattr(slime, "_tokenizer", lambda folder: SimpleNamespace(decode=decode))
    return source


def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
    assert not skip_special_tokens
    return " ".join(map(str, ids))


@pytest.mark.parametrize("rows", range(1, 10))
async def test_a_rollout_fans_out_into_its_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    source = use(monkeypatch, rollout("train/0/5/0", 0.5, rows))
    sample = Sample(index=5, group_index=1, metadata={"task_id": "toy-7", "own": 1})
    made = await slime.generate(None, sample, {"temperature": 1.0})
    assert source.asked == [("toy-7", 5, False)]
    assert len(made) == rows
    assert {one.rollout_id for one in made} == {5}
    for index, one in enumerate(made):
        assert (one.group_index, one.index, one.reward, one.status) == (1, 5, 0.5, State.COMPLETED)
        assert one.tokens == [100 * index + at for at in range(7)]
        assert one.response_length == len(one.loss_mask) == len(one.rollout_log_probs) == 3
        assert one.weight_versions == ["4"]
        assert one.response == decode(one.tokens[4:], skip_special_tokens=False)
        assert one.metadata == {
            "task_id": "toy-7", "own": 1, "insitu_rollout": "train/0/5/0",
            "segment_idx": index, "num_segments": rows, "segment_kind": "final",
        }  # fmt: skip
    assert sample.tokens == []
    last = await slime.generate_final(None, sample, {})
    assert last.tokens == made[-1].tokens
    judged = await slime.generate(None, sample, {}, evaluation=True)
    assert (judged.tokens, source.asked[-1]) == (made[-1].tokens, ("toy-7", 5, True))


async def test_a_failed_rollout_is_aborted_and_has_a_number_as_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, replace(rollout("a", None, status=Status.INFRA_FAILED), error="the sandbox vanished"))
    [one] = await slime.generate(None, Sample(), {})
    assert (one.status, one.reward, one.remove_sample) == (State.ABORTED, 0.0, True)
    assert one.metadata["abort_reason"] == "the sandbox vanished"
    assert len(one.tokens) == one.response_length + 1


@pytest.mark.parametrize(
    ("override", "status", "why"),
    [
        ("train.max_row_tokens=3", Status.OK, "overlong"),
        ("train.truncated=mask", Status.TRUNCATED, "truncated"),
    ],
)
async def test_a_graded_rollout_that_is_not_trained_keeps_its_reward(
    monkeypatch: pytest.MonkeyPatch, override: str, status: Status, why: str
) -> None:
    use(monkeypatch, rollout("a", 0.5, 2, status=status), (), override)
    [one] = await slime.generate(None, Sample(), {})
    assert (one.reward, one.loss_mask, one.remove_sample) == (0.5, [0], True)
    assert one.status is State(slime.STATUS[status])
    assert one.metadata["insitu_left_out"] == why
    assert len(one.tokens) == one.response_length + 1


async def test_an_evaluation_has_its_reward_and_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    one = rollout("eval/0/0/0", 1.0)
    ledger = Ledger(captured=3, trained=0, excluded={"evaluation": 3})
    one = replace(one, trajectory=replace(one.trajectory, ledger=ledger))
    use(monkeypatch, one)
    made = await slime.generate(None, Sample(), {}, evaluation=True)
    assert (made.reward, made.status, made.response) == (1.0, State.COMPLETED, "4 5 6")


def test_a_rollout_over_the_caps_counts_in_its_groups_mean() -> None:
    capped = rollout("train/1/0/2", 1.0)
    [segment] = capped.trajectory.segments
    longer = {
        name: np.pad(getattr(segment, name), (0, 9)) for name in ("ids", "mask", "logprobs", "versions")
    }
    capped = replace(capped, trajectory=replace(capped.trajectory, segments=(replace(segment, **longer),)))
    members = (rollout("train/1/0/0", 1.0), rollout("train/1/0/1", 0.0), capped)
    group = Group(id="train/1/0", task_id="t", rollouts=members)
    rows = rows_of([group], PLAN.changed(max_row_tokens=10))
    payload = slime.to_samples(rows).payload
    assert [(row["status"], sum(row["loss_mask"])) for row in payload] == [
        ("completed", n) for n in (3, 3, 0)
    ]
    made = [Sample(**{**row, "status": State(row["status"])}) for row in payload]
    _, found = slime.rewards(SimpleNamespace(), made)
    own = [item.advantage for item in rows[0].rollouts]
    assert found == pytest.approx(own)
    assert own == pytest.approx([1 / 3, -2 / 3, 1 / 3])


ENGINE = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None}
NOT_THE_ENGINES = [
    ("temperature", 1.0, "temperature 1.0, but engine.temperature is 0.7"),
    ("top_p", 0.9, "top_p 0.9"),
    ("top_k", 20, "top_k 20"),
    ("stop", ["\n\n"], "no stop strings"),
    ("stop_token_ids", [5], "stop_token_ids"),
]


@pytest.mark.parametrize(("name", "value", "message"), NOT_THE_ENGINES)
async def test_arguments_that_are_not_the_engines_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    monkeypatch.setattr(slime, "_stop_ids", lambda config: frozenset({7}))
    source = use(monkeypatch, rollout("a", 1.0), groups(), "engine.temperature=0.7")
    args = SimpleNamespace(**{f"rollout_{key}": given for key, given in ENGINE.items()})
    await slime.generate(args, Sample(), {**ENGINE, "stop_token_ids": [7], "skip_special_tokens": False})
    slime.generate_rollout(args, 0, Prompts(5))
    source.asked.clear()
    wrong = SimpleNamespace(**{**vars(args), f"rollout_{name}": value})
    with pytest.raises(ConfigError, match=message):
        await slime.generate(args, Sample(), {**ENGINE, name: value})
    with pytest.raises(ConfigError, match=message):
        await slime.generate(wrong, Sample(), ENGINE)
    with pytest.raises(ConfigError, match=message):
        slime.generate_rollout(wrong, 0, Prompts(5))
    assert source.asked == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_p", 0.1), ("repetition_penalty", 1.1), ("min_new_tokens", 4), ("n", 2), ("json_schema", "{}")],
)
async def test_further_parameters_that_change_what_is_sampled_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    use(monkeypatch, rollout("a", 1.0))
    with pytest.raises(ConfigError, match=name):
        await slime.generate(None, Sample(), {name: value})


def test_evaluations_ask_for_what_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, rollout("a", 1.0))
    monkeypatch.setattr(slime, "task_ids", lambda config, count, *, split: ["eval-0"])
    args = SimpleNamespace(rollout_temperature=1.0, eval_temperature=0.0)
    with pytest.raises(ConfigError, match=r"temperature 0\.0, .* is 1, in evaluations too"):
        slime.generate_rollout(args, 0, Prompts(1), evaluation=True)
    shorter = SimpleNamespace(rollout_max_response_len=96, eval_max_response_len=8)
    with pytest.raises(ConfigError, match="max_new_tokens 8"):
        slime.generate_rollout(shorter, 0, Prompts(1), evaluation=True)
    args.eval_temperature = None
    assert slime.generate_rollout(args, 0, Prompts(1), evaluation=True)["insitu"]["rewards"] == [1.0]


def test_lengths_and_the_router_come_from_slimes_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "insitu.toml"
    path.write_text("[limits]\nmax_call_tokens = 512\n[model]\nmax_context_tokens = 8192\n")
    monkeypatch.setenv("INSITU_CONFIG", str(path))
    monkeypatch.setattr(slime, "SourceThread", lambda config: config)
    router = {"sglang_router_ip": "10.0.0.7", "sglang_router_port": 3456}
    _, config = slime._source(SimpleNamespace(**router))
    assert (config.engine.kind, config.engine.urls) == ("sglang", ("http://10.0.0.7:3456",))
    assert (config.limits.max_call_tokens, config.model.max_context_tokens) == (512, 8192)
    lengths = {"rollout_max_response_len": 128, "rollout_max_context_len": 4000}
    source, config = slime._source(SimpleNamespace(**router, **lengths))
    assert (config.limits.max_call_tokens, config.model.max_context_tokens) == (128, 4000)
    assert slime._source(SimpleNamespace(**router, **lengths))[0] is source
    longer = {"rollout_max_response_len": 4096, "rollout_max_context_len": 1 << 20}
    _, config = slime._source(SimpleNamespace(**router, **longer))
    assert (config.limits.max_call_tokens, config.model.max_context_tokens) == (512, 8192)
    path.write_text(path.read_text() + '[[tasks]]\nname = "a"\n[tasks.limits]\nmax_call_tokens = 400\n')
    slime._opened.cache_clear()
    with pytest.raises(
        ConfigError, match="max_call_tokens of a is 400, above --rollout-max-response-len 128"
    ):
        slime._source(SimpleNamespace(**router, **lengths))
    slime._opened.cache_clear()


async def test_what_names_no_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, rollout("a", 1.0))
    with pytest.raises(ConfigError, match="its Sample has no rollout_id: this bridge was made for slime"):
        await slime.generate(None, SimpleNamespace(prompt="toy-7", index=1, metadata={}), {})
    with pytest.raises(ConfigError, match="task_id"):
        await slime.generate(None, Sample(prompt=[{"role": "user", "content": "x"}]), {})
    monkeypatch.undo()
    monkeypatch.delenv("INSITU_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="INSITU_CONFIG"):
        await slime.generate(None, Sample(), {})


class Prompts:
    """slime's data source: groups of empty Samples, numbered on."""

    def __init__(self, n_samples_per_prompt: int) -> None:
        self.size, self.groups = n_samples_per_prompt, 0

    def get_samples(self, count: int) -> list[list[Sample]]:
        first, self.groups = self.groups, self.groups + count
        return [
            [Sample(index=self.size * group + slot, group_index=group) for slot in range(self.size)]
            for group in range(first, first + count)
        ]


def test_a_rollout_function_fills_groups_of_insitus_own(monkeypatch: pytest.MonkeyPatch) -> None:
    source = use(monkeypatch, rollout("a", 1.0), groups())
    prompts = Prompts(5)
    made = slime.generate_rollout(SimpleNamespace(n_samples_per_prompt=8, rollout_batch_size=12), 3, prompts)
    assert source.asked == ["next"]
    assert [[len(rows) for rows in group] for group in made] == [[2, 1, 1, 1, 1], [1] * 5]
    states = [[rows[0].status for rows in group] for group in made]
    done, aborted = State.COMPLETED, State.ABORTED
    assert states == [[done, done, done, aborted, aborted], [done, done, aborted, aborted, aborted]]
    assert made[1][4][0].metadata["abort_reason"] == "no rollout"
    whole = [sample for group in made for rows in group for sample in rows]
    assert [sample.rollout_id for sample in whole] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert all(sample.reward is not None for sample in whole)
    # Aborted ones have no vote: the mean of the first group is 0.5, the second's rewards are equal.
    _, found = slime.rewards(SimpleNamespace(), whole)
    assert found == [0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    flat = slime.generate_rollout_final(SimpleNamespace(), 4, prompts)
    assert flat[0][0].tokens == made[0][0][-1].tokens


def test_a_rollout_function_evaluates_held_out_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    source = use(monkeypatch, rollout("a", 1.0, 2, status=Status.TRUNCATED))
    monkeypatch.setattr(slime, "task_ids", lambda config, count, *, split: [f"{split}-{n}" for n in range(2)])
    made = slime.generate_rollout(None, 3, Prompts(1), evaluation=True)["insitu"]
    assert source.asked == [("eval-0", 6, True), ("eval-1", 7, True)]
    assert (made["rewards"], made["truncated"], len(made["samples"])) == ([1.0, 1.0], [True, True], 2)
    use(monkeypatch, rollout("a", None))
    assert slime.generate_rollout(None, 3, Prompts(1), evaluation=True)["insitu"]["rewards"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n_samples_per_prompt", "collect.group_size = 8 must be --n-samples-per-prompt 7"),
        ("rollout_batch_size", "collect.groups_per_step = 12 must be --rollout-batch-size 7"),
    ],
)
def test_batches_of_another_size_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    source = use(monkeypatch, rollout("a", 1.0))
    with pytest.raises(ConfigError, match=message):
        slime.generate_rollout(SimpleNamespace(**{name: 7}), 0, Prompts(7))
    assert source.asked == []


def samples() -> list[Sample]:
    def one(group: int, rid: int, reward: float, status: State = State.COMPLETED) -> Sample:
        return Sample(group_index=group, index=rid, rollout_id=rid, reward=reward, status=status)

    several = [one(0, 0, 1.0), one(0, 0, 1.0), one(0, 1, 0.0)]
    return [*several, one(1, 2, 0.0), one(1, 3, 1.0), one(1, 4, 0.0, State.ABORTED)]


def test_rewards_are_normalised_by_group_with_one_vote_per_rollout() -> None:
    raw, found = slime.rewards(SimpleNamespace(), samples())
    assert raw == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert found == [0.5, 0.5, -0.5, -0.5, 0.5, 0.0]
    _, scaled = slime.rewards(SimpleNamespace(grpo_std_normalization=True), samples())
    assert scaled == pytest.approx([each / 0.70711 for each in found], rel=1e-4)
    assert slime.rewards(SimpleNamespace(rewards_normalization=False), samples()) == (raw, raw)
    named = [replace(each, reward={"main": each.reward}) for each in samples()]
    assert slime.rewards(SimpleNamespace(reward_key="main"), named)[0] == raw
    alone = slime.rewards(SimpleNamespace(), samples()[3:4])
    assert alone == ([0.0], [0.0])


def test_groups_become_samples_for_a_debug_file() -> None:
    converted = slime.to_samples(rows_of(groups(), PLAN))
    assert [row["rollout_id"] for row in converted.payload] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert [row["status"] for row in converted.payload] == ["completed"] * 4 + ["aborted"] * 2 + [
        "completed"
    ] * 2
    assert converted.payload[4]["metadata"]["abort_reason"] == "ungraded"
    assert converted.account.captured == converted.account.trained + sum(converted.account.excluded.values())
    assert converted.account.excluded == {"edited": 2, "infra": 3, "target_unscored": 3}


@pytest.mark.full
@pytest.mark.slow
def test_slimes_rollout_function_runs_agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = toy_config(
        tmp_path / "run",
        eval={"count": 1},
        harness={"agent": "script", "workers": 2, "mode": "warm"},
        collect={"group_size": 2, "groups_per_step": 1, "max_staleness": 0},
    )
    source = SourceThread(config)
    monkeypatch.setattr(slime, "_opened", lambda *asked: (source, config))
    args, prompts = SimpleNamespace(n_samples_per_prompt=2, rollout_batch_size=1), Prompts(2)
    try:
        for step in range(2):
            [group] = slime.generate_rollout(args, step, prompts)
            samples = [sample for rows in group for sample in rows]
            assert {sample.index for sample in samples} == {2 * step, 2 * step + 1}
            assert all(len(sample.loss_mask) == len(sample.rollout_log_probs) for sample in samples)
            assert any(sum(sample.loss_mask) for sample in samples)
            assert all(sample.response for sample in samples if sum(sample.loss_mask))
        judged = slime.generate_rollout(args, 1, prompts, evaluation=True)["insitu"]
        assert len(judged["rewards"]) == 1
        assert judged["samples"][0].response
    finally:
        source.close()


def _slime_source() -> str:
    source = os.environ.get("INSITU_SLIME_SRC")
    if not source:
        pytest.skip("INSITU_SLIME_SRC names no checkout of slime")
    return source


def _run(source: str, *arguments: str) -> str:
    folders = (source, str(Path(__file__).parent), SOURCES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=600, env=environment, cwd=source, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.bridge
def test_slimes_own_conversion_takes_the_samples() -> None:
    """Its default normalises the whole batch as one group and counts aborted rollouts as 0."""
    printed = _run(_slime_source(), str(Path(__file__).parent / "slime_conversion.py"))
    found = json.loads(printed.splitlines()[-1])
    ours, file = found["ours"], found["file"]
    assert ours["rewards"] == [0.5, 0.5, -0.5] + [0.0] * 8
    assert found["default"]["rewards"][:3] == pytest.approx([13 / 22, 13 / 22, -9 / 22])
    assert ours["rollout_ids"] == [0, 0, *range(1, 10)]
    assert ours["rollout_mask_sums"] == [6, 6, 3, 3, 0, 0, 3, 3, 0, 0, 0]
    # The debug file has no places without a rollout.
    for name in ("rewards", "rollout_ids", "rollout_mask_sums", "tokens"):
        assert file[name] == ours[name][:8]


@pytest.mark.bridge
@pytest.mark.parametrize(
    ("suite", "option", "name"),
    [
        ("generate", "custom-generate-function-path", "generate_final"),
        ("runtime_hook", "custom-reward-post-process-path", "rewards"),
        ("rollout", "rollout-function-path", "generate_rollout_final"),
    ],
)
def test_slimes_own_suites_pass(suite: str, option: str, name: str) -> None:
    source = _slime_source()
    file = Path(source) / "tests" / "plugin_contracts" / f"test_plugin_{suite}_contracts.py"
    assert " passed" in _run(source, str(file), f"--{option}", f"slime_plugin.{name}")
