"""Rows in the forms of other trainers, of recorded sessions of seven agents: shapes, values, the account."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orjson
import pytest
from played import AGENTS, played_group
from row_lab import rollout

import insitu
from insitu.cli import main
from insitu.errors import RecordError
from insitu.types import Group, Ledger, Trajectory, Turn
from insitu_bridges.calls import row_calls
from insitu_bridges.equality import difference
from insitu_bridges.records import StoredRollout, read_rollout, rollout_record, row_records
from insitu_bridges.rows import GroupRows, rows_of, step_tokens
from insitu_bridges.slime import to_samples
from insitu_bridges.targets import TARGETS, check_payload, read_payload
from insitu_bridges.to_openenv import to_openenv
from insitu_bridges.to_prime import to_prime
from insitu_bridges.to_skyrl import to_skyrl
from insitu_bridges.to_tinker import to_tinker
from insitu_bridges.to_verifiers import to_verifiers
from insitu_bridges.to_verl import to_verl
from insitu_lab.open_renderer import Splitter, open_renderer
from insitu_train.plan.step import PlanConfig, PlanRow

Groups = tuple[GroupRows, ...]


@pytest.fixture(scope="module")
def all_groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Groups]:
    folder = tmp_path_factory.mktemp("open") / "model"
    renderer, splitter = open_renderer(folder), Splitter(folder / "tokenizer.json", seed=2)
    groups = {agent: asyncio.run(played_group(agent, renderer, splitter)) for agent in AGENTS}
    return {agent: rows_of([group], PlanConfig()) for agent, group in groups.items()}


@pytest.fixture(params=AGENTS)
def groups(request: pytest.FixtureRequest, all_groups: dict[str, Groups]) -> Groups:
    return all_groups[request.param]


def trained(groups: Groups) -> list[PlanRow]:
    return [row for group in groups for row in group.rows]


def scored(groups: Groups) -> list[tuple[Any, Any]]:
    return [(item, s) for group in groups for item in group.scored for s in item.segments]


def as_floats(values: Any) -> bytes:
    return np.array(values, np.float32).tobytes()


@pytest.mark.parametrize("name", TARGETS)
def test_every_captured_token_is_in_the_payload_or_excluded_by_name(name: str, groups: Groups) -> None:
    account = TARGETS[name].convert(groups).account
    ledgers = [item.rollout.trajectory.ledger for group in groups for item in group.rollouts]
    assert account.captured == sum(ledger.captured for ledger in ledgers)
    assert account.captured == account.trained + sum(account.excluded.values())
    own = sum(int(row.mask.sum()) for row in trained(groups))
    everything = sum(int(s.mask.sum()) for _, s in scored(groups))
    if name == "dpo":  # the final rows of the best and the worst
        rows = [s for item in groups[0].rollouts[:2] for s in item.segments if s.label == "final"]
        everything = sum(int(row.mask.sum()) for row in rows)
    if name == "sft":  # the rows of the best
        everything = sum(int(s.mask.sum()) for s in groups[0].rollouts[0].segments)
    assert account.trained == (own if name in ("prime", "tinker", "verifiers") else everything)
    unscored = account.excluded.get("target_unscored", 0) + account.excluded.get("ungraded", 0)
    assert unscored == ledgers[3].trained


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_payloads_are_read_back_bit_for_bit(name: str, groups: Groups) -> None:
    made = TARGETS[name].convert(groups)
    payload = made.payload if isinstance(made.payload, list) else [made.payload]
    wire = orjson.loads(orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY))
    for each in (payload, wire):
        check_payload(name, groups, each)
    rows = TARGETS[name].read(wire)
    assert sum(int(row.mask.sum()) for row in rows) >= made.account.trained > 0
    missing = {
        "versions": all(row.versions is None for row in rows),
        "rewards": all(row.reward is None for row in rows),
        "weights": name != "tinker" and all(row.weight is None for row in rows),
    }
    lost = {each.partition(" ")[0] for each in made.lost}
    assert {what for what, gone in missing.items() if gone} == lost - {"rows"}, "losses are named"


DAMAGE: dict[str, Callable[[Any], object]] = {
    "dpo": lambda p: p[0].update(chosen_reward=0.25),
    "openenv": lambda p: p[0].update(env_reward=0.25),
    "prime": lambda p: p[0][13].__setitem__(p[0][1].index(True), 9.0),
    "sft": lambda p: p[0]["labels"].__setitem__(-1, 3),
    "skyrl": lambda p: p[0]["rollout_logprobs"].pop(),
    "tinker": lambda p: p.pop(),
    "verifiers": lambda p: p[0]["nodes"][0]["token_ids"].__setitem__(0, 3),
    "verl": lambda p: p[0][0]["response_mask"].__setitem__(0, 0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_payload_is_named(name: str, all_groups: dict[str, Groups]) -> None:
    groups = all_groups["mini_swe"]
    made = TARGETS[name].convert(groups).payload
    payload = orjson.loads(
        orjson.dumps(made if isinstance(made, list) else [made], option=orjson.OPT_SERIALIZE_NUMPY)
    )
    DAMAGE[name](payload)
    with pytest.raises(RecordError) as raised:
        check_payload(name, groups, payload)
    assert "\n" not in str(raised.value)


def test_recorded_sessions_have_forks_and_subagents(all_groups: dict[str, Groups]) -> None:
    labels = {s.label for groups in all_groups.values() for _, s in scored(groups)}
    assert {"final", "subagent", "wipe"} <= labels


def test_records_are_read_back_bit_for_bit(groups: Groups) -> None:
    for item in (item for group in groups for item in group.rollouts):
        place = {"ulid": "", "phase": "train", "step": 1, "group_no": 0, "slot": 0}
        stored = StoredRollout(item=item, step=1, place=place, state={})
        record = orjson.loads(
            orjson.dumps({**rollout_record(stored, "r", 1.0), "ids": None, "logprobs": None})
        )
        kept = rollout_record(stored, "r", 1.0)
        back = read_rollout(
            {**record, "ids": kept["ids"], "logprobs": kept["logprobs"]}, row_records(stored, "r", 1.0)
        )
        assert difference(item.rollout, back.rollout) == ""
        in_rows = {turn["index"] for turn in kept["turns"] if turn["row"] >= 0}
        assert in_rows >= {c.turn.index for _, calls in row_calls(item) for c in calls}


def test_tinker(groups: Groups) -> None:
    for row, datum in zip(trained(groups), to_tinker(groups).payload, strict=True):
        inputs = datum["loss_fn_inputs"]
        assert np.array_equal(datum["model_input"], row.ids[:-1])
        assert np.array_equal(inputs["target_tokens"], row.ids[1:])
        assert {len(array) for array in inputs.values()} == {len(row.ids) - 1}
        assert as_floats(inputs["logprobs"]) == as_floats(row.logprobs[1:])
        total = inputs["advantages"].astype(np.float64).sum()
        assert total == pytest.approx(row.advantage * row.weight * row.mask.sum(), rel=1e-5)
        assert not inputs["advantages"][~row.mask[1:]].any()


def test_prime(groups: Groups) -> None:
    for row, batch in zip(trained(groups), to_prime(groups, temperature=0.7).payload, strict=True):
        assert len(batch) == 14
        assert batch[0] == row.ids.tolist()
        assert batch[1] == row.mask.tolist()
        assert as_floats(batch[3]) == as_floats(row.logprobs)
        assert batch[13] == np.where(row.mask, row.weight * step_tokens(groups), 0.0).tolist()
        assert batch[2] == np.where(row.mask, row.advantage, 0.0).tolist()
        assert batch[6] == [0.7] * len(row.ids)


def with_experts(groups: Groups, unknown: int = -1) -> Groups:
    """Every row with the experts of all tokens but the last, and but `unknown` of the first row."""

    def chosen(row: Any, first: bool) -> Any:
        count = len(row.ids)
        experts = (np.arange(count * 6).reshape(count, 3, 2) % 100).astype(np.int16)
        experts[-1] = -1
        if first and unknown >= 0:
            experts[unknown] = -1
        return replace(row, experts=experts)

    def changed(group: GroupRows) -> GroupRows:
        items = []
        for item in group.rollouts:
            segments = tuple(chosen(segment, segment.index == 0) for segment in item.segments)
            rows = tuple(chosen(row, row.segment == 0) for row in item.rows)
            items.append(replace(item, segments=segments, rows=rows))
        return replace(group, rollouts=tuple(items))

    return tuple(changed(group) for group in groups)


def test_chosen_experts_reach_trainers_that_replay_them(all_groups: dict[str, Groups]) -> None:
    groups = with_experts(all_groups["mini_swe"])
    for (_, segment), [output] in zip(
        scored(groups), [[o] for r in to_verl(groups).payload for o in r], strict=True
    ):
        assert np.array_equal(output["routed_experts"], segment.experts[:-1])
    for row, batch in zip(trained(groups), to_prime(groups).payload, strict=True):
        data, shape, dtype = batch[10]
        found = np.frombuffer(msgpack.unpackb(msgpack.packb(data)), dtype).reshape(shape)
        assert shape == [len(row.ids), 3, 2], "prime-rl wants as many as tokens"
        assert np.array_equal(found[:-1], row.experts[:-1])
        assert not found[-1].any()
    payload = to_samples(groups).payload
    assert {row["status"] for row in payload} >= {"aborted", "completed"}
    for row in payload:
        experts = row["rollout_routed_experts"]
        assert experts.dtype == np.int32
        assert experts.shape == (len(row["tokens"]) - 1, 3, 2)
        assert experts.any()


def test_a_row_with_an_unknown_expert_has_none(all_groups: dict[str, Groups]) -> None:
    groups = with_experts(all_groups["mini_swe"], unknown=2)
    outputs = [output for one in to_verl(groups).payload for output in one]
    assert outputs[0]["routed_experts"] is None
    assert to_prime(groups).payload[0][10] is None
    assert all("rollout_routed_experts" not in row for row in to_samples(groups).payload)


def branches(nodes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Paths to the leaves, in the order of the leaves."""
    inner = {node["parent"] for node in nodes}
    found = []
    for leaf in (index for index in range(len(nodes)) if index not in inner):
        path, at = [], leaf
        while at is not None:
            path.append(nodes[at])
            at = nodes[at]["parent"]
        found.append(path[::-1])
    return found


