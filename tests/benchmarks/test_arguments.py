"""A wrong command line of a benchmark is one line on stderr and exit code 2, before anything is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks.__main__ import main

pytestmark = pytest.mark.slow

NAMES = sorted(p.stem.rstrip("_") for p in Path(benchmarks.__file__).parent.glob("[!_]*.py"))


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line."""
    with pytest.raises(SystemExit) as stop:
        sys.exit(main(arguments))
    found = capsys.readouterr()
    assert (stop.value.code, found.out, found.err.count("\n")) == (2, "", 1), found
    return found.err.rstrip("\n")


def test_the_benchmarks_are_listed_and_an_unknown_name_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == NAMES
    assert said(["nonsense"], capsys).startswith("benchmarks: no benchmark 'nonsense'; there are: ")


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_refuses_what_it_does_not_know(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said([name, "--nonsense=1"], capsys).startswith(f"benchmarks: {name}: ")


WRONG = {
    "async --seeds 0": "argument --seeds: '0' is not a whole number of 1 or more",
    "async --updates -3": "argument --updates: '-3' is not a whole number of 1 or more",
    "async --staleness -1": "argument --staleness: '-1' is not a whole number of 0 or more",
    "async --train-s -1": "argument --train-s: '-1' is not a number of 0 or more",
    "async --deadline-s nan": "argument --deadline-s: 'nan' is not a number above 0",
    "planner --rollouts 4": "--rollouts 4: groups are of 8, give a multiple of it",
    "planner --tokens 3": "--tokens 3: a rollout with a fork has 1000 tokens or more",
    "planner --repeats 0": "argument --repeats: '0' is not a whole number of 1 or more",
    "head --repeats x": "argument --repeats: 'x' is not a whole number of 1 or more",
    "head --trained 1.5": "argument --trained: '1.5' is not a number above 0 and up to 1",
    "tree --scale 0": "argument --scale: '0' is not a number above 0",
    "tree --forks 2": "argument --forks: '2' is not a number from -1 to 1",
    "long --tokens 4096": "--tokens needs --models: the shapes that are given these lengths",
    "long --models 3m --tokens 2": "--tokens 2: a row has 64 tokens or more",
    "chaos --kills -1": "argument --kills: '-1' is not a whole number of 0 or more",
    "chaos --keep /": "--keep /: is not empty",
    "gateway --only nonsense": "--only nonsense: no shape begins so",
    "publish --repeats 0": "argument --repeats: '0' is not a whole number of 1 or more",
    "sandbox --rounds 0": "argument --rounds: '0' is not a whole number of 1 or more",
}


@pytest.mark.parametrize("line", WRONG)
def test_numbers_that_make_no_sense_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(line.split(), capsys) == f"benchmarks: {line.split()[0]}: {WRONG[line]}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in make test-full")
@pytest.mark.parametrize("name", ["head", "tree"])
def test_a_gpu_that_is_not_there_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"benchmarks: {name}: --device cuda: torch sees no GPU here"
    assert said([name, "--device", "cuda"], capsys) == expected
