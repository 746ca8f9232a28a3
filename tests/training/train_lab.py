"""Makes small models and rollouts whose log-probabilities come from a slow, whole-sequence reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from insitu.types import Group, IntArray, Ledger, Rollout, Segment, Status, Timings, Trajectory
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3, initialise

torch.set_num_threads(1)
VOCAB = 50
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, intermediate_size=48, max_position_embeddings=256,
)  # fmt: skip


def small_model(seed: int = 0, scale: float = 4.0) -> Qwen3:
    """A model whose distributions are far from uniform, so that errors show."""
    model = initialise(CONFIG, seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(scale)
    return model


def slow_logprobs(model: Qwen3, ids: IntArray, temperature: float = 1.0) -> torch.Tensor:
    """[n] log-probability of each id given those before it; 0 for the first. Carries gradients."""
    row = torch.from_numpy(ids.astype(np.int64))
    logits = model.logits(model.hidden(row[:0], row[None]))[0] / temperature
    logp = torch.log_softmax(logits, -1)[:-1].gather(1, row[1:, None])[:, 0]
    return torch.cat([logp.new_zeros(1), logp])


def segment(
    rollout_id: str,
    index: int,
    ids: Sequence[int],
    mask: Sequence[bool],
    mu: Sequence[float],
    version: int = 0,
) -> Segment:
    chosen = np.array(mask, np.bool_)
    return Segment(
        rollout_id=rollout_id,
        index=index,
        kind="sampled",
        label="final",
        ids=np.array(ids, np.int32),
        mask=chosen,
        logprobs=np.where(chosen, np.array(mu, np.float32), 0).astype(np.float32),
        versions=np.where(chosen, version, 0).astype(np.int32),
    )


def rollout(
    name: str,
    reward: float | None,
    segments: Sequence[Segment],
    *,
    status: Status = Status.OK,
    excluded: dict[str, int] | None = None,
) -> Rollout:
    trained = sum(int(s.mask.sum()) for s in segments if s.kind == "sampled")
    excluded = excluded or {}
    ledger = Ledger(captured=trained + sum(excluded.values()), trained=trained, excluded=excluded)
    return Rollout(
        id=name,
        task_id="t",
        category="f",
        status=status,
        reward=reward,
        trajectory=Trajectory(segments=tuple(segments), turns=(), ledger=ledger),
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(),
    )


def group(name: str, rollouts: Sequence[Rollout]) -> Group:
    return Group(id=name, task_id="t", rollouts=tuple(rollouts))


def sampled_groups(
    model: Qwen3, *, seed: int = 0, groups: int = 3, size: int = 4, temperature: float = 1.0, version: int = 0
) -> list[Group]:
    """Groups over one shared system prefix, a prompt per group and random 'sampled' turns with exact mu."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCAB, 12)
    made = []
    for g in range(groups):
        prompt = rng.integers(0, VOCAB, 5)
        members = []
        for k in range(size):
            name = f"train/0/{g}/{k}"
            ids = np.concatenate([system, prompt, rng.integers(0, VOCAB, 8 + 3 * k)]).astype(np.int32)
            mask = np.zeros(len(ids), bool)
            mask[17:20] = True
            mask[22 : 24 + k] = True
            with torch.no_grad():
                mu = slow_logprobs(model, ids, temperature).numpy()
            reward = float((g + k) % 2) if k else 0.5
            members.append(rollout(name, reward, [segment(name, 0, ids, mask, mu, version)]))
        made.append(group(f"train/0/{g}", members))
    return made
