"""Trainers of TRL on this machine's CPU."""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from insitu.config import WARM_START, Config, load_config


def toy_config(run_dir: Path, **tables: dict[str, Any]) -> Config:
    """The toy task with the scripted agent in sandboxes of this machine."""
    base = {
        "run": {"dir": str(run_dir)},
        "tasks": {"source": "toy"},
        "harness": {"agent": "script", "mode": "warm", "workers": 12},
        "collect": {"groups_per_step": 4, "group_size": 8, "max_staleness": 1},
        "model": {"max_context_tokens": 2048},
    }
    return load_config(
        None, (), {name: {**base.get(name, {}), **tables.get(name, {})} for name in {**base, **tables}}
    )


def check_page_trains(monkeypatch: pytest.MonkeyPatch, has: str, config: str) -> None:
    """Run the block of docs/bridges.md that has these words, with a model of this machine on its CPU.

    config: name of the class of TRL that takes its arguments.
    """
    import trl

    page = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    block = next(code for code in blocks if has in code)
    block = block.replace('model="model"', f"model={str(WARM_START)!r}")
    on_cpu = functools.partial(getattr(trl, config), use_cpu=True, bf16=False, report_to="none")
    monkeypatch.setattr(trl, config, on_cpu)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/bridges.md", "exec"), names)
    assert names["trainer"].state.global_step == 1
    assert math.isfinite(names["trainer"].state.log_history[-1]["train_loss"])


def stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the two functions without which AsyncGRPOTrainer cannot be made on a CPU."""
    import torch
    import torch.nn.functional as F
    import trl.experimental.async_grpo.async_grpo_trainer as trainer
    import trl.experimental.async_grpo.packing as packing

    def attend(
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> Any:
        """Causal attention of packed sequences, aligned at the end, as `flash_attn_varlen_func`."""
        out, shared = torch.empty_like(q), q.shape[1] // k.shape[1]
        for (a, b), (c, d) in zip(_spans(cu_q), _spans(cu_k), strict=True):
            keys, values = (x[c:d].repeat_interleave(shared, 1).transpose(0, 1)[None] for x in (k, v))
            n, m = b - a, d - c
            seen = torch.arange(m)[None] <= torch.arange(n)[:, None] + (m - n)
            found = F.scaled_dot_product_attention(
                q[a:b].transpose(0, 1)[None], keys, values, attn_mask=seen, scale=softmax_scale
            )
            out[a:b] = found[0].transpose(0, 1)
        return out

    monkeypatch.setattr(trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: types.SimpleNamespace(flash_attn_varlen_func=attend))


def _spans(ends: Any) -> Sequence[tuple[int, int]]:
    return list(itertools.pairwise(ends.tolist()))


def arguments(**own: Any) -> types.SimpleNamespace:
    """What the bridge reads of an AsyncGRPOConfig."""
    values = {
        "temperature": 1.0,
        "token_budget": 0,
        "max_staleness": 4,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "weight_sync_steps": 1,
        "world_size": 1,
    }
    return types.SimpleNamespace(**{**values, **own})


def async_args(folder: Path, **own: Any) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    values = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "token_budget": 0,
        "learning_rate": 3e-4,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "vllm_server_timeout": 5.0,
    }
    return AsyncGRPOConfig(output_dir=str(folder), **{**values, **own})


def async_trainer(args: Any, worker: Any, transfer: Any, model: Path = WARM_START) -> Any:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": "unused"}]]})
    return AsyncGRPOTrainer(
        model=str(model), reward_funcs=None, args=args, train_dataset=prompts,
        rollout_worker=worker, weight_transfer=transfer,
    )  # fmt: skip
