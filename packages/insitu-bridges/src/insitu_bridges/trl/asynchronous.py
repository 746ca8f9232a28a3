"""RolloutWorker and weight transfer of AsyncGRPOTrainer."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from insitu.config import Config
from insitu.errors import ConfigError, TrainError
from insitu_bridges.process import RolloutBatch, SourceProcess
from insitu_bridges.rows import Conversion, GroupRows, convert, rows_of
from insitu_bridges.trl.weights import SourceOwner, check_temperature, publish
from insitu_bridges.versions import Need

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = 2
"""Micro-batches of rows that are ready: TRL's data loader reads one ahead of the one that it trains."""
POLL_S = 0.05
"""Between two looks at a full queue, which notifies no event loop."""
READ = ("max_staleness", "per_device_train_batch_size", "gradient_accumulation_steps", "weight_sync_steps")
"""Arguments of AsyncGRPOConfig that say how old a row may be."""
STABLE, EXPERIMENTAL = "trl.trainer.async_grpo_trainer", "trl.experimental.async_grpo"
"""Where the trainer and its rows are, from 1.18 on (by its release notes: never run here) and before."""
TRAINER = Need(
    (f"{STABLE}:AsyncGRPOTrainer", f"{EXPERIMENTAL}:AsyncGRPOTrainer"), ("rollout_worker", "weight_transfer")
)
SAMPLE = Need(
    (f"{STABLE}:RolloutSample", f"{EXPERIMENTAL}.async_rollout_worker:RolloutSample"),
    (
        "prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version",
        "group_id", "metrics", "enqueued_at",
    ),
    complete=True,
)  # fmt: skip


def to_samples(groups: Sequence[GroupRows], first_group: int = 0) -> Conversion[list[Any]]:
    """Return the trained rows as TRL's samples; the groups are numbered from `first_group`.

    A row's weight is folded into its advantage, which TRL's clipped loss allows: it is scaled to a mean of 1
    per token, since TRL divides by the tokens of its micro-batch. Every row of a group has the oldest version
    of the group, so TRL drops all of them for staleness or none.
    """
    made = SAMPLE.get()
    rows = [row for group in groups for row in group.rows]
    tokens = sum(int(row.mask.sum()) for row in rows)
    mean = sum(row.weight * int(row.mask.sum()) for row in rows) / tokens if tokens else 1.0
    rewards = {item.rollout.id: item.rollout.reward for group in groups for item in group.rollouts}
    payload = []
    for number, group in enumerate(groups, first_group):
        oldest = min((int(row.versions[row.mask].min()) for row in group.rows), default=0)
        payload += [
            made(
                prompt=[],
                completion=[],
                input_ids=row.ids.astype(np.int64),
                completion_mask=row.mask.astype(np.int64),
                old_log_probs=np.where(row.mask, row.logprobs, 0).astype(np.float32),
                advantage=row.advantage * row.weight / mean,
                model_version=oldest,
                group_id=number,
                metrics={"reward": float(rewards[row.rollout_id] or 0.0)},
                enqueued_at=time.time(),
            )
            for row in group.rows
        ]
    taken = [(row.rollout_id, row.segment) for row in rows]
    return convert(payload, groups, taken, lost=("denominator", "token_versions"))


def check_async(config: Config, args: Any) -> None:
    """Raise ConfigError for arguments of AsyncGRPOTrainer with which it would wait for ever."""
    if gone := [name for name in READ if not hasattr(args, name)]:
        raise ConfigError(f"trl's AsyncGRPOConfig has no {', '.join(gone)}, which say how old a row may be")
    check_temperature(config, args)
    # One batching mode has no switch.
    if hasattr(args, "token_budget") and (args.token_budget is None or args.token_budget > 0):
        raise ConfigError(
            f"token_budget {args.token_budget}: TRL would wait for a row that does not fit before it trains"
            " one; set token_budget=0, which takes per_device_train_batch_size rows"
        )
    if args.max_staleness < 1:
        raise ConfigError(
            "max_staleness 0: TRL's data loader reads one micro-batch ahead, which is a version old when it"
            " is trained; set max_staleness=1 or more"
        )
    collected = config.collect.groups_per_step * config.collect.group_size
    row_count = args.per_device_train_batch_size * args.world_size
    per_version = row_count * args.gradient_accumulation_steps * args.weight_sync_steps
    age = config.collect.max_staleness + ceil((collected + AHEAD * row_count) / per_version)
    if age > max(1, args.max_staleness):
        raise ConfigError(
            f"collect.groups_per_step x collect.group_size = {collected} rows arrive at once and TRL trains"
            f" {per_version} per version: rows would be up to {age} versions old and max_staleness is"
            f" {args.max_staleness}; collect fewer groups at once, or train more rows per step"
        )


