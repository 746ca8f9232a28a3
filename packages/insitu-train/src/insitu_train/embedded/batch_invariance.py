"""Start-up check that results do not depend on batch composition, on this machine, for the shapes in use.

Which kernel a matrix library picks, and so the last bits, may depend on every dimension of a product. The
check runs the real forward passes on noise and compares bits. Variable shapes are tried first, with
increasing minimum rows (where small kernels end differs between CPUs); if bits still differ, all shapes are
pinned (slower); if they differ even then, the engine refuses to start.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from insitu.errors import EngineError
from insitu_train.embedded.attention import BLOCK
from insitu_train.embedded.forward import ROWS, CachedForward, DecodeSpan, PrefillTile
from insitu_train.embedded.prefix_cache import TILE

STEPS = (ROWS, 8, 16)
"""Minimum rows of a decode pass that are tried before all shapes are pinned."""


def verify_batch_invariance(forward: CachedForward, seed: int = 0) -> None:
    """Set `forward.step`, `.fixed` and `.unified` as this machine needs, or raise EngineError.

    The caches are zero afterwards.
    """
    with torch.inference_mode():
        steps = [] if forward.fixed else [s for s in STEPS if s <= forward.rows]
        for step in [*steps, 0]:
            forward.step, forward.fixed = step or forward.rows, not step
            wrong = _decode_depends(forward, seed) or _prefill_depends(forward, seed)
            if not wrong:
                break
        forward.unified = not wrong and _decode_equals_prefill(forward, seed)
        for slot in range(forward.rows):
            forward.hide(slot)
        forward.reset(forward.weights)
    if wrong:
        raise EngineError(f"this machine's torch gives results that depend on {wrong}; cannot sample exactly")


def _decode_depends(forward: CachedForward, seed: int) -> str:
    """Return what a decode row depends on besides its own slot, or ""."""
    rng = torch.Generator().manual_seed(seed)
    rows, length = forward.rows, forward.length
    forward.keys.normal_(generator=rng)
    forward.values.normal_(generator=rng)
    ids = torch.randint(0, forward.weights.config.vocab_size, (rows,), generator=rng)
    reach = torch.linspace(0, length - 1, rows).long()
    for slot in range(rows):
        forward.hide(slot)
        forward.show(slot, int(reach[slot]) + 1)
    whole = forward.decode(ids, reach, DecodeSpan(rows, length))
    if not torch.isfinite(whole).all():
        raise EngineError("these weights give logits that are not finite")
    for span in sorted({BLOCK * b for b in np.linspace(1, length // BLOCK, 16).astype(int)}):
        short = forward.decode(ids, reach, DecodeSpan(rows, int(span)))
        if not torch.equal(short[reach < span], whole[reach < span]):
            return "the length of other contexts"
    for n in range(1, rows):
        if not torch.equal(forward.decode(ids, reach, DecodeSpan(n, length))[:n], whole[:n]):
            return "the number of running requests"
    return _position_depends(forward, ids, reach, whole, rng)


def _position_depends(
    forward: CachedForward, ids: Tensor, reach: Tensor, whole: Tensor, rng: torch.Generator
) -> str:
    """Return what changes a row: a slot's number or the content of other slots. Refills the caches."""
    order = torch.randperm(forward.rows, generator=rng)
    for held in (forward.keys, forward.values):
        for layer in held:
            layer.copy_(layer[order])
    forward.seen.copy_(forward.seen[order])
    span = DecodeSpan(forward.rows, forward.length)
    if not torch.equal(forward.decode(ids[order], reach[order], span), whole[order]):
        return "the slot of a request"
    other = torch.arange(forward.rows) % 2 == 1
    for held in (forward.keys, forward.values):
        held[:, other] = torch.randn(held[:, other].shape, generator=rng)
    again = forward.decode(ids[order], reach[order], span)
    if not torch.equal(again[~other], whole[order][~other]):
        return "the content of other requests"
    return _trunk_depends(forward, ids[order], reach[order])


def _trunk_depends(forward: CachedForward, ids: Tensor, reach: Tensor) -> str:
    """Return what differs when a shared prefix is read once; shares slot 0's tokens."""
    for trunk in sorted({BLOCK, forward.length // 2 // BLOCK * BLOCK, forward.length - BLOCK} - {0}):
        forward.keys[..., :trunk] = forward.keys[:, :1, ..., :trunk].clone()
        forward.values[:, :, :, :trunk] = forward.values[:, :1, :, :trunk].clone()
        inside = reach >= trunk
        positions = torch.where(inside, reach, forward.scratch)
        for n in (1, forward.rows):
            span = DecodeSpan(n, forward.length)
            separate = forward.decode(ids, positions, span)[:n]
            joined = forward.decode(ids, positions, replace(span, trunk=trunk, source=n - 1))[:n]
            if not torch.equal(separate[inside[:n]], joined[inside[:n]]):
                return "a prefix shared with other requests"
    return ""


def _prefill_depends(forward: CachedForward, seed: int) -> str:
    """Return what a prefilled tile depends on besides its slot's earlier tokens, or ""."""
    rng = np.random.default_rng(seed)
    last = forward.length // TILE - 1
    slots = rng.permutation(forward.rows)
    places = [round(float(p)) for p in np.linspace(0, last, forward.tiles)]
    vocab = forward.weights.config.vocab_size
    jobs = [
        PrefillTile(int(slot), place, rng.integers(0, vocab, TILE))
        for slot, place in zip(slots, places, strict=False)
    ]
    forward.prefill(jobs)
    together = [_tile_values(forward, job) for job in jobs]
    groups = [[job] for job in jobs] + [jobs[::-1], jobs[1::2], jobs[: len(jobs) // 2 + 1]]
    for group in filter(None, groups):
        forward.prefill(group)
        for job in group:
            if not torch.equal(_tile_values(forward, job), together[jobs.index(job)]):
                return "how prompts are cut and batched"
    return ""


def _decode_equals_prefill(forward: CachedForward, seed: int) -> bool:
    """Return whether DECODE leaves the keys and values that PREFILL would: then they may be cached."""
    rng = np.random.default_rng(seed)
    count = min(forward.length, 3 * BLOCK) // TILE
    ids = rng.integers(0, forward.weights.config.vocab_size, (count, TILE))
    jobs = [PrefillTile(0, index, ids[index]) for index in range(count)]
    for at in range(0, count, forward.tiles):
        forward.prefill(jobs[at : at + forward.tiles])
    expected = [_tile_values(forward, job) for job in jobs]
    tokens, positions = torch.zeros(forward.rows).long(), torch.full((forward.rows,), forward.scratch)
    for index in sorted({0, count // 3 - 1, count // 3, count - 1}):
        for offset in range(TILE):
            forward.hide(0)
            forward.show(0, index * TILE + offset + 1)
            tokens[0], positions[0] = int(ids[index, offset]), index * TILE + offset
            forward.decode(
                tokens, positions, DecodeSpan(1 + offset * (forward.rows - 1) // TILE, count * TILE)
            )
        if not torch.equal(_tile_values(forward, jobs[index]), expected[index]):
            return False
    return True


def _tile_values(forward: CachedForward, job: PrefillTile) -> Tensor:
    cut = slice(job.index * TILE, (job.index + 1) * TILE)
    keys, values = forward.keys[:, job.slot, :, :, cut], forward.values[:, job.slot, :, cut]
    return torch.cat([keys.flatten(), values.flatten()])
