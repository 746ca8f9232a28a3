"""The task source that the configuration names: the one place where sources are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from insitu.config import Config
from insitu.errors import ConfigError, boundary
from insitu.tasks.allowlist import read_allowlist
from insitu.tasks.base import TaskSource
from insitu.tasks.contests import AppsFormat, CodeContests, LiveCodeBench
from insitu.tasks.dataset import Format, LoadOptions, RowCheck, RowSource
from insitu.tasks.function_sets import BigCodeBench, EvalPlus, Mbpp
from insitu.tasks.harbor import HarborFormat, TerminalBenchFormat
from insitu.tasks.own_formats import PlainFolder, PlainJsonl
from insitu.tasks.polyglot import PolyglotFormat
from insitu.tasks.slime import SlimeFormat
from insitu.tasks.swe import SweFolders, SweFormat
from insitu.tasks.swe_more import ProFormat, R2eFormat, SmithFormat
from insitu.tasks.terminal import TerminusFormat
from insitu.tasks.toy import ToySource
from insitu.tasks.unit_tests import HumanEval, UnitTests
from insitu.tasks.user_functions import UserFunction, load_function
from insitu.types import Limits

FORMATS: Mapping[str, Format] = {
    "jsonl": PlainJsonl(),
    "folder": PlainFolder(),
    "humaneval": HumanEval(),
    "unit_tests": UnitTests(),
    "swe_bench": SweFormat(name="swe_bench"),
    "swe_bench_folders": SweFolders(),
    "swe_bench_live": SweFormat(name="swe_bench_live", needs_command=True),
    "swe_gym": SweFormat(name="swe_gym"),
    "swe_rebench": SweFormat(name="swe_rebench", needs_command=True),
    "swe_pro": ProFormat(),
    "swe_smith": SmithFormat(),
    "r2e_gym": R2eFormat(),
    "slime": SlimeFormat(),
    "terminus": TerminusFormat(),
    "apps": AppsFormat(name="apps"),
    "taco": AppsFormat(name="taco"),
    "code_contests": CodeContests(),
    "live_code_bench": LiveCodeBench(),
    "mbpp": Mbpp(),
    "evalplus": EvalPlus(),
    "bigcodebench": BigCodeBench(),
    "polyglot": PolyglotFormat(),
    "harbor": HarborFormat(),
    "terminal_bench": TerminalBenchFormat(),
}


def open_source(config: Config, limits: Limits, check: RowCheck) -> TaskSource:
    """Open the configured source. A data set is read whole; `check` (grade.clean.runner_for) refuses what its
    runner cannot judge. Raises TaskError, ConfigError."""
    if config.tasks.source == "toy":
        return ToySource(limits, seed=config.run.seed, kinds=config.tasks.kinds)
    return open_rows(config, limits, check)


def open_rows(config: Config, limits: Limits, check: RowCheck) -> RowSource:
    """As open_source, for a data set on disk."""
    table = config.tasks
    options = LoadOptions(
        limits=limits,
        assets=Path(table.assets) if table.assets else None,
        images=_images(Path(table.images)) if table.images else {},
        checker=table.checker,
    )
    source = RowSource(
        table.source,
        FORMATS[table.source],
        Path(table.path),
        options,
        eval_share=table.eval_share,
        seed=config.run.seed,
        on_invalid_row=table.on_invalid_row,
        check=check,
        transform=load_function(table.transform) if table.transform else None,
    )
    if table.allowlist:
        source.keep(read_allowlist(Path(table.allowlist)).passed())
    return source


def action_of(config: Config) -> UserFunction | None:
    """The user's function from a reply to files, if one is named. Raises ConfigError."""
    path = config.tasks.parse_answer
    if not path:
        return None
    return UserFunction(
        f"tasks.parse_answer {path}", load_function(path), max_concurrent=config.harness.workers
    )


def _images(path: Path) -> dict[str, str]:
    """The file of tasks.images. Raises ConfigError."""
    with boundary(ConfigError, f"tasks.images: cannot read {path}"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ConfigError(f"tasks.images: {path} is not a JSON object of image references")
    return value