def test_verifiers_branches_are_the_rows(groups: Groups) -> None:
    items = [item for group in groups for item in group.rollouts]
    for item, trace in zip(items, to_verifiers(groups).payload, strict=True):
        paths = branches(trace["nodes"])
        rows = {tuple(s.ids.tolist()) for s in item.segments}
        assert {tuple(i for node in path for i in node["token_ids"]) for path in paths} == rows
        mask = sum(sum(node["mask"]) for node in trace["nodes"])
        assert mask == sum(int(s.mask.sum()) for s in item.segments), "a shared call is trained once"
        for node in trace["nodes"]:
            assert len(node["mask"]) == len(node["token_ids"])
            assert len(node.get("logprobs", ())) == sum(node["mask"])
        weights = sum(sum(node.get("loss_weights", {"rl": [0]})["rl"]) for node in trace["nodes"])
        own = sum(row.weight * row.mask.sum() for row in item.rows)
        assert weights == pytest.approx(own * step_tokens(groups))
        assert (trace["rewards"]["reward"] is None) == (item.rollout.reward is None)


def test_openenv_turns_stand_row_by_row(groups: Groups) -> None:
    for made in to_openenv(groups).payload:
        turns = made["trace"]["turns"]
        assert len({turn["node_id"] for turn in turns}) == len(turns)
        for turn in turns:
            length = len(turn["prompt_token_ids"]) + len(turn["completion_token_ids"])
            assert len(turn["loss_mask"]) == length
            assert sum(turn["loss_mask"]) == len(turn["completion_token_ids"]) == len(turn["per_token_logps"])
        ids = [tuple(t["prompt_token_ids"] + t["completion_token_ids"]) for t in turns]
        extends = sum(b[: len(a)] == a for a, b in pairwise(ids))
        item = next(i for g in groups for i in g.rollouts if i.rollout.id == made["rollout_id"])
        assert extends >= len(turns) - len(item.segments), "at most one fork per further row"


