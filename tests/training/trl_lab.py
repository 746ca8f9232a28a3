"""TRL's own loss code, run as it stands: functions and statements are cut out of the installed source: its
trainer needs packages that insitu does not (requirements/vocabulary.txt installs TRL alone)."""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


@functools.cache
def source(name: str) -> ast.Module:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return ast.parse((Path(found.origin).parent / name).read_text())


@functools.cache
def function(name: str, module: str = "trainer/grpo_trainer.py") -> Any:
    """A function or method, without decorators and annotations."""
    (node,) = (n for n in ast.walk(source(module)) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list.clear()
    node.returns = None
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    names: dict[str, Any] = {"torch": torch, "math": math, "np": np, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module([node], []), module, "exec"), names)
    return names[name]


def assigned(module: str, text: str, names: dict[str, Any]) -> Any:
    """Run the assignment that begins so, wherever it stands, and return what it assigned."""
    (node,) = (
        n for n in ast.walk(source(module)) if isinstance(n, ast.Assign) and ast.unparse(n).startswith(text)
    )
    names |= {"torch": torch, "np": np}
    exec(compile(ast.Module([node], []), module, "exec"), names)
    target = node.targets[0]
    return names[target.id if isinstance(target, ast.Name) else ast.unparse(target).partition("[")[0]]


def sampler_ratio(host: Any, old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What GRPOTrainer multiplies its loss by: the statements of _generate_and_score_completions."""
    (node,) = (
        n
        for n in ast.walk(source("trainer/grpo_trainer.py"))
        if isinstance(n, ast.If)
        and ast.unparse(n.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "logps_diff = per_token_logps_diff" in ast.unparse(n)
    )
    names = {
        **{"torch": torch, "math": math, "self": host, "completion_mask": mask, "tool_mask": None},
        **{"old_per_token_logps": old, "sampling_per_token_logps": sampling},
    }
    exec(compile(ast.Module([node], []), "grpo_trainer.py", "exec"), names)
    return names["vllm_importance_sampling_ratio"]  # type: ignore[return-value]


class _Metrics(dict[str, dict[str, Any]]):
    """Takes whatever is appended."""

    def __missing__(self, key: str) -> Any:
        return self.setdefault(key, SimpleNamespace(append=lambda value: None))  # type: ignore[arg-type]


class Host:
    """The attributes of a GRPOTrainer that its loss reads; `logps` is what the model would have said."""

    def __init__(self, logps: torch.Tensor, **settings: Any) -> None:
        self.logps = logps
        self.__dict__.update(
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0,
            importance_sampling_level="token", loss_type="grpo", epsilon_low=0.2, epsilon_high=0.2,
            use_vllm=False, vllm_importance_sampling_correction=False, vllm_importance_sampling_mode="",
            vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=None,
            max_completion_length=logps.shape[1], _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
        )  # fmt: skip
        self.__dict__.update(settings)
        self.args = SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            steps_per_generation=1,
        )
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(num_processes=1, reduce=lambda t, reduction: t, gather=lambda t: t)
        self._metrics = {"train": _Metrics()}
        self.get_off_policy_mask = function("get_off_policy_mask")

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        return self.logps, torch.zeros_like(self.logps), None

    def loss(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """TRL's scalar loss of a padded batch."""
        shape = self.logps.shape
        given = {
            "prompt_ids": torch.zeros(shape[0], 1, dtype=torch.long),
            "prompt_mask": torch.ones(shape[0], 1, dtype=torch.long),
            "completion_ids": torch.zeros(shape, dtype=torch.long),
            "num_items_in_batch": inputs["completion_mask"].sum(),
            **inputs,
        }
        found: torch.Tensor = function("_compute_loss")(self, None, given)
        return found
