"""Rows in the real types of other trainers (scripts/test-bridges)."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer_code import prime_types, taken
from played import AGENTS, played_group

from insitu_bridges.rows import GroupRows, rows_of, step_tokens
from insitu_bridges.targets import check_payload
from insitu_bridges.to_openenv import to_openenv
from insitu_bridges.to_prime import to_prime
from insitu_bridges.to_skyrl import to_skyrl
from insitu_bridges.to_tinker import datums, to_tinker
from insitu_bridges.to_verifiers import to_verifiers
from insitu_bridges.to_verl import to_verl
from insitu_lab.open_renderer import Splitter, open_renderer
from insitu_train.plan.step import PlanConfig

pytestmark = pytest.mark.bridge
Groups = tuple[GroupRows, ...]


@pytest.fixture(scope="module")
def all_groups(tmp_path_factory: pytest.TempPathFactory) -> list[Groups]:
    folder = tmp_path_factory.mktemp("open") / "model"
    renderer, splitter = open_renderer(folder), Splitter(folder / "tokenizer.json", seed=2)
    return [rows_of([asyncio.run(played_group(agent, renderer, splitter))], PlanConfig()) for agent in AGENTS]


def test_verifiers_reads_traces_exactly_over_msgpack_and_json(all_groups: list[Groups]) -> None:
    import msgpack

    trace = pytest.importorskip("verifiers.v1.trace")
    for groups in all_groups:
        items = [item for group in groups for item in group.rollouts]
        traces = [trace.WireTrace.model_validate(one) for one in to_verifiers(groups).payload]
        check_payload("verifiers", groups, [made.to_record(float_decimals=None) for made in traces])
        for item, made in zip(items, traces, strict=True):
            wire = msgpack.unpackb(
                msgpack.packb(made.model_dump(mode="python"), default=str), strict_map_key=False
            )
            record = made.to_record(float_decimals=None)
            for back in (made, trace.WireTrace.model_validate(wire), trace.WireTrace.model_validate(record)):
                _check_branches(item, back)


def _check_branches(item: Any, made: Any) -> None:
    rows = {tuple(segment.ids.tolist()): segment for segment in item.segments}
    branches = list(made.branches)
    assert {tuple(branch.token_ids) for branch in branches} == set(rows)
    assert (
        made.rewards["reward"] is None if item.rollout.reward is None else made.reward == item.rollout.reward
    )
    for branch in branches:
        segment = rows[tuple(branch.token_ids)]
        mask = np.array(branch.sampled_mask)
        assert mask[segment.mask].all()
        logprobs = np.array(branch.logprobs)
        assert np.array_equal(logprobs[segment.mask].astype(np.float32), segment.logprobs[segment.mask])


def test_tinker_takes_every_row(all_groups: list[Groups]) -> None:
    pytest.importorskip("tinker")
    for groups in all_groups:
        payload = to_tinker(groups).payload
        inputs = [
            (d.model_input.to_ints(), {n: t.data for n, t in d.loss_fn_inputs.items()})
            for d in datums(payload)
        ]
        masks = [plain["mask"] for plain in payload]
        check_payload(
            "tinker", groups,
            [
                {"model_input": ids, "loss_fn_inputs": more, "mask": mask}
                for (ids, more), mask in zip(inputs, masks, strict=True)
            ],
        )  # fmt: skip
        for made, plain in zip(datums(payload), payload, strict=True):
            assert made.model_input.to_ints() == plain["model_input"].tolist()
            for name, array in plain["loss_fn_inputs"].items():
                tensor = made.loss_fn_inputs[name]
                assert tensor.dtype == str(array.dtype)
                assert list(tensor.data) == array.tolist()


def _batches(msgspec: Any, prime: Any, groups: Groups) -> Any:
    wire = msgspec.msgpack.encode(to_prime(groups).payload)
    return msgspec.msgpack.Decoder(list[prime.MicroBatch]).decode(wire)


def test_prime_decodes_batches(all_groups: list[Groups]) -> None:
    msgspec = pytest.importorskip("msgspec")
    prime = prime_types()
    for groups in all_groups:
        check_payload("prime", groups, msgspec.to_builtins(_batches(msgspec, prime, groups)))
        rows = [row for group in groups for row in group.rows]
        batches = _batches(msgspec, prime, groups)
        for row, batch in zip(rows, batches, strict=True):
            assert batch.input_ids == row.ids.tolist()
            assert batch.loss_mask == row.mask.tolist()
            logprobs = np.array(batch.inference_logprobs, np.float32)
            assert logprobs.tobytes() == row.logprobs.tobytes()
            weights = np.where(row.mask, row.weight * step_tokens(groups), 0.0).tolist()
            assert batch.rl_weights == weights
            assert batch.advantages == np.where(row.mask, row.advantage, 0.0).tolist()


def test_openenv_validates_every_trace(all_groups: list[Groups]) -> None:
    training = pytest.importorskip("openenv.core.harness.training")
    for groups in all_groups:
        payload = to_openenv(groups).payload
        for made in payload:
            trace = training.TrainingTrace.model_validate(made["trace"])
            made["trace"] = trace.model_dump()
        check_payload("openenv", groups, payload)


def test_datasets_reads_the_exported_folder(run: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    import insitu

    insitu.export_run(run, tmp_path / "hf", to="hf")
    rows = datasets.load_dataset(
        str(tmp_path / "hf"), "rows", split="train", cache_dir=str(tmp_path / "cache")
    )
    rollouts = datasets.load_dataset(
        str(tmp_path / "hf"), "rollouts", split="train", cache_dir=str(tmp_path / "cache")
    )
    stored = insitu.open_run(run).rollouts()
    segments = {(s.rollout_id, s.index): s for one in stored for s in one.trajectory.segments}
    assert len(rows) == len(segments)
    for row in rows.with_format("numpy"):
        segment = segments[str(row["rollout_id"]), int(row["segment"])]
        assert row["logprobs"].tobytes() == segment.logprobs.tobytes()
        assert np.array_equal(row["ids"], segment.ids)
    assert {one["rollout_id"]: one["reward"] for one in rollouts} == {one.id: one.reward for one in stored}


def test_harbor_reads_every_trajectory(run: Path, tmp_path: Path) -> None:
    """Harbor needs Python 3.12, its models of trajectories do not: INSITU_HARBOR_SRC is its wheel."""
    source = os.environ.get("INSITU_HARBOR_SRC")
    if not source:
        pytest.skip("INSITU_HARBOR_SRC names no unpacked wheel of Harbor")
    import insitu

    insitu.export_run(run, tmp_path / "atif", to="atif")
    names = ("harbor", "harbor.models")
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(source, *name.split(".")))]
        sys.modules[name] = package
    try:
        model = importlib.import_module("harbor.models.trajectories").Trajectory
        paths = list((tmp_path / "atif" / "data").glob("*/*/agent/trajectory.json"))
        assert len(paths) == len(insitu.open_run(run).rollouts())
        for path in paths:
            assert model.model_validate_json(path.read_bytes()).steps
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "harbor"]:
            del sys.modules[name]


def test_verl_takes_every_output(all_groups: list[Groups]) -> None:
    from typing import Optional

    import pydantic

    names = {"AgentLoopMetrics", "AgentLoopOutput"}
    file = "verl/experimental/agent_loop/agent_loop.py"
    types_ = {
        "BaseModel": pydantic.BaseModel,
        "ConfigDict": pydantic.ConfigDict,
        "Any": Any,
        "Optional": Optional,
    }
    model = taken("INSITU_VERL_SRC", file, names, **types_)["AgentLoopOutput"]
    for groups in all_groups:
        made = [[model(**output) for output in one] for one in to_verl(groups).payload]
        assert set(to_verl(groups).payload[0][0]) <= set(model.model_fields)
        check_payload("verl", groups, [[output.model_dump() for output in one] for one in made])


def test_skyrl_accepts_its_step_wise_output(all_groups: list[Groups]) -> None:
    file = "skyrl/train/utils/trainer_utils.py"
    names = {"validate_generator_output", "_validate_step_wise_fields"}
    found = taken("INSITU_SKYRL_SRC", file, names, np=np, logger=logging.getLogger("skyrl"))
    for groups in all_groups:
        out = to_skyrl(groups).payload
        out["trajectory_ids"] = [types.SimpleNamespace(**one) for one in out["trajectory_ids"]]
        for one in out["trajectory_ids"]:
            one.to_string = lambda one=one: f"{one.instance_id}_{one.repetition_id}"
        found["validate_generator_output"](3, out, step_wise=True)