def test_verl_takes_all_rows_or_the_last(groups: Groups) -> None:
    rows = scored(groups)
    outputs = [output for one in to_verl(groups).payload for output in one]
    for (item, segment), output in zip(rows, outputs, strict=True):
        assert output["prompt_ids"] + output["response_ids"] == segment.ids.tolist()
        first = len(output["prompt_ids"])
        assert output["response_mask"] == segment.mask[first:].astype(int).tolist()
        assert as_floats(output["response_logprobs"]) == as_floats(segment.logprobs[first:])
        assert output["reward_score"] == item.rollout.reward
        assert output["metrics"] == {"generate_sequences": 0.5, "tool_calls": 1.5, "compute_score": 0.25}
    last = to_verl(groups, several="last")
    assert all(len(one) == 1 for one in last.payload)
    assert set(last.refused.values()) <= {"target_one_row", "target_unscored"}
    short = to_verl(groups, max_response=1)
    assert short.account.trained == 0
    assert short.account.excluded["target_length"] > 0


def test_skyrl_rows_of_a_rollout_are_contiguous(groups: Groups) -> None:
    out = to_skyrl(groups).payload
    rows = scored(groups)
    assert {len(out[name]) for name in out if name != "rollout_metrics"} == {len(rows)}
    order = [(t["instance_id"], t["repetition_id"]) for t in out["trajectory_ids"]]
    assert len([key for key, _ in groupby(order)]) == len(set(order))
    for key, members in groupby(zip(order, out["is_last_step"], strict=True), key=lambda pair: pair[0]):
        assert [last for _, last in members][-1] is True, key
    assert out["rewards"] == [item.rollout.reward for item, _ in rows]
    for index, (_, segment) in enumerate(rows):
        assert out["prompt_token_ids"][index] + out["response_ids"][index] == segment.ids.tolist()


