"""Rollouts to store, and equality of rollouts including arrays and their types."""

from __future__ import annotations

import dataclasses

import numpy as np

from insitu.types import (
    FileEntry,
    Ledger,
    Outcome,
    Rollout,
    Segment,
    Status,
    Timings,
    Trajectory,
    Turn,
    Verdict,
)


def make_rollout(
    name: str, *, seed: int = 0, reward: float | None = 1.0, category: str = "swap", task_id: str = "toy-é-1"
) -> Rollout:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 40))
    ids = rng.integers(0, 2**31 - 1, n, dtype=np.int32)
    mask = rng.random(n) < 0.5
    mask[-1] = True
    logprobs = np.where(mask, -rng.random(n), 0).astype(np.float32)
    turns = (
        Turn(
            index=0,
            parent=-1,
            context_ids=ids[:3],
            ids=ids[3:],
            logprobs=logprobs[3:],
            finish="stop",
            version_runs=((0, 4), (2, 5)),
        ),
        Turn(
            index=1,
            parent=0,
            context_ids=ids[:0],
            ids=ids[:2],
            logprobs=None,
            finish="length",
            version_runs=(),
            excluded="truncated",
        ),
    )
    segment = Segment(
        rollout_id=name,
        index=0,
        kind="sampled",
        label="final",
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, 4, 0).astype(np.int32),
    )
    trained = int(mask.sum())
    return Rollout(
        id=name,
        task_id=task_id,
        category=category,
        egress_attempts=None if reward is None else 7,
        status=Status.OK if reward is not None else Status.INFRA_FAILED,
        reward=reward,
        trajectory=Trajectory(
            segments=(segment,),
            turns=turns,
            ledger=Ledger(captured=trained + 2, trained=trained, excluded={"truncated": 2}),
        ),
        verdict=Verdict(
            outcome=Outcome.RESOLVED if reward == 1.0 else Outcome.UNRESOLVED,
            reward=reward,
            trust="strong",
            passed=3,
            total=4,
            dropped_paths=("tests/a.py",),
            reason="",
            task_hash="ab",
            diff_hash="cd",
            duration_s=0.25,
        )
        if reward is not None
        else None,
        changed={"a.py": FileEntry(content=b"\x00\xff\n"), "b/c.sh": FileEntry(content=b"", executable=True)},
        deleted=("old.py",),
        timings=Timings(queued_s=0.1, agent_s=1.5, engine_s=0.7, grade_s=0.2, total_s=2.5),
        attempt=2,
        error="" if reward is not None else "sandbox vanished",
    )


def same(a: object, b: object) -> bool:
    """Deep equality; arrays must agree in dtype, shape and bits."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        fields = [f.name for f in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in fields)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b
