"""slime's own conversion of the bridge's Samples, from a rollout function and from a debug file; prints JSON.

Run in a process of its own with a checkout of slime on the path: what of its imports is not installed here
(Ray, sglang, Megatron) is replaced by mocks.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from row_lab import PLAN, groups
from slime_lab import Source

from insitu.config import load_config
from insitu_bridges import slime
from insitu_bridges.rows import rows_of

MOCKED = ("ray", "sglang", "sglang_router", "megatron", "mbridge", "torch_memory_saver", "wandb")
ARGS = SimpleNamespace(
    reward_key=None, advantage_estimator="grpo", rewards_normalization=True, n_samples_per_prompt=5,
    rollout_batch_size=2, grpo_std_normalization=False, rollout_top_p=1.0, use_rollout_routing_replay=False,
)  # fmt: skip


class Mocks:
    """Finds modules that are not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] in MOCKED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        module.remote = lambda *given, **options: given[0] if given else (lambda kind: kind)
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def main() -> None:
    sys.meta_path.append(Mocks())  # type: ignore[arg-type]
    rollout = importlib.import_module("slime.ray.rollout")
    utils = importlib.import_module("slime.observability.rollout_data_utils")
    sample = importlib.import_module("slime.utils.types").Sample

    def prompts(count: int) -> Any:
        return [[sample(index=5 * g + s, group_index=g) for s in range(5)] for g in range(count)]

    config = load_config(None, ["collect.group_size=5", "collect.groups_per_step=2"])
    slime._tokenizer = lambda folder: SimpleNamespace(decode=lambda ids, **_: str(ids))  # type: ignore[assignment]
    slime._source = lambda args, parameters=None: (Source(groups()[0].rollouts[0], groups()), config)  # type: ignore[assignment]
    nested = slime.generate_rollout(ARGS, 0, SimpleNamespace(get_samples=prompts))
    utils.validate_rollout_id_annotated(nested)
    made = [one for group in nested for rows in group for one in rows]

    with tempfile.TemporaryDirectory() as folder:
        payload = slime.to_samples(rows_of(groups(), PLAN)).payload
        torch.save({"rollout_id": 0, "samples": payload}, Path(folder, "0.pt"))
        loaded = utils.load_debug_rollout_data(f"{folder}/{{rollout_id}}.pt", rollout_id=0)

    def converted(samples: Any, rewards: Callable[..., Any] | None) -> Any:
        manager = SimpleNamespace(
            args=ARGS,
            custom_reward_post_process_func=rewards,
            custom_convert_samples_to_train_data_func=None,
        )
        manager._post_process_rewards = MethodType(rollout.RolloutManager._post_process_rewards, manager)
        data = rollout.RolloutManager._convert_samples_to_train_data(manager, samples)
        return {name: data[name] for name in ("rewards", "rollout_ids", "rollout_mask_sums", "tokens")}

    shown = {
        "default": converted(made, None),
        "ours": converted(made, slime.rewards),
        "file": converted(loaded, slime.rewards),
    }
    print(json.dumps(shown))


main()
