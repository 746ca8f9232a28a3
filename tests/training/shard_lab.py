"""One rank of a sharded trainer as a process of its own: what tests/training/test_shard.py starts.

FSDP speaks over the one default group of a process, so ranks cannot be threads here. Jobs
reach it as a file in a folder, and what it found goes there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from insitu.config.training import LossConfig
from insitu.errors import TrainError
from insitu_train.memory.peak import peak_bytes
from insitu_train.model import shard as sharding
from insitu_train.model.base import PLAIN, MemoryOptions, Policy
from insitu_train.model.hf import HfPolicy, open_hf
from insitu_train.model.parity import logprobs
from insitu_train.model.parts import PartFiles
from insitu_train.model.shard import gathered, open_sharded
from insitu_train.options import Lora, OptimConfig, TrainConfig
from insitu_train.plan.step import StepPlan
from insitu_train.trainer import checkpoint
from insitu_train.trainer.checkpoint import CheckpointWriter
from insitu_train.trainer.checksum import WeightChecksum
from insitu_train.trainer.distributed import Ranks, Sharded, Together, join, leave
from insitu_train.trainer.trainer import Trainer
from insitu_train.weights.export import export
from insitu_train.weights.files import ExportRequest

DEADLINE_S = 600.0
CPU = torch.device("cpu")
LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "down_proj"))
CONFIG = TrainConfig(
    loss=LossConfig(loss="ppo_clip"), optim=OptimConfig(lr=1e-3), max_logprob_gap=100.0, max_staleness=9
)
Found = dict[str, Any]


def opened(
    folder: Path,
    lora: Lora | None = None,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
) -> HfPolicy:
    """Whole for None."""
    if isinstance(ranks, Sharded):
        return open_sharded(folder, ranks.mesh(), device=CPU, dtype=dtype, lora=lora)
    return open_hf(folder, device=CPU, dtype=dtype, lora=lora)


def trainer_on(model: HfPolicy, config: TrainConfig, ranks: Ranks | None, techniques: Any = None) -> Trainer:
    """Alone for None. With `techniques` memory is not asked."""
    trainer = Trainer(model, config, ranks=ranks)
    if techniques is not None:
        trainer.fit = None
        model.techniques = techniques
    return trainer


def every(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return gathered(tensors, mine=tensors)


def weights(model: Policy) -> dict[str, torch.Tensor]:
    return every({n: p.detach().clone() for n, p in model.named_parameters()})


def gradients(trainer: Trainer, plan: StepPlan) -> Found:
    loss = trainer.gradients(plan)
    grads = {n: p.grad for n, p in trainer.optimiser.named.items() if p.grad is not None}
    return {"loss": loss, "grads": every(grads)}


def two_steps(trainer: Trainer, plan: StepPlan, save: Path | None = None) -> Found:
    """After the first of them, a checkpoint at `save`."""
    first = trainer.step(plan)
    if save is not None:
        with trainer.whole(moments=True):
            if trainer.ranks.rank == 0:
                checkpoint.save(trainer, save)
    second = trainer.step(plan)
    results = [replace(r, seconds=0.0, ranks=0) for r in (first, second)]
    return {"weights": weights(trainer.model), "results": [asdict(r) for r in results]}


# --------------------------------------------------------------------------- ranks as processes


def on_processes(
    world: int, folder: Path, jobs: dict[str, tuple[str, Found]], shards: int = 0
) -> list[Found]:
    """Of every rank what its jobs returned, by their names. `shards` ranks hold one copy, 0 = all.

    jobs: name -> (one of JOBS, its arguments).
    """
    turn = folder / f"ranks-{world}-{shards}"
    torch.save(jobs, f"{turn}.jobs")
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(world), str(turn), str(shards or world)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [child.communicate(timeout=DEADLINE_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, text in zip(children, said, strict=True):
        assert child.returncode == 0, text[-3000:]
    return [torch.load(f"{turn}.{rank}", weights_only=False) for rank in range(world)]


def steps(
    ranks: Ranks | None, folder: Path, plan: StepPlan, config: TrainConfig = CONFIG, techniques: Any = None
) -> Found:
    """The gradient of a plan, a refused step, two steps with a checkpoint between them, and these again."""
    found: Found = {}
    for at in range(2):
        trainer = trainer_on(opened(folder / "model", ranks=ranks), config, ranks, techniques)
        if not at:
            found["gradients"] = gradients(trainer, plan)
            trainer.config = config.changed(max_logprob_gap=1e-9)
            try:
                trainer.step(plan)
            except TrainError as error:
                found["refused"] = str(error)
            trainer.config = config
        world = trainer.ranks.world
        found[f"steps {at}"] = two_steps(trainer, plan, folder / f"checkpoint-{world}-{at}")
        found["parts"] = sum(
            getattr(p, "_local_tensor", p).numel() for _, p in trainer.model.named_parameters()
        )
    return found


def resumed(
    ranks: Ranks | None,
    folder: Path,
    plan: StepPlan,
    source: str,
    lora: Lora | None = None,
    config: TrainConfig = CONFIG,
) -> Found:
    """The second step, from a checkpoint that another number of ranks made after the first."""
    trainer = trainer_on(opened(folder / "model", lora, ranks=ranks), config, ranks)
    checkpoint.load(trainer, folder / source)
    result = trainer.step(plan)
    return {"weights": weights(trainer.model), "loss": result.loss, "version": result.version}


def adapted(ranks: Ranks | None, folder: Path, plan: StepPlan, dtype: torch.dtype) -> Found:
    trainer = trainer_on(opened(folder / "model", LORA, dtype, ranks), CONFIG, ranks)
    found = {"gradients": gradients(trainer, plan)}
    name = f"adapted-{trainer.ranks.world}-{str(dtype).removeprefix('torch.')}"
    found["steps"] = two_steps(trainer, plan, folder / name)
    with trainer.whole():
        if trainer.ranks.rank == 0:
            trainer.model.stored(whole=True).write(folder / f"{name}-merged")
    return found


def in_parts(ranks: Ranks | None, folder: Path, name: str, lora: Lora | None = None) -> Found:
    """Open a model over the ranks and whole; return how they differ and how much of it this rank has read."""
    files: list[PartFiles] = []

    class Counted(PartFiles):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            files.append(self)

    sharding.PartFiles = Counted  # type: ignore[misc]
    dtype = torch.bfloat16 if lora else torch.float32
    mine, whole = (opened(folder / name, lora, dtype, r) for r in (ranks, None))
    held = sum(p.to_local().nbytes for _, p in mine.named_parameters())  # type: ignore[attr-defined]
    expected = dict(whole.named_parameters())
    stored = [(n, b) for n, b in whole.model.named_buffers() if n in whole.model.state_dict()]
    found, buffers = weights(mine), dict(mine.model.named_buffers())
    tensors = [(n, found.get(n), t) for n, t in expected.items()]
    tensors += [(n, buffers.get(n), b) for n, b in whole.model.named_buffers()]
    with torch.no_grad():
        pairs = zip(logprobs(mine, mine.model), logprobs(whole, whole.model), strict=True)
        gap = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)
    mine.rest()
    return {
        "differ": [
            n for n, a, b in tensors if a is None or a.dtype != b.dtype or not torch.equal(a, b.detach())
        ],
        "names": list(found) == list(expected),
        "gap": gap,
        "by_rows": (mine.by_rows, whole.by_rows),
        "configs": mine._configs() == whole._configs(),
        "notices": [notice for notice in mine.notices if notice not in whole.notices],
        "held": held / sum(p.nbytes for p in expected.values()),
        "bytes": files[0].bytes,
        "of": 4 * sum(p.numel() for n, p in expected.items() if "lora_" not in n),
        "buffers": sum(b.nbytes for _, b in stored),
    }


def spread(ranks: Ranks | None, folder: Path, plan: StepPlan, name: str, owners: int) -> Found:
    """A step, a checkpoint of parts, an export of parts, and another trainer that goes on from the first."""
    trainer = trainer_on(opened(folder / "model", ranks=ranks), CONFIG, ranks)
    sums = WeightChecksum(trainer.model, trainer.ranks)
    trainer.step(plan)
    writer, held = CheckpointWriter(60.0), dict[str, int]()
    with trainer.whole(moments=True, owners=owners):
        held = {n: t.nbytes for n, t in (trainer.model.whole or {}).items()}
    checkpoint.begin(trainer, writer, folder / name, None, owners)
    assert writer.wait() == ""
    wanted = ExportRequest(folder=folder / f"{name}-served", version=1, own_head=True, dtype="bfloat16")
    with trainer.whole(owners=owners):
        export(trainer.model, wanted, folder / "model", ranks, owners if ranks else 1)
    first = sums.now()
    trainer.ranks.attempt(lambda: None)  # all files are there
    again = trainer_on(opened(folder / "model", ranks=ranks), CONFIG, ranks)
    checkpoint.load(again, folder / name)
    assert WeightChecksum(again.model, again.ranks).now() == first
    moments = every(dict(again.optimiser.tensors()))
    return {"weights": weights(again.model), "moments": moments, "sum": first, "held": sum(held.values())}


def shared(ranks: Sharded, folder: Path, plan: StepPlan, lora: Lora | None = None) -> Found:
    """Gradient and three steps of sharded ranks that hold only parts of a row."""
    trainer = trainer_on(opened(folder / "model", lora, ranks=ranks), CONFIG, ranks)
    _without_room(trainer, plan)
    found = gradients(trainer, plan)
    result = [trainer.step(plan) for _ in range(3)][-1]
    return {
        "loss": found["loss"],
        "gradient": _flat(found["grads"]),
        "weights": _flat(every(dict(trainer.optimiser.named))),
        "result": asdict(result),
    }


def failing(ranks: Sharded, folder: Path, plan: StepPlan, good: StepPlan) -> Found:
    """The error where a loss refuses a token of one rank, and the loss of a step after."""
    config = CONFIG.changed(loss=LossConfig(loss="test_parts:refuses"))
    trainer, found = Trainer(opened(folder / "model", ranks=ranks), config, ranks=ranks), ""
    try:
        trainer.step(plan)
    except TrainError as error:
        found = str(error)
    return {"error": found, "loss": trainer.step(good).loss}


def shared_memory(ranks: Sharded, folder: Path, plan: StepPlan) -> Found:
    """Predicted and measured bytes of a step of replicas that share its row, by memory options."""
    found: Found = {}
    for options in (
        PLAIN,
        MemoryOptions(checkpoint=True),
        MemoryOptions(checkpoint=True, save_attention=True),
    ):
        trainer = Trainer(opened(folder / "wide"), CONFIG, ranks=Together(ranks._group))
        _without_room(trainer, plan)
        trainer.step(plan)
        fit: Any = trainer.fit
        fit._ladder = [options]
        part = fit._part(plan, plan.batches[0], ranks.world)
        predicted, later = (
            fit._need(fit._model, part, options, first=first).device for first in (True, False)
        )
        fit.limit = max(predicted, later)
        held = sum(p.nbytes for _, p in trainer.model.named_parameters())
        held += sum(t.nbytes for t in trainer.optimiser.tensors().values())
        # what a thread of gloo frees the profiler does not see, so a single measure may be too high
        measured = held + min(peak_bytes(lambda t=trainer: t.step(plan), CPU) for _ in range(3))  # type: ignore[misc]
        assert isinstance(trainer.model, HfPolicy)
        assert trainer.model.techniques == options
        found[str(options)] = (predicted, measured)
    return found


def _without_room(trainer: Trainer, plan: StepPlan) -> None:
    """Leave half of what the longest row lacks on one rank."""
    fit: Any = trainer.fit
    batch = max(plan.batches, key=lambda batch: batch.tokens)
    loads = (fit._load(plan, batch), fit._part(plan, batch, fit._ranks))
    fit.limit = sum(fit._need(fit._model, load, fit._ladder[-1], first=False).device for load in loads) // 2


def _flat(tensors: Found) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


JOBS: dict[str, Callable[..., Any]] = {
    "shared": shared,
    "shared_memory": shared_memory,
    "steps": steps,
    "resumed": resumed,
    "adapted": adapted,
    "in_parts": in_parts,
    "spread": spread,
    "failing": failing,
}


def main(rank: int, world: int, turn: Path, shards: int) -> None:
    torch.set_num_threads(1)
    jobs = torch.load(f"{turn}.jobs", weights_only=False)
    ranks = join(rank, world, Path(f"{turn}.store"), deadline_s=DEADLINE_S / 2, shards=shards)
    found = {name: JOBS[job](ranks, turn.parent, **given) for name, (job, given) in jobs.items()}
    torch.save(found, f"{turn}.{rank}")
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