class RolloutWorker(SourceOwner):
    """Implements TRL's RolloutWorkerProtocol over a rollout source in a child process."""

    needs = (TRAINER, SAMPLE)

    def __init__(self, config: Config | Path | str, args: Any) -> None:
        """Use a configuration and the AsyncGRPOConfig of the trainer.

        Raises ConfigError for arguments with which TRL would hang.
        """
        super().__init__(config)
        check_async(self.config, args)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float | tuple[float, float]]] = queue.Queue()
        self.model_version = 0
        self._rows_ahead = AHEAD * args.per_device_train_batch_size * args.world_size
        self._producing: Future[None] | None = None
        self._groups = 0
        """Groups collected."""
        self._last_row = 0.0
        """time.monotonic() of the last row."""

    def start(self) -> None:
        """Begin to fill `rollout_buffer`."""
        self._last_row = time.monotonic()
        self._producing = self.source.submit(self._produce)

    def stop(self) -> None:
        """End agents, sandboxes and the child process."""
        if self._producing is not None:
            self._producing.cancel()
        self.close()

    def update_model_version(self, model_version: int) -> None:
        """Let rollouts go on: the engine has this version."""
        self.model_version = model_version
        self.source.call(lambda child: child.version(model_version))

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the source; TrainError when no row came for `stale_after_s` seconds."""
        if self._producing is not None and self._producing.done():
            self._producing.result()
        self.source.call(lambda child: child.check())
        silent_s = time.monotonic() - self._last_row
        if self._producing is not None and silent_s > stale_after_s:
            raise TrainError(
                f"no row to train for {silent_s:.0f} s: {self._groups} groups were collected, and those since"
                " then have equal rewards or failed"
            )

    async def _produce(self, child: SourceProcess) -> None:
        while True:
            if self.rollout_buffer.qsize() >= self._rows_ahead:
                await asyncio.sleep(POLL_S)
                continue
            self._take(await child.next())

    def _take(self, batch: RolloutBatch) -> None:
        groups = rows_of(batch.groups, self._plan)
        converted = to_samples(groups, self._groups)
        self._groups += len(groups)
        for sample in converted.payload:
            self.rollout_buffer.put(sample)
            self._last_row = time.monotonic()
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        self.metrics_queue.put(
            {
                "insitu/reward_mean": (float(sum(rewards)), float(len(rewards))),
                "insitu/groups_total": float(len(groups)),
                "insitu/useful_groups": (float(sum(bool(g.rows) for g in groups)), float(len(groups))),
                "insitu/ungraded_total": float(len(rollouts) - len(rewards)),
                "insitu/tokens_total": float(converted.account.captured),
                "insitu/trained_tokens_total": float(converted.account.trained),
            }
        )


class Transfer:
    """Implements TRL's WeightTransferProtocol: weights reach the worker's engine as files."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker

    def init_weight_transfer(self) -> None:
        """Open the worker's source, whose engine gets the weights."""
        _ = self._worker.source

    def pause(self) -> None:
        """Start no attempt with the old weights; running ones go on."""
        version = self._worker.model_version + 1
        self._worker.source.call(lambda child: child.pause(version))

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Load the weights into the engine, under the version that TRL gives them after `resume`."""
        worker = self._worker
        publish(worker.source, worker.config, worker.model_version + 1, iterator)

    def resume(self) -> None:
        """Do nothing: `update_model_version` follows."""

    def destroy(self) -> None:
        """Do nothing: the worker owns the source."""
