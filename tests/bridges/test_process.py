"""The rollout source in a child process, with real agents, sandboxes, engine and store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl_cpu import arguments, toy_config

from insitu.config import WARM_START, Config
from insitu.errors import ConfigError, EngineError, TaskError
from insitu.storage.run_dir import read_store, read_summary
from insitu_bridges import open_source, task_ids, trl
from insitu_bridges.process import weights_folder
from insitu_bridges.thread import SourceThread
from insitu_bridges.trl.weights import write_weights
from insitu_train.embedded.model import load_model

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
OTHER = {"kind": "upstream", "urls": ["http://127.0.0.1:1/v1"], "model": "other"}


def small(folder: Path) -> Config:
    return toy_config(
        folder / "run",
        harness={"agent": "script", "workers": 2, "mode": "warm"},
        collect={"groups_per_step": 1, "group_size": 2, "max_staleness": 1},
    )


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = {pid}, {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.05)


def tensors(folder: Path) -> list[tuple[str, Any]]:
    model = load_model(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    return list(model.named_parameters())


@pytest.mark.full
async def test_groups_runs_and_weights(tmp_path: Path) -> None:
    config = small(tmp_path)
    held_out = task_ids(config, 2, split="eval")
    async with open_source(config) as source:
        pids = descendants(source.pid)
        first = await source.next()
        assert (first.step, first.version, len(first.groups), len(first.groups[0].rollouts)) == (1, 0, 1, 2)

        await source.pause(1)
        folder = weights_folder(source.run_dir, 1)
        write_weights(
            folder, WARM_START, 1, [(n, t) for n, t in tensors(WARM_START) if n != "lm_head.weight"]
        )
        await source.load(1)
        await source.version(1)
        one = await source.run(held_out[1], 3, evaluation=True)
        assert one.task_id == held_out[1]
        assert {int(v) for s in one.trajectory.segments for v in s.versions[s.mask]} == {1}
        again = await source.run(held_out[1], 3, evaluation=True)
        assert np.array_equal(again.tokens().ids, one.tokens().ids)
        assert again.began_s == one.began_s

        trained = await source.run(held_out[0], 3)
        assert trained.id != one.id
        with pytest.raises(TaskError, match="no task 'unknown'"):
            await source.run("unknown", 4)
        with pytest.raises(EngineError, match="v000009"):
            await source.load(9)
        with read_store(source.run_dir) as store:
            assert [step.metrics["version"] for step in store.steps()] == [0, 1]
            assert store.state(one.id).reason == "evaluation"  # type: ignore[union-attr]
            assert store.state(trained.id).state == "trained"  # type: ignore[union-attr]
    wait_for(lambda: not any(map(alive, pids)))
    assert (read_summary(source.run_dir) or {})["steps"] == 2
    with read_store(source.run_dir) as store:
        assert store.ledger().balanced


async def test_a_failed_start_is_raised_in_one_line(tmp_path: Path) -> None:
    config = toy_config(tmp_path / "run", engine=OTHER)
    with pytest.raises(ConfigError, match="upstream"):
        async with open_source(config):
            pass


@pytest.mark.full
def test_a_worker_under_a_trainer_until_its_child_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that AsyncGRPOTrainer makes, in their order, with two versions."""
    monkeypatch.setattr("insitu_bridges.trl.asynchronous.to_samples", _tuples)
    args = arguments(per_device_train_batch_size=1, max_staleness=8)
    worker = trl.RolloutWorker(small(tmp_path), args)
    transfer = trl.Transfer(worker)
    try:
        transfer.init_weight_transfer()
        for version in (1, 2):
            transfer.pause()
            transfer.send_weights(iter([(n, t) for n, t in tensors(WARM_START) if n != "lm_head.weight"]))
            transfer.resume()
            worker.update_model_version(version)
            if version == 1:
                worker.start()
            group = worker.rollout_buffer.get(timeout=LIMIT_S)
            assert int(group.rollouts[0].rollout.tokens().versions.max()) in (1, version)  # type: ignore[attr-defined]
            worker.check_health(300.0)
        assert sorted(path.name for path in (tmp_path / "run" / "weights").iterdir()) == [
            "v000001",
            "v000002",
        ]
        assert worker.metrics_queue.get(timeout=LIMIT_S)["insitu/groups_total"] == 1.0

        with pytest.raises(Exception, match="no row to train for"):
            monkeypatch.setattr(worker, "_last_row", time.monotonic() - 100)
            worker.check_health(50.0)

        pids = descendants(worker.source.source.pid)
        os.kill(worker.source.source.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"the rollout source died \(killed by signal 9\)"):
            wait_for(lambda: worker.check_health(300.0) is not None)
        wait_for(lambda: not any(map(alive, pids)))
    finally:
        transfer.destroy()
        worker.stop()
        worker.stop()


def _tuples(groups: Any, first_group: int = 0) -> Any:
    """A conversion whose payload is the groups themselves: TRL is not installed."""
    from insitu_bridges.rows import convert

    return convert(list(groups), groups, [(row.rollout_id, row.segment) for g in groups for row in g.rows])


@pytest.mark.full
def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves no process of the source behind."""
    code = (
        "import sys, time; from pathlib import Path; from insitu_bridges.thread import SourceThread;"
        "from insitu.config import load_config;"
        "source = SourceThread(load_config(Path(sys.argv[1]))); print(source.source.pid, flush=True);"
        "time.sleep(600)"
    )
    from insitu.config import dump_toml

    file = tmp_path / "insitu.toml"
    file.write_text(dump_toml(small(tmp_path)))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = descendants(int(parent.stdout.readline()))
        parent.kill()
    assert len(pids) > 1
    wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.full
def test_a_closed_source_says_so(tmp_path: Path) -> None:
    source = SourceThread(small(tmp_path))
    source.close()
    source.close()
    with pytest.raises(EngineError, match="closed"):
        source.call(lambda child: child.check())
