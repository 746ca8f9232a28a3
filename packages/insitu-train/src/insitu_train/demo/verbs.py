"""The verb `demo`."""

from __future__ import annotations

from typing import Annotated

from insitu.cli.console import DryRun, Resume, SummaryJson, dry_run, run_to_end
from insitu.cli.report import process_began
from insitu.command import Arg, Overrides, Plain

SCRIPT_DEMO = ("run.steps=24",)
"""Overrides of the quick demo with the script agent."""


def demo(
    agent: Annotated[str, Arg(choices=("pi", "script"), help="the agent (default: pi)")] = "",
    from_scratch: Annotated[bool, Arg(help="record demonstrations and train the warm start first")] = False,
    plain: Plain = False,
    json: SummaryJson = False,
    resume: Resume = None,
    dry: DryRun = False,
    overrides: Overrides = (),
) -> int:
    from insitu.api import resolve
    from insitu.config import demo_preset, load_config
    from insitu.evaluate.resume import TRAINING
    from insitu_train.demo.run import DemoOptions, run_demo
    from insitu_train.learner.process import describe_memory

    chosen = [f"harness.agent={agent}"] if agent else []
    changes = [*chosen, *(SCRIPT_DEMO if agent == "script" else ()), *overrides]
    if resume:
        resolved = resolve(None, changes + ["--from-scratch"] * from_scratch, resume, {}, changeable=TRAINING)
    else:
        resolved = load_config(None, changes, demo_preset())
    if dry:
        return dry_run(resolved, describe_memory, trains=True, samples=True)
    options = DemoOptions(from_scratch=from_scratch, resume=resume, began=process_began())
    return run_to_end(
        "demo", resolved, lambda config, view: run_demo(config, view, options), plain=plain, json=json
    )
