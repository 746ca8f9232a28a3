"""A step of verl's own trainer over insitu's rollouts, in an interpreter with verl (test_verl_trainer.py).

verl's are the configuration, the trainer's step, its agent loop workers on Ray, TransferQueue, the replay
buffer and the advantages. Stand-ins are its servers (a model of chance) and the worker group of the actor,
which keeps the batch that it should train on.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
import verl
import verl.utils.tensordict_utils as tu
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from sampler import ChanceModel
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from insitu.config import WARM_START
from insitu_bridges import task_ids
from insitu_bridges.process import read_named

FIELDS = ("input_ids", "response_mask", "old_log_probs", "rm_scores", "advantages")


class Servers:
    """What the loop calls of verl's client of its servers, at step 1."""

    def __init__(self, words: int) -> None:
        self.words, self.random = words, np.random.default_rng(0)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any) -> Any:
        model, ids, logprobs = ChanceModel(self.words, "w"), list[int](), list[float]()
        while len(ids) < min(24, sampling_params["max_tokens"]):
            row = model.logprobs([*prompt_ids, *ids], sampling_params["temperature"])
            ids.append(int(self.random.choice(len(row), p=np.exp(row))))
            logprobs.append(float(row[ids[-1]]))
            if ids[-1] in sampling_params["stop_token_ids"]:
                break
        steps = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
        return SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=steps)


class Actor:
    """The worker group of the actor: one rank, which trains nothing."""

    def __init__(self) -> None:
        self._dispatch_info, self.rows = {"actor": [0]}, list[dict[str, Any]]()

    def update_actor(self, batch: Any) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*FIELDS])
        for at, key in enumerate(batch.keys):
            self.rows.append({"key": key} | {name: data[name][at].tolist() for name in FIELDS})
        return {"metrics": {"mfu": [0.0]}}


def configured(loop: Path) -> Any:
    changes = {
        "actor_rollout_ref.model.path": WARM_START,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": loop,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "insitu",
        "actor_rollout_ref.rollout.agent.num_workers": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_batch_size": 2,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
        "trainer.device": "cpu",
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
    }
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", [f"{name}={value}" for name, value in changes.items()])
    OmegaConf.resolve(config)
    return config


def step(folder: Path) -> list[dict[str, Any]]:
    """One step of two tasks and four rollouts each; return the rows for the actor."""
    loop = folder / "loop.yaml"
    loop.write_text("- {name: insitu, _target_: insitu_bridges.verl.AgentLoop}\n")
    config, tasks = configured(loop), task_ids(read_named(), 2)
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "INSITU_CONFIG")}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": kept})
    tq.init(config.transfer_queue)
    trainer = PPOTrainerSync(config)
    trainer.global_steps, trainer.curr_step_profile = 1, False
    trainer.tokenizer = SimpleNamespace(eos_token_id=2)
    trainer.actor_rollout_wg = actor = Actor()
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    trainer.agent_loop_manager = AgentLoopManagerTQ.create(config, Servers(454), None, None)
    trainer._fetch_one_gen_batch = lambda: tu.get_tensordict(
        {
            "uid": np.array([str(uuid.uuid4()) for _ in tasks], dtype=object),
            "index": np.arange(len(tasks)),
            "extra_info": np.array([{"task_id": task} for task in tasks], dtype=object),
        }
    )
    trainer.step({}, {})
    return actor.rows


if __name__ == "__main__":
    found = step(Path(sys.argv[1]))
    Path(sys.argv[1], "rows.json").write_text(json.dumps(found))
    ray.shutdown()
