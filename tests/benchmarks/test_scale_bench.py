"""The benchmarks of fleets print what they promise."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import pytest

from benchmarks import fleet, scale
from benchmarks._cluster import Bytes, Cluster, lines
from insitu_train.options import shards_of

pytestmark = pytest.mark.slow

LABELS = {"measured", "predicted", "derived", "given"}


def test_scale_measures_the_controller(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "--sessions", "64", "--machines", "4", "--rollouts", "32"]
    threshold = gc.get_threshold()
    assert scale.main(words) == 0
    assert gc.get_threshold() == threshold
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"sessions", "cores", "gib", "rollouts_per_s", "commit_s", "stored_kb"}
    assert found["sessions"] == 64
    assert min(found.values()) >= 0


def test_nodes_that_answer_at_once_are_measured() -> None:
    found = fleet.measured(2, 4, ["fleet.kind=processes"])
    assert set(found) == {"added_ms", "rollouts_per_s"}
    assert min(found.values()) > 0


def test_the_arithmetic_of_a_cluster_is_its_formulas() -> None:
    c = Cluster(hosts=4, trainers=2, gpus=8, shards=8, rollouts=10, tokens=1_000_000, link=1e9, front=1e9)
    b = Bytes(plan=13.0, frame=1e5, calls=2e5, store=3e5, per_s=100.0, commit_s=0.1)
    found = {line.what: line for line in lines(c, b, 10**9, {"for a test": 7.0})}
    assert found["memory of a rank, for a test"].figure == "7 GB"
    # two copies: each host sends what it gets, 2 x 1/2 x 4 bytes x 1e9
    assert found["gradients between copies of the model, per host and step"].figure == "4.0 GB, 4.0 s"
    assert (
        found["plan, per host"].figure == found["plan, out of the learner's host"].figure == "0.1 GB, 0.1 s"
    )
    assert found["weights, read by all servers from one folder"].figure == "4.0 GB, 4.0 s"
    assert found["checkpoint from the learner's host"].figure == "12.0 GB, 12.0 s"
    assert not any("one copy, per host" in what for what in found), "a copy is inside one host"
    assert all(line.how.split(":")[0].split(",")[0] in LABELS for line in found.values())
    spread = {line.what for line in lines(replace(c, shards=16), b, 10**9, {})}
    assert any("one copy, per host" in what for what in spread)
    assert not any("between copies" in what for what in spread), "there is one copy"
    # the same link for both: 80 layers x 2 x 1,024 x 131,072 x 8 bytes
    assert found["keys and values of a shared row of 131,072 tokens, per host"].figure == "171.8 GB, 171.8 s"


def test_a_rank_that_needs_more_than_its_gpu_is_marked() -> None:
    b = Bytes(plan=13.0, frame=1e5, calls=2e5, store=3e5, per_s=100.0, commit_s=0.1)
    found = {line.what: line.figure for line in lines(Cluster(), b, 10**9, {"a": 94.0, "b": 79.0})}
    assert found["memory of a GPU"] == "80 GB"
    assert found["memory of a rank, a"] == "94 GB, does not fit"
    assert found["memory of a rank, b"] == "79 GB"


def test_the_layout_is_one_that_the_trainer_makes() -> None:
    c = Cluster()
    ranks = [c.gpus] * c.trainers
    assert c.shards in (shards_of(ranks), shards_of([1, c.gpus - 1, *ranks[1:]]))


def test_bytes_are_those_of_the_code_that_sends_them() -> None:
    found = scale.measured_bytes({"rollouts_per_s": 100.0, "commit_s": 0.1})
    # ids, log-probabilities and versions of 4 bytes, a mask of one
    assert 13.0 < found.plan < 14.0
    assert found.frame > 13 * scale.TURNS * (scale.NEW + scale.SAMPLED)
    assert found.store > 13 * scale.TURNS * (scale.NEW + scale.SAMPLED)
    assert found.calls > 4 * (scale.NEW + scale.SAMPLED) * scale.TURNS * (scale.TURNS + 1) / 2
