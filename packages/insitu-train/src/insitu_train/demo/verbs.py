"""The verb `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from insitu.cli.console import DryRun, Resume, SummaryJson, dry_run, run_to_end
from insitu.cli.report import process_began
from insitu.command import Arg, Overrides, Plain

SCRIPT_DEMO = ("run.steps=24",)
"""Overrides of the quick demo with the script agent."""
SMALL_MODEL = Path("examples/small-model.toml")
"""What --model runs, of the current folder or of the package."""


def demo(
    agent: Annotated[str, Arg(choices=("pi", "script"), help="the agent (default: pi)")] = "",
    model: Annotated[
        str,
        Arg(
            metavar="smollm2|PATH",
            help="train a real model on short functions: SmolLM2-135M, a folder, a GGUF file, hub:ORG/NAME",
        ),
    ] = "",
    from_scratch: Annotated[bool, Arg(help="record demonstrations and train the warm start first")] = False,
    plain: Plain = False,
    json: SummaryJson = False,
    resume: Resume = None,
    dry: DryRun = False,
    overrides: Overrides = (),
) -> int:
    from insitu.api import resolve
    from insitu.config import demo_preset, load_config, read_toml
    from insitu.errors import ConfigError
    from insitu.evaluate.resume import TRAINING
    from insitu_train.demo.run import run_demo
    from insitu_train.demo.smollm2 import smollm2_file
    from insitu_train.learner.process import describe_learner
    from insitu_train.loop import TrainOptions

    if model and (agent or from_scratch or resume):
        raise ConfigError(
            "--model has an agent and a start of its own: give it alone; a run goes on by --resume"
        )
    chosen = [f"harness.agent={agent}"] if agent else []
    changes = [*chosen, *(SCRIPT_DEMO if agent == "script" else ()), *overrides]
    if resume:
        resolved = resolve(None, changes + ["--from-scratch"] * from_scratch, resume, {}, changeable=TRAINING)
    elif model:
        path = str(smollm2_file()) if model == "smollm2" else model
        resolved = load_config(None, [f"model.path={path}", *overrides], read_toml(SMALL_MODEL))
    else:
        resolved = load_config(None, changes, demo_preset())
    if dry:
        return dry_run(resolved, describe_learner, trains=True, samples=True)
    options = TrainOptions(resume=resume, began=process_began())
    return run_to_end(
        "demo",
        resolved,
        lambda config, view: run_demo(config, view, options, from_scratch=from_scratch),
        plain=plain,
        json=json,
    )
