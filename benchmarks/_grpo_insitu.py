"""insitu's side of `benchmarks grpo`: `python -m benchmarks._grpo_insitu MODEL_FOLDER`.

The first line of stdin is the job; for each further line it makes one step and prints what it took.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from insitu.errors import TrainError
from insitu.types import (
    Generation,
    Group,
    IntArray,
    Ledger,
    RequestKey,
    Rollout,
    SamplingParams,
    Segment,
    Status,
    Timings,
    Trajectory,
)
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.model.hf import open_hf
from insitu_train.options import OptimConfig, PolicyConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.trainer.trainer import Trainer


class Side:
    """Sampler and trainer in one process, as the learner has them."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self._job = job
        self._prompts = [np.array(ids, np.int32) for ids in job["prompts"]]
        dtype: Any = job["dtype"]
        torch.set_num_threads(job["threads"])
        policy = open_hf(folder, device=torch.device("cpu"), dtype=getattr(torch, dtype))
        rows = len(self._prompts) * job["group_size"]
        options = EngineOptions(
            max_rows=4 * -(-rows // 4),
            max_context=max(map(len, self._prompts)) + job["tokens"],
            threads=job["threads"],
            dtype=dtype,
            cache_tokens=4096,
        )
        self._core = EmbeddedCore(policy, options)
        config = TrainConfig(
            policy=PolicyConfig(kind="hf", dtype=dtype, device="cpu"),
            optim=OptimConfig(lr=job["lr"], warmup_steps=0),
            threads=job["threads"],
            max_logprob_gap=1e-4 if dtype == "float32" else 1.0,
        )
        self._trainer = Trainer(policy, config)

    def step(self) -> dict[str, Any]:
        """Sample, plan, train and publish once."""
        began = (time.perf_counter(), time.process_time())
        sampled = self._sample()
        middle = (time.perf_counter(), time.process_time())
        groups = [self._group(number, found) for number, found in enumerate(sampled)]
        plan = plan_step(groups, PlanConfig(min_groups=1, token_budget=self._job["token_budget"]))
        result = self._trainer.step(plan)
        if result.skipped:
            raise TrainError(f"the step was skipped: {result.skipped}")
        self._core.refresh(self._trainer.version)
        ended = (time.perf_counter(), time.process_time())
        return {
            "wall_s": ended[0] - began[0],
            "cpu_s": ended[1] - began[1],
            "sample_cpu_s": middle[1] - began[1],
            "sampled": sum(len(one.ids) for found in sampled for one in found),
            "trained": result.tokens,
            "pass_tokens": sum(batch.tokens for batch in plan.batches),
            "row_tokens": result.row_tokens,
            "gap": result.max_logprob_gap_seen,
        }

    def _sample(self) -> list[list[Generation]]:
        size, step = self._job["group_size"], self._trainer.steps
        found: dict[tuple[int, int], Generation] = {}

        def submit(group: int, member: int) -> None:
            def done(made: Generation | Exception) -> None:
                if isinstance(made, Exception):
                    raise made
                found[group, member] = made

            key = RequestKey(seed=0, rollout_id=f"{step}/{group}/{member}", turn=0)
            params = SamplingParams(max_tokens=self._job["tokens"])
            self._core.submit(self._prompts[group], params, key, done)

        for group in range(len(self._prompts)):
            for member in range(size):
                submit(group, member)
        while self._core.busy:
            self._core.step()
        return [[found[group, member] for member in range(size)] for group in range(len(self._prompts))]

    def _group(self, number: int, found: list[Generation]) -> Group:
        name = f"{self._trainer.steps}/{number}"
        rollouts = [self._rollout(f"{name}/{m}", self._prompts[number], g, m) for m, g in enumerate(found)]
        return Group(id=name, task_id=f"t{number}", rollouts=tuple(rollouts))

    def _rollout(self, name: str, prompt: IntArray, found: Generation, member: int) -> Rollout:
        if found.logprobs is None:
            raise TrainError(f"{name}: no log-probabilities")
        before, count = np.zeros(len(prompt), np.float32), len(found.ids)
        mask = np.arange(len(prompt) + count) >= len(prompt)
        segment = Segment(
            rollout_id=name,
            index=0,
            kind="sampled",
            label="final",
            ids=np.concatenate([prompt, found.ids]).astype(np.int32),
            mask=mask,
            logprobs=np.concatenate([before, found.logprobs]).astype(np.float32),
            versions=np.where(mask, self._trainer.version, 0).astype(np.int32),
        )
        ledger = Ledger(captured=count, trained=count, excluded={})
        return Rollout(
            id=name,
            task_id=name,
            category="",
            status=Status.OK,
            reward=float(member % 2),
            trajectory=Trajectory(segments=(segment,), turns=(), ledger=ledger),
            verdict=None,
            changed={},
            deleted=(),
            timings=Timings(),
        )


def main(argv: list[str]) -> int:
    side = Side(Path(argv[0]), orjson.loads(sys.stdin.readline()))
    print("ready", flush=True)
    while sys.stdin.readline():
        print(orjson.dumps(side.step()).decode(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
