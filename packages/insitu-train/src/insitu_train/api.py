"""The public Python API of training: `train`, `sft` and `replay`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.api import (
    ConfigSource,
    Overrides,
    Progress,
    Run,
    blocking_form,
    config_from_run,
    path_of,
    resolve,
    viewing,
)
from insitu.config import Config
from insitu.errors import ConfigError, RecordError
from insitu.evaluate.resume import TRAINING, resumed_config
from insitu.progress.base import View
from insitu_train.hub_runs import check_hub, fetch_run, pushing_checkpoints, repo_of
from insitu_train.loop import TrainOptions
from insitu_train.replay import replay_run
from insitu_train.run import run_training
from insitu_train.run_report import finish
from insitu_train.sft.run import run_sft


async def train_and_report(config: Config, view: View, options: TrainOptions) -> None:
    """Train, push checkpoints if `run.hub` is set, and write the report of the run. Raises InsituError."""
    check_hub(config)
    async with pushing_checkpoints(config, view.note):
        summary = await run_training(config, view, options)
        finish(Path(config.run.dir), summary)


async def train_async(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    resume: Path | str | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Run:
    """Train the configured model on the configured tasks and return the finished run.

    `config` is a Config, a TOML file, a mapping of tables, or a run directory of `serve` whose rewarded
    sessions are trained on instead of rollouts of an agent; keywords and then `overrides`
    (`{"run.steps": 8}`) win over it. A keyword is a table (`run={"steps": 8}`) or one of these:
    `agent` (name, path, command as a list, or Recipe), `model` (folder, or URL of a provider),
    `tasks` (list of Task, name or path of a source), `reward` (function or its path). `resume` continues a
    run directory, a finished one with `overrides={"run.steps": 16}`, and takes no other configuration.
    `progress` gets every RunEvent on the run's event loop and must return at once; True prints the progress
    that the command line shows. Raises InsituError.
    """
    if str(resume or "").startswith("hub:"):
        found = await asyncio.to_thread(resolve_training, config, overrides, resume, tables)
    else:
        found = resolve_training(config, overrides, resume, tables)
    resolved, resumed = found
    with viewing(progress, resolved) as view:
        await train_and_report(resolved, view, TrainOptions(resume=resumed))
    return Run(resolved.run.dir)


def resolve_training(
    config: ConfigSource,
    overrides: Overrides,
    resume: Path | str | None,
    tables: Mapping[str, Any],
    *,
    named: bool = True,
) -> tuple[Config, Path | None]:
    """Return the configuration and the run directory to resume; one at hub:ORG/NAME is fetched."""
    if not str(resume or "").startswith("hub:"):
        found = resolve(config, overrides, resume, tables, changeable=TRAINING, named=named)
        return found, path_of(resume)
    found, exists = from_hub(str(resume), config, overrides, tables)
    return found, Path(found.run.dir) if exists else None


async def sft_async(
    run: Path | str | None = None,
    *,
    overrides: Overrides = (),
    resume: Path | str | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Run:
    """Imitate the best stored rollouts of a run (supervised fine-tuning) and return the new run.

    `run` is the directory of any run with rewarded rollouts, whose configuration is used; `sft={...}` says
    which are imitated. The other arguments are those of `train`. Raises InsituError.
    """
    if run is None and resume is None:
        raise ConfigError("give the run directory with the rollouts to imitate, or resume")
    source = None if run is None else config_from_run(Path(run), "sft")
    resolved = resolve(source, overrides, resume, tables)
    with viewing(progress, resolved) as view:
        await run_sft(resolved, view, TrainOptions(resume=path_of(resume)))
    return Run(resolved.run.dir)


async def replay_async(run: Path | str, *, progress: Progress = None) -> Mapping[str, Any]:
    """Repeat a stored run's training from its tokens and compare every step's weights bit for bit.

    Returns `identical`, `steps`, `differing_steps` and `weights`. Raises InsituError.
    """
    with viewing(progress) as view:
        return await replay_run(Path(run), view)


train = blocking_form(train_async)
sft = blocking_form(sft_async)
replay = blocking_form(replay_async)


def from_hub(
    where: str,
    config: ConfigSource = None,
    overrides: Overrides = (),
    tables: Mapping[str, Any] | None = None,
) -> tuple[Config, bool]:
    """Fetch the run at hub:ORG/NAME and return its configuration and True.

    With a configuration, its `run.dir` is where the run is put, and where there is no run yet it is returned
    with False. Raises ConfigError, RecordError, SetupError.
    """
    given = None if config is None else resolve(config, overrides, None, tables or {})
    run = Path("runs", repo_of(where).rpartition("/")[2]) if given is None else Path(given.run.dir)
    if fetch_run(where, run):
        # With a configuration they are for a new run too: a job that is submitted again repeats them.
        return resumed_config(run, overrides, TRAINING, ignore_others=given is not None), True
    if given is None:
        raise RecordError(f"{where} has no checkpoint of a run")
    return given, False