@pytest.mark.parametrize("name", TARGETS)
def test_names_of_sessions_are_any_text(name: str) -> None:
    rollouts = tuple(rollout(f"suite/{text}", reward) for text, reward in (("a", 1.0), ("b", 0.0)))
    rollouts = tuple(replace(one, trajectory=_with_turns(one.trajectory)) for one in rollouts)
    made = rows_of([Group(id="suite", task_id="t", rollouts=rollouts)], PlanConfig())
    assert TARGETS[name].convert(made).account.trained == (3 if name == "sft" else 6)


@pytest.mark.parametrize("name", TARGETS)
def test_what_has_no_logprobs_is_excluded_and_gets_none(name: str) -> None:
    """Turns of a scripted engine or a provider have none: 0.0 would say that they were certain."""
    rollouts = []
    for text, reward in (("a", 1.0), ("b", 0.0)):
        one = rollout(f"suite/{text}", reward)
        [row] = one.trajectory.segments
        shown = replace(row, index=1, kind="demonstrated", ids=row.ids + 500, logprobs=0 * row.logprobs)
        ledger = Ledger(captured=6, trained=3, excluded={"demonstrated": 3})
        path = _with_turns(one.trajectory)
        [turn] = path.turns
        said = replace(turn, index=1, context_ids=shown.ids[:4], ids=shown.ids[4:7], logprobs=None)
        path = replace(path, segments=(*path.segments, shown), turns=(turn, said), ledger=ledger)
        rollouts.append(replace(one, trajectory=path))
    groups = rows_of([Group(id="suite", task_id="t", rollouts=tuple(rollouts))], PlanConfig())
    made = TARGETS[name].convert(groups)
    taken = 3 if name == "sft" else 6
    assert made.account.trained == taken
    assert made.account.excluded["demonstrated"] == 6
    payload = made.payload if isinstance(made.payload, list) else [made.payload]
    rows = TARGETS[name].read(payload)
    assert sum(int(row.mask.sum()) for row in rows) == taken
    assert all((row.logprobs[row.mask] < 0).all() and (row.ids < 500).all() for row in rows)


def _with_turns(trajectory: Trajectory) -> Trajectory:
    [row] = trajectory.segments
    row = replace(row, **{name: getattr(row, name)[:7] for name in ("ids", "mask", "logprobs", "versions")})
    turn = Turn(
        index=0,
        parent=-1,
        context_ids=row.ids[:4],
        ids=row.ids[4:7],
        logprobs=row.logprobs[4:7],
        finish="stop",
        version_runs=((0, 4),),
    )
    return replace(trajectory, segments=(row,), turns=(turn,))


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_a_form_of_export(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    assert main(["export", str(run), "--to", name, "--out", str(out), "--check", "--json"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["checked"]
    written = [
        row for path in (out / "data").iterdir() for row in TARGETS[name].read(read_payload(path, name))
    ]
    assert report["rows"] == sum(bool(row.mask.any() and row.weight != 0.0) for row in written)
    account = report["account"]
    assert account["captured"] == account["trained"] + sum(account["excluded"].values())
    if name not in ("dpo", "sft"):  # they take some of a group
        assert account["trained"] >= sum(step.ledger.trained for step in insitu.open_run(run).steps)
    steps = sorted(path.stem for path in (out / "data").iterdir())
    assert steps == ["train-00001", "train-00002", "train-00003"]
    assert (out / "manifest.json").exists()
