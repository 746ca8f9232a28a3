"""What does a step cost beside forward, backward and update, in seconds and in memory?

Run `python -m benchmarks step` (--json: one object on the last line). For the shapes of Qwen3-0.6B and
Qwen3-8B, trained in full, and 8B with adapters, a model with few layers (and for 8B a small vocabulary) takes
real updates on a CPU with random gradients; then everything of a step that is no pass is timed:

- update: clip and AdamW, beside the sum: on a GPU it is a small part, on a CPU most of it;
- checksum: of all trained weights, which commits the step;
- publish: the learner's part, casting, writing and hashing files in bfloat16 (adapters stay float32); a
  server's reading is not in it;
- copy: of a checkpoint to the host's memory, before the thread that writes it begins; every fifth step.

`before` does what each step did before decision 0189: a checkpoint written, hashed and synced in the
foreground, and publication by float32 files that are written, read, cast, hashed and written again. What
depends on the model's size is multiplied by whole / measured parameters (`factor`): an extrapolation, not a
measurement of the whole model.

Correctness first: both ways publish the same bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks._arguments import Arguments, count
from insitu.config import WARM_START
from insitu.errors import TrainError
from insitu.storage.temp_dirs import scratch_folder
from insitu_train.embedded.model_files import write_summed
from insitu_train.model.hf import HfPolicy, adopt
from insitu_train.options import Lora, TrainConfig
from insitu_train.trainer import checkpoint
from insitu_train.trainer.checksum import WeightChecksum
from insitu_train.trainer.trainer import Trainer
from insitu_train.weights.export import export
from insitu_train.weights.files import ExportRequest

EVERY = 5
"""Steps between two checkpoints, the default of run.checkpoint_every_steps."""
QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 4096}
SMALL = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip
LARGE = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
VOCAB = 151_936


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and how much of it is measured."""

    shape: dict[str, Any]
    layers: int
    """Of the whole model."""
    measured: int
    vocab: int
    lora: Lora | None = None


CASES = {
    "0.6B": Case(shape=SMALL, layers=28, measured=4, vocab=VOCAB),
    "8B": Case(shape=LARGE, layers=36, measured=1, vocab=4096),
    "8B LoRA": Case(shape=LARGE, layers=36, measured=1, vocab=4096, lora=Lora(rank=16, alpha=32.0)),
}


def trained(case: Case, layers: int, vocab: int) -> int:
    """Trained parameters of a model with that many layers, from the meta device."""
    from insitu_train.memory.predict import MemoryModel

    model = MemoryModel(config(case, layers, vocab), dtype=torch.bfloat16, lora=case.lora, kernels="cpu")
    return model.trained


def config(case: Case, layers: int, vocab: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**QWEN3, **case.shape, num_hidden_layers=layers, vocab_size=vocab)


def opened(case: Case) -> Trainer:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(case, case.measured, case.vocab))
    policy = adopt(model, device=torch.device("cpu"), dtype=torch.bfloat16, lora=case.lora)
    return Trainer(policy, TrainConfig())


def updated(trainer: Trainer, step: int) -> None:
    """One update from random gradients, which are dropped."""
    for parameter in trainer.optimiser.named.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    trainer.optimiser.clip()
    trainer.optimiser.update(step)
    trainer.optimiser.zero()


def through_float32(policy: HfPolicy, folder: Path) -> None:
    """Publish as before: float32 files, read back, cast, hashed and written once more."""
    stored = policy.stored(whole=policy.lora is None)
    stored.write(folder)
    read = load_file(folder / stored.name)
    write_summed(folder / "model.bf16.safetensors", read, torch.bfloat16 if policy.lora is None else None)


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds, most GiB of this process beside what it held before)."""
    # 5: the high-water mark starts again from what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _resident("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - began, (_resident("VmHWM") - before) / (1 << 20)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(case: Case, repeats: int, scratch: Path) -> dict[str, Any]:
    trainer = opened(case)
    policy = trainer.model
    if not isinstance(policy, HfPolicy):
        raise TrainError("the benchmark is of models of transformers")
    checksum, writer = WeightChecksum(policy), checkpoint.CheckpointWriter()
    wanted = ExportRequest(
        folder=scratch / "served",
        version=1,
        dtype="auto" if case.lora else "bfloat16",
        adapter=case.lora is not None,
    )
    found: dict[str, list[tuple[float, float]]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        found.setdefault(name, []).append(clocked(work))

    for step in range(repeats + 1):
        if step == 1:  # the first round makes the moments and warms up
            found.clear()
        timed("update", partial(updated, trainer, step))
        timed("checksum", checksum.now)
        timed("publish", lambda: export(policy, wanted, WARM_START))
        made = checkpoint.snapshot(trainer)
        timed("copy", partial(writer.begin, made, scratch / "background", owned=False))
        timed("background", writer.wait)
        (scratch / "before").mkdir(exist_ok=True)
        timed("publish_before", lambda: through_float32(policy, scratch / "before"))
        timed("checkpoint_before", lambda: checkpoint.save(trainer, scratch / "foreground"))
    _same(policy, scratch)
    factor = trained(case, case.layers, VOCAB) / sum(p.numel() for p in trainer.optimiser.named.values())
    return _reported(found, factor)


def _same(policy: HfPolicy, scratch: Path) -> None:
    """Raise TrainError unless both ways have published the same tensors."""
    new, old = scratch / "served" / policy.stored().name, scratch / "before" / "model.bf16.safetensors"
    ours, theirs = load_file(new), load_file(old)
    if ours.keys() != theirs.keys() or not all(torch.equal(t, theirs[n]) for n, t in ours.items()):
        raise TrainError("the two ways of publishing differ")


def _reported(found: dict[str, list[tuple[float, float]]], factor: float) -> dict[str, Any]:
    seconds = {name: factor * statistics.median(s for s, _ in every) for name, every in found.items()}
    gib = {name: factor * max(g for _, g in every) for name, every in found.items()}
    after = seconds["checksum"] + seconds["publish"] + seconds["copy"] / EVERY
    before = seconds["checksum"] + seconds["publish_before"] + seconds["checkpoint_before"]
    return {
        "factor": round(factor, 1),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "publish_gib": round(gib["publish"], 2),
        "publish_before_gib": round(gib["publish_before"], 2),
        "step_s": round(after, 2),
        "step_before_s": round(before, 2),
    }


def main(arguments: list[str]) -> int:
    parser = Arguments(prog="benchmarks step", description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="default: all")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--json", action="store_true")
    options: argparse.Namespace = parser.parse_args(arguments)
    found = {}
    for name in options.case or CASES:
        with scratch_folder() as scratch:
            found[name] = measure(CASES[name], options.repeats, scratch)
        one = found[name]
        print(
            f"{name}: {one['step_s']} s a step beside passes and update, before {one['step_before_s']} s;"
            f" publishing holds {one['publish_gib']} GiB, before {one['publish_before_gib']} GiB",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps(found))
    return 0
