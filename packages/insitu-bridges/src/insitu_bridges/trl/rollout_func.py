"""`rollout_func` of GRPOTrainer: one row per prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from insitu.concurrency import run_all
from insitu.config import Config
from insitu.errors import ConfigError, TrainError
from insitu.types import Group, Rollout, Segment
from insitu_bridges.process import SourceProcess
from insitu_bridges.rows import Conversion, Refusal, RolloutRows, RowKey, convert, rows_of
from insitu_bridges.trl.weights import SourceOwner, check_temperature, publish
from insitu_bridges.versions import Need
from insitu_train.plan.step import PlanConfig

log = logging.getLogger(__name__)

Several = Literal["final", "longest", "refuse"]


def reward(env_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return insitu's rewards: the reward function for GRPOTrainer."""
    return env_reward


def _choose(item: RolloutRows, several: Several) -> Segment | None:
    """Return the segment that stands for a rollout; None when it has none. Raises TrainError."""
    if item.stepped:
        raise TrainError(
            f"rollout {item.rollout.id} is of several steps, and rollout_func takes one row per prompt:"
            " use AsyncGRPOTrainer"
        )
    if several == "refuse" and len(item.segments) > 1:
        raise TrainError(
            f"rollout {item.rollout.id} has {len(item.segments)} rows, and rollout_func takes one per prompt:"
            ' choose several="final" or "longest", or use AsyncGRPOTrainer'
        )
    if several == "longest":
        return max(item.segments, key=lambda segment: len(segment.ids), default=None)
    return item.segments[-1] if item.segments else None


def to_outputs(
    rollouts: Sequence[Rollout], plan: PlanConfig, several: Several
) -> Conversion[dict[str, list[Any]]]:
    """Return one row per rollout as `rollout_func` must; other segments are refused (`target_one_row`).

    A rollout without a token to train, or without a reward, has a row too: nothing of it is trained, and its
    reward is None, which TRL leaves out of the group's mean. Raises TrainError for several="refuse", and for
    rollouts of several steps.
    """
    alone = [Group(id=rollout.id, task_id=rollout.task_id, rollouts=(rollout,)) for rollout in rollouts]
    groups = [group for one in alone for group in rows_of([one], plan)]
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "env_reward", "rollout_id")
    payload: dict[str, list[Any]] = {name: [] for name in names}
    taken: list[RowKey] = []
    refused: dict[RowKey, Refusal] = {}
    for [item] in (group.rollouts for group in groups):
        segment = None if item.rollout.reward is None else _choose(item, several)
        for other in item.segments:
            if other is not segment:
                refused[item.rollout.id, other.index] = "target_one_row" if segment else "target_unscored"
        row = _EMPTY
        if segment is not None:
            taken.append((item.rollout.id, segment.index))
            row = _output(segment)
        reward = None if segment is None else item.rollout.reward
        values = (*row, reward, item.rollout.id)
        for name, value in zip(names, values, strict=True):
            payload[name].append(value)
    return convert(payload, groups, taken, refused, lost=("weights", "versions"))


_Row = tuple[list[int], list[int], list[float], list[int]]
_EMPTY: _Row = ([0], [0], [0.0], [0])
_SHARDED = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM"})
"""Of accelerate's kinds of processes, those of which none has all weights."""


def _output(segment: Segment) -> _Row:
    """Return prompt ids, completion ids, log-probabilities and mask of the completion."""
    first = int(segment.mask.argmax())
    end = len(segment.mask) - int(segment.mask[::-1].argmax())
    mask = segment.mask[first:end]
    logprobs = np.where(mask, segment.logprobs[first:end], 0.0)
    ids = segment.ids.tolist()
    return ids[:first], ids[first:end], logprobs.tolist(), mask.astype(int).tolist()


class RolloutFunc(SourceOwner):
    """A `rollout_func` for GRPOTrainer; prompts are ids of tasks (`insitu_bridges.task_ids`).

    Of several processes each has a source of its own, in a run directory with its rank in the name.
    """

    needs = (Need(("trl:GRPOTrainer",), ("rollout_func",)),)

    def __init__(self, config: Config | Path | str, several: Several) -> None:
        """Use a configuration; the source is opened at the first call."""
        super().__init__(config)
        self._several = several
        if self.config.train.truncated != "keep":
            raise ConfigError("train.truncated must be keep with rollout_func: TRL computes the advantages")
        self._loaded = -1
        """`global_step` of the weights in the engine."""
        self._keys = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one row per prompt, sampled with the trainer's weights. Raises InsituError."""
        self._check(trainer)
        step = int(trainer.state.global_step)
        if step != self._loaded:
            model = trainer.accelerator.unwrap_model(trainer.model)
            publish(self.source, self.config, step, model.named_parameters())
            self.source.call(lambda child: child.version(step))
            self._loaded = step
        first, self._keys = self._keys, self._keys + len(prompts)
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes

        async def run(child: SourceProcess) -> list[Rollout]:
            # A rollout's random stream depends on its key: two ranks never sample the same one.
            tasks = enumerate(map(task_id, prompts), first)
            return await run_all(*(child.run(task, key * world + rank) for key, task in tasks))

        converted = to_outputs(self.source.call(run), self._plan, self._several)
        log.info("rollout_func step=%d account=%s", step, converted.account)
        return converted.payload

    def _check(self, trainer: Any) -> None:
        check_temperature(self.config, trainer.args)
        accelerator = trainer.accelerator
        if (kind := getattr(accelerator.distributed_type, "value", "NO")) in _SHARDED:
            raise ConfigError(f"rollout_func publishes whole weights only, which {kind} divides: use DDP")
        if accelerator.num_processes > 1 and self._loaded < 0 and (run := self.config.run).dir:
            own = run.changed(dir=f"{run.dir}-rank-{accelerator.process_index}")
            self.config = self.config.model_copy(update={"run": own})
        if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            raise ConfigError("rollout_func publishes whole weights only: use AsyncGRPOTrainer with adapters")


def rollout_func(config: Config | Path | str, several: Several = "final") -> RolloutFunc:
    """Return the `rollout_func` of GRPOTrainer.

    several: which row stands for a rollout of several: the last, the longest, or none ("refuse").
    """
    return RolloutFunc(config, several)


def task_id(prompt: Any) -> str:
    """Return the id of a task from a prompt: text, or messages whose last one is the id."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if not isinstance(text, str):
        raise ConfigError(f"a prompt must be the id of a task, got {prompt!a}")
    return text
