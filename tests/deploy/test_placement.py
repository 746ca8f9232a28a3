"""Which host has which part: the ranks of each, the table of a dry run, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.cli import main
from insitu.config import load_config
from insitu.errors import ConfigError
from insitu_fleet.deploy.placement import Spread, placement, spread

RANKS = "train.ranks=2+4@anywhere:29400"


def test_ranks_are_divided_equally_over_the_other_hosts() -> None:
    config = load_config(None, [RANKS])
    assert spread(config, 3, 0) == Spread(here=2, each=2, port=29400)
    assert spread(config, 2, 0) == Spread(here=2, each=4, port=29400)
    assert spread(load_config(None, ["train.ranks=2"]), 4, 0) == Spread(here=2, each=0, port=0)


@pytest.mark.parametrize(
    ("nodes", "gpus", "said"),
    [
        (1, 0, r"4 ranks come from other hosts: give --nodes, above 1"),
        (4, 0, r"4 ranks do not divide over 3 other hosts \(--nodes 4\)"),
        (2, 2, r"4 ranks on one host, which has --gpus 2"),
    ],
)
def test_ranks_that_do_not_fit_are_one_line(nodes: int, gpus: int, said: str) -> None:
    config = load_config(None, [RANKS, "policy.kind=hf", "model.path=m", "engine.kind=vllm"])
    with pytest.raises(ConfigError, match=rf"^train.ranks = 2\+4@anywhere:29400: {said}"):
        spread(config, nodes, gpus)


def test_the_table_has_a_line_for_each_host() -> None:
    config = load_config(None, [RANKS, "harness.workers=16", "fleet.kind=ray", "sandbox.backend=docker"])
    assert placement(config, 3, 0)[:4] == [
        "host  controller  ranks of the trainer  engine     agents and sandboxes  GPUs",
        "1     yes         2 and the learner     in rank 0  16 at a time, docker  0",
        "2     -           2                     -          16 at a time, docker  0",
        "3     -           2                     -          16 at a time, docker  0",
    ]


def test_what_is_elsewhere_or_started_beside_is_named() -> None:
    served = ["policy.kind=hf", "model.path=m", "engine.kind=vllm"]
    here = load_config(None, [*served, "engine.urls=http://127.0.0.1:8000"])
    assert "vllm (http://127.0.0.1:8000)" in placement(here, 1, 0)[1]
    assert "2 of vllm" in placement(load_config(None, [*served, "engine.replicas=2"]), 1, 0)[1]
    there = placement(load_config(None, [*served, "engine.urls=http://gpu7:8000"]), 1, 0)
    assert there[2:] == ["elsewhere: engine vllm http://gpu7:8000"]


def test_a_dry_run_prints_the_table_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[train]\nranks = "1+2@h:29400"\n')
    assert main(["deploy", "slurm", "mine.toml", "--nodes", "3", "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:4]] == ["host", "1", "2", "3"]
    assert said[4].startswith("at the start each host is compared with the first, a line each")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    assert main(["deploy", "slurm", "mine.toml", "--nodes", "3"]) == 2
    assert "give --out DIR" in capsys.readouterr().err
    assert main(["deploy", "k8s", "mine.toml", "--nodes", "3", "--dry-run"]) == 2
