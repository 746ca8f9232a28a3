"""The head's benchmark prints what it promises and notices wrong gradients."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from benchmarks import head
from benchmarks._head_sides import Grads, Problem, insitu_side, problem
from insitu_train.loss import chunked_logits as tiles

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

SMALL = "--device cpu --positions 64 --hidden 16 --vocab 128 --repeats 1 --no-peers".split()


def test_one_object_with_every_case_and_memory_of_a_tile(capfd: pytest.CaptureFixture[str]) -> None:
    assert head.main([*SMALL, "--json"]) == 0
    out, _ = capfd.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert list(result) == ["cases"]
    whole, quarter = result["cases"]
    assert (whole["trained"], quarter["trained"]) == (1.0, 0.25)
    for case in (whole, quarter):
        assert list(case) == ["positions", "hidden", "trained", "ms", "floor_ms", "extra_gib", "peers"]
        assert case["ms"] > 0
        assert case["floor_ms"] > 0
    # exponentials of 16 rows are fewer than those of 64, and there are some
    assert 0 < quarter["extra_gib"] < whole["extra_gib"] < 1e-3


def test_wrong_gradients_fail_it_and_the_table_says_how_wrong(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(head, "ERRORS", {torch.float32: 1e-12, torch.bfloat16: 1e-12})
    monkeypatch.setenv("COLUMNS", "60")
    assert head.main(SMALL) == 1
    out, err = capfd.readouterr()
    assert list(json.loads(out)) == ["cases"]
    assert f"torch {torch.__version__}, CPU time" in err
    assert "error" in err


def test_errors_are_measured_against_float64() -> None:
    p = problem(positions=32, hidden=16, vocab=64, trained=0.5, device=torch.device("cpu"))
    true, found = head.reference(p), insitu_side(p)
    assert max(head.errors(found, true).values()) < 1e-5
    found.d_weight[3, 3] += 0.1 * float(true.d_weight.abs().max())
    assert head.errors(found, true)["d_weight"] == pytest.approx(0.1, rel=0.05)


def test_every_tile_is_checked_and_three_runs_warm_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A head that is right in its first tile only is found wrong."""
    seen: list[int] = []

    def broken(p: Problem) -> Grads:
        seen.append(p.trained)
        found = insitu_side(p)
        found.d_hidden[2 * tiles.CPU_TILE[0] :] = 0
        return found

    monkeypatch.setattr(head, "sides", lambda device, peers: ({"insitu": broken}, {}))
    assert head.main([*SMALL, "--json", "--trained", "1"]) == 1
    checked, *timed = seen
    assert checked > 2 * tiles.CPU_TILE[0]
    assert timed == [64] * (3 + 1 + 1)  # warm-ups, one repeat, memory
    capfd.readouterr()


def test_what_is_cast_of_the_weight_counts_as_extra_memory() -> None:
    """The trainer's weight is of another type than is computed in: casting it for a pass takes room."""
    p = problem(positions=64, hidden=64, vocab=512, trained=1.0, device=torch.device("cpu"))
    assert p.weight.dtype == p.master.dtype == torch.float32
    copy = p.weight.nbytes / 2**30
    cast = dataclasses.replace(p, master=p.weight.double())
    assert head.extra(cast, insitu_side) - head.extra(p, insitu_side) == pytest.approx(copy, rel=0.1)
