"""Child process that trains the warm start on demonstrations and measures its accuracy.

`python -m insitu_train.demo.sft_job FOLDER --parent PID` ends when its parent does. It
reads FOLDER/{tokenizer.json,chat_template.jinja,job.json,recorded.npz},
writes FOLDER/{config.json,model.safetensors,gate.json} and prints one JSON line per report. The gate is
whole-edit argmax accuracy per task category on unseen tasks, given one look; below it the job fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer
from insitu.errors import TrainError
from insitu.tasks.toy import ToySource
from insitu.types import IntArray, Limits
from insitu_train.channel.parent_watch import follow_parent, main_of_child
from insitu_train.demo.demonstrator import call
from insitu_train.demo.sft_data import batches, edit_turn, padded, read_job, read_recorded
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3, initialise, save_model
from insitu_train.options import OptimConfig
from insitu_train.sft.trainer import Sft, SftConfig

GATE = 0.9
"""Minimum whole-edit argmax accuracy of every task category."""
GATE_FROM, GATE_TASKS = 2000, 384
"""Eval tasks of the gate, disjoint from a run's held-out evaluation."""
GATE_EVERY = 250
"""Steps between gate measurements on fewer tasks."""


@torch.no_grad()
def gate(model: Qwen3, renderer: ChatRenderer, prefix: IntArray, tasks: int = GATE_TASKS) -> dict[str, float]:
    """Return the share of unseen tasks, by category, whose whole edit is the argmax."""
    source = ToySource(Limits())
    problems = [source.problem(t) for t in source.tasks("eval", GATE_FROM, tasks)]
    hits: dict[str, list[bool]] = {}
    shared = torch.from_numpy(prefix.astype(np.int64))
    for at in range(0, tasks, 64):
        part = problems[at : at + 64]
        for ways in (
            [call("read", path=p.path) for p in part],
            [call("bash", command="python3 check.py")] * len(part),
        ):
            ids, mask = padded([edit_turn(renderer, p, w) for p, w in zip(part, ways, strict=True)])
            rows = torch.from_numpy(ids.astype(np.int64))
            best = model.logits(model.hidden(shared, rows)[:, :-1]).argmax(-1)
            right = ((best == rows[:, 1:]) | ~torch.from_numpy(mask[:, 1:])).all(1)
            for problem, hit in zip(part, right.tolist(), strict=True):
                hits.setdefault(problem.category, []).append(hit)
    return {name: round(sum(h) / len(h), 4) for name, h in sorted(hits.items())}


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def run(args: argparse.Namespace) -> None:
    """Run the job of a folder.

    Raises TrainError when a task category stays below the gate.
    """
    follow_parent(args.parent)
    folder: Path = args.folder
    job = read_job(folder / "job.json")
    torch.set_num_threads(job.threads)
    renderer = load_renderer(folder)
    model = initialise(ModelConfig(vocab_size=renderer.vocab_size), job.seed)
    optim = OptimConfig(
        lr=job.lr,
        muon_lr=job.muon_lr,
        warmup_steps=min(50, job.steps // 4),
        decay="cosine",
        total_steps=job.steps,
        final=0.02,
    )
    sft = Sft(model, SftConfig(optim=optim))

    def report(step: int, loss: float, accuracy: float) -> None:
        if step % 25 == 0:
            say(step=step, steps=job.steps, loss=round(loss, 4), accuracy=round(accuracy, 4))

    recorded = read_recorded(folder / "recorded.npz")
    for step, batch in enumerate(batches(job, renderer, recorded), 1):
        report(step, *sft.step(batch.prefix, batch.rows, batch.mask))
        if step % GATE_EVERY == 0:
            say(gate=gate(model, renderer, recorded.prefixes[0], 96), step=step)
    measured = gate(model, renderer, recorded.prefixes[0])
    (folder / "gate.json").write_text(json.dumps(measured, indent=1) + "\n")
    save_model(model, folder)
    low = {name: rate for name, rate in measured.items() if rate < GATE}
    if low:
        raise TrainError(f"the warm start is below the gate of {GATE}: {low}")
    say(gate=measured, step=job.steps)


def main(argv: list[str]) -> int:
    """Run the job; return 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="insitu_train.demo.sft_job", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    return main_of_child(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
