"""Two real vLLM servers that insitu starts, as one engine: one is killed in a run, and the prefix cache."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_lab import train

import insitu
from insitu.config import load_config
from insitu.engines.launch import launched
from insitu.storage.run_dir import read_store
from tests.fakes.vllm_server import installed_vllm

pytestmark = pytest.mark.full

SETUP = Path(__file__).parents[2] / "scripts" / "setup-vllm"
STARTED = "Application startup complete"
ARGS = ["--enforce-eager", "--max-num-seqs", "16", "--block-size", "32"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}.items():
        monkeypatch.setenv(name, value)


def engine(replicas: int) -> dict[str, object]:
    python = str(installed_vllm(SETUP))
    return {
        "replicas": replicas,
        "python": python,
        "args": ARGS,
        "start_timeout_s": 600.0,
    }


def processes(named: Path) -> dict[int, str]:
    """Return the processes whose command names a path: with the start model of a run, keepers and servers."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return {pid: line for pid, line in found.items() if str(named) in line}


def steps_done(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count('"event":"step"') if file.exists() else 0


def _wait_for_the_other_life(run: Path, config: Path) -> None:
    """Stop the controller until the killed server has started again: on two busy cores that takes minutes."""
    begun = len(list_lives(run))
    controllers = [pid for pid, line in processes(config).items() if "insitu train" in line]
    time.sleep(15.0)  # it has noticed by then
    for pid in controllers:
        os.kill(pid, signal.SIGSTOP)
    try:
        ends = time.monotonic() + 300
        while len(list_lives(run)) == begun and time.monotonic() < ends:
            time.sleep(0.5)
    finally:
        for pid in controllers:
            os.kill(pid, signal.SIGCONT)


def list_lives(run: Path) -> list[str]:
    """Return what each life of a server has logged since it had started."""
    return [life for log in run.glob("logs/engine-*.log") for life in log.read_text().split(STARTED)[1:]]


def test_two_servers_train_and_one_is_killed_in_the_middle(tmp_path: Path) -> None:
    steps = 10
    found: dict[str, Any] = {}
    tables: Mapping[str, Mapping[str, object]] = {
        "run": {"steps": steps},
        "eval": {"count": 32},
        "train": {"lr": 1e-3},
        "collect": {"max_staleness": 1},
        "engine": engine(2),
    }
    run = tmp_path / "t" / "run"
    start = run / "weights" / "start"
    work = threading.Thread(target=lambda: found.update(run=train(tmp_path / "t", "", tables)))
    work.start()
    while steps_done(run) < 1 and work.is_alive():
        time.sleep(0.05)
    servers = {pid: line for pid, line in processes(start).items() if "insitu.engines.keeper" not in line}
    assert len(servers) == 2
    killed = min(servers)
    os.kill(killed, signal.SIGKILL)
    _wait_for_the_other_life(run, tmp_path / "t" / "run.toml")
    work.join(1200.0)
    assert not work.is_alive()
    assert not processes(start), "they end with the run"
    _, summary = found["run"]
    assert summary["rl_steps"] == steps
    assert summary["heldout_after"] >= summary["heldout_before"] + 0.2
    assert summary["max_logprob_gap"] < 1e-3
    with read_store(run) as store:
        store.ledger()
        assert not store.open_rollouts()
        taken = Counter(r.id for step in store.steps() for r in store.step_rollouts(step.step))
        versions = [step.metrics["version"] for step in store.steps()]
    assert max(taken.values()) == 1
    assert versions == sorted(versions)
    lives = list_lives(run)
    assert len(lives) == 3, "one of the two was started again"
    calls = [life.count('POST /inference/v1/generate HTTP/1.1" 200') for life in lives]
    print(f"calls in the lives of the servers: {calls}")
    assert min(calls) > 0, "it was fed the run's weights and served again"


def hit_rate(folder: Path, urls: list[str]) -> float:
    """Share of the prompt tokens of a rollout run that came from a prefix cache; the caches begin empty."""
    for url in urls:
        with urllib.request.urlopen(f"{url}/reset_prefix_cache", data=b"", timeout=30) as answer:
            assert answer.status == 200
    command = [
        *(sys.executable, "-m", "insitu", "rollout", "--plain", "--json", f"run.dir={folder / 'run'}"),
        *("engine.kind=vllm", f"engine.urls={json.dumps(urls)}", "model.max_context_tokens=2048"),
        *("tasks.source=toy", "rollout.count=64", "rollout.samples=1", "harness.agent=script"),
        *("harness.mode=warm", "harness.workers=8"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    prompts = cached = calls = 0
    for rollout in insitu.open_run(folder / "run").rollouts():
        length: dict[int, int] = {-1: 0}
        for turn in rollout.turns:
            prompt = length[turn.parent] + len(turn.context_ids)
            length[turn.index] = prompt + len(turn.ids)
            assert turn.times.cached is not None
            prompts, cached, calls = prompts + prompt, cached + turn.times.cached, calls + 1
    share = cached / prompts
    print(f"{len(urls)} servers: {cached} of {prompts} prompt tokens of {calls} calls cached: {share:.3f}")
    return share


async def test_sessions_stay_where_their_cache_is(tmp_path: Path) -> None:
    chosen = {"run": {"dir": str(tmp_path / "servers")}, "model": {"max_context_tokens": 2048}}
    table = {"kind": "vllm", "publish_dtype": "float32", **engine(2)}
    async with launched(load_config(tables={**chosen, "engine": table}), print) as urls:
        one = await asyncio.to_thread(hit_rate, tmp_path / "one", urls[:1])
        two = await asyncio.to_thread(hit_rate, tmp_path / "two", urls)
    assert one > 0.3
    assert two >= 0.9 * one
