"""GRPOTrainer on two hosts with a rollout source on each (scripts/test-bridges): two network namespaces with
an address each, gloo, one rank per host, started by `accelerate launch` as docs/bridges.md has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_cpu import toy_config

from insitu.config import WARM_START, dump_toml
from insitu.storage.run_dir import read_store
from insitu_bridges import task_ids, trl

# The packages warn about one another.
pytestmark = [pytest.mark.bridge, pytest.mark.full, pytest.mark.filterwarnings("default")]
STEPS = 3
SCRIPT = """
import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from insitu_bridges import task_ids, trl

config, model, out = sys.argv[1:]
rollouts, seen = trl.rollout_func(config), []

def recorded(prompts, trainer):
    seen.append(rollouts(prompts, trainer))
    return seen[-1]

args = GRPOConfig(
    output_dir=f"{out}/trl", max_steps=STEPS, per_device_train_batch_size=4, num_generations=8,
    learning_rate=1e-3, temperature=1.0, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
    beta=0.0,
)
prompts = Dataset.from_dict({"prompt": task_ids(config, 8)})
trainer = GRPOTrainer(
    model=model, reward_funcs=trl.reward, args=args, train_dataset=prompts, rollout_func=recorded
)
trainer.train()
rollouts.close()
rank, whole = trainer.accelerator.process_index, trainer.accelerator.unwrap_model(trainer.model)
torch.save({"seen": seen, "weights": whole.state_dict()}, f"{out}/rank-{rank}.pt")
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with 10.77.0.1 and 10.77.0.2 on a cable between them."""
    names = [f"insitu-{os.getpid()}-{n}" for n in (1, 2)]
    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ip("netns", "add", names[1])
        ends = [["name", "cable", "netns", name] for name in names]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def launched(host: str, rank: int, script: Path, *words: str) -> subprocess.Popen[str]:
    command = ["nsenter", f"--net=/var/run/netns/{host}"]
    command += [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--multi_gpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank)]
    command += ["--main_process_ip", "10.77.0.1", "--main_process_port", "29511", str(script), *words]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=script.parent
    )


def test_two_hosts_train_as_one_process_on_rollouts_of_their_own(
    hosts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl as package
    from datasets import Dataset

    config = toy_config(tmp_path / "run", harness={"agent": "script", "workers": 2, "mode": "warm"})
    file, script = tmp_path / "insitu.toml", tmp_path / "train.py"
    file.write_text(dump_toml(config))
    script.write_text(SCRIPT.replace("STEPS", str(STEPS)))
    words = (str(file), str(WARM_START), str(tmp_path))
    running = [launched(host, rank, script, *words) for rank, host in enumerate(hosts)]
    try:
        said = [one.communicate(timeout=400)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [0, 0], "\n".join(text[-3000:] for text in said)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
    for name, weight in ranks[0]["weights"].items():
        assert weight.equal(ranks[1]["weights"][name]), name
    for rank, found in enumerate(ranks):
        with read_store(tmp_path / f"run-rank-{rank}") as store:
            stored = [store.rollout(name) for out in found["seen"] for name in out["rollout_id"]]
        assert [int(one.tokens().versions.max()) for one in stored] == [0] * 4 + [1] * 4 + [2] * 4
    replies = [[tuple(ids) for out in found["seen"] for ids in out["completion_ids"]] for found in ranks]
    assert replies[0] != replies[1], "the ranks sample different rollouts"

    both = iter(zip(*(found["seen"] for found in ranks), strict=True))

    def played(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        first, second = next(both)
        return {name: [*first[name], *second[name]] for name in first}

    args = package.GRPOConfig(
        output_dir=str(tmp_path / "one"), max_steps=STEPS, per_device_train_batch_size=8, num_generations=8,
        learning_rate=1e-3, temperature=1.0, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        beta=0.0,
    )  # fmt: skip
    trainer = package.GRPOTrainer(
        model=str(WARM_START), reward_funcs=trl.reward, args=args, rollout_func=played,
        train_dataset=Dataset.from_dict({"prompt": task_ids(config, 8)}),
    )  # fmt: skip
    start = {name: weight.detach().clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    change, gap = (
        sum(float(((weight - other[name]) ** 2).sum()) for name, weight in trainer.model.state_dict().items())
        ** 0.5
        for other in (start, ranks[0]["weights"])
    )
    print(f"norm of the change {change:.3g}, of the difference between two hosts and one process {gap:.3g}")
    assert gap < 1e-3 * change
