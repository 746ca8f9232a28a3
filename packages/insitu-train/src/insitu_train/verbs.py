"""The verbs `train`, `sft`, `ranks` and `replay`; each imports its dependencies when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from insitu.cli.console import (
    DryRun,
    Resume,
    SummaryJson,
    dry_run,
    positional,
    print_json,
    run_to_end,
    shown_progress,
)
from insitu.cli.report import EXIT_FAILED, fail, process_began
from insitu.command import Arg, Overrides, Plain, RunPath
from insitu.errors import ConfigError


def train(
    config: Annotated[
        str | None,
        Arg(
            positional=True,
            metavar="CONFIG",
            help="TOML file, e.g. examples/demo.toml, or the run directory of `insitu serve` with sessions",
        ),
    ] = None,
    plain: Plain = False,
    json: SummaryJson = False,
    resume: Resume = None,
    dry: DryRun = False,
    overrides: Overrides = (),
) -> int:
    from insitu_train.api import resolve_training, train_and_report
    from insitu_train.learner.process import describe_learner
    from insitu_train.loop import TrainOptions

    path: str | None
    path, changes = positional(config, overrides, folders=True)
    hub = str(resume or "").startswith("hub:")
    if resume and path is not None and not hub:
        changes, path = [*changes, path], None
    if path is None and not resume:
        raise ConfigError("give a configuration file, for instance examples/demo.toml, or --resume DIR")
    resolved, resume = resolve_training(path, changes, resume, {}, named=False)
    if dry:
        return dry_run(resolved, describe_learner, trains=True, samples=True)
    options = TrainOptions(resume=resume, began=process_began())
    return run_to_end(
        "train",
        resolved,
        lambda config, view: train_and_report(config, view, options),
        plain=plain,
        json=json,
    )


def sft(
    source: Annotated[
        Path | None, Arg(positional=True, metavar="RUN", help="run directory with the rollouts")
    ] = None,
    plain: Plain = False,
    json: SummaryJson = False,
    resume: Resume = None,
    dry: DryRun = False,
    overrides: Overrides = (),
) -> int:
    from insitu.api import config_from_run, resolve
    from insitu_train.learner.process import describe_learner
    from insitu_train.loop import TrainOptions
    from insitu_train.sft.run import run_sft

    if resume:
        resolved = resolve(None, [*overrides, *([str(source)] if source else [])], resume, {}, named=False)
    elif source is None:
        raise ConfigError("give the run directory with the rollouts to imitate, or --resume DIR")
    else:
        resolved = resolve(config_from_run(source, "sft"), list(overrides), None, {}, named=False)
        if resolved.sft.run != str(source.absolute()):
            raise ConfigError(f"RUN {source} already sets sft.run: drop sft.run={resolved.sft.run}")
    if dry:
        return dry_run(resolved, describe_learner, trains=True, samples=False)
    options = TrainOptions(resume=resume, began=process_began())
    return run_to_end(
        "sft", resolved, lambda config, view: run_sft(config, view, options), plain=plain, json=json
    )


def replay(run: RunPath, plain: Plain = False, json: SummaryJson = False) -> int:
    from insitu.shutdown import run_interruptible
    from insitu_train.replay import replay_run

    with shown_progress(plain=plain, json=json) as view:
        result = run_interruptible(replay_run(run, view))
    print_json(result)
    if not result["identical"]:
        steps = ", ".join(map(str, result["differing_steps"]))
        return fail(f"the replay of {run} differs at steps {steps}", EXIT_FAILED)
    return 0


def ranks(
    address: Annotated[
        str, Arg(positional=True, metavar="HOST:PORT", help="where train.ranks says that ranks meet")
    ],
    ranks: Annotated[int, Arg(metavar="K", help="ranks to run here; on GPUs one for each")] = 1,
    model: Annotated[
        Path | None,
        Arg(metavar="FOLDER", help="the start model here, if not at the path that it has at the learner"),
    ] = None,
    forever: Annotated[bool, Arg(help="try for a learner until this is ended, not for ten minutes")] = False,
) -> int:
    from insitu_train.learner.host_agent import attend

    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: at least 1")

    def say(line: str) -> None:
        print(f"insitu ranks: {line}", file=sys.stderr, flush=True)

    attend(address, ranks, model, say, forever=forever)
    return 0
