"""The table [sft]: which stored rollouts are used for supervised training.

The learner's keys of [train] apply here too: threads, token budget, gradient clip, warm-up, memory.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from insitu.config.base import Count, CountOrZero, Keys, OwnPath, Table


class SelectionKeys(Keys):
    """Stored rollouts that are used."""

    min_reward: float = 1.0
    """Least reward of a rollout that is used."""
    per_task: CountOrZero = 4
    """Most rollouts of one task: those with the highest reward, then the latest; 0 = all."""
    dedup: bool = True
    """Skip a rollout whose tokens are identical to another one of its task."""
    held_out: bool = False
    """Use rollouts of held-out tasks too; evaluations on them are invalid afterwards."""


class SftTable(SelectionKeys, Table):
    """`insitu sft RUN`: supervised training on stored rollouts."""

    run: OwnPath = ""
    """Run directory whose rollouts are used; the command line names it."""
    epochs: Count = 2
    """Passes over the chosen rollouts."""
    rollouts_per_step: Count = 32
    """Rollouts in one optimizer step; the last step of a pass takes the remainder."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    decay: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate schedule after the warm-up."""
    checkpoint_every_steps: Count = 20
    """Steps between checkpoints; a killed run loses the steps since the last one."""
