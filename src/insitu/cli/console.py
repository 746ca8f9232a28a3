"""What verbs share on a console: a run to its end with a view, or a dry run; JSON; where overrides stand."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from insitu.cli.report import EXIT_FAILED, resumable
from insitu.command import Arg
from insitu.errors import ConfigError

if TYPE_CHECKING:
    from insitu.config import Config
    from insitu.progress.base import View

Resume = Annotated[Path | None, Arg(metavar="DIR", help="continue the run in this directory")]
DryRun = Annotated[bool, Arg(flag="--dry-run", help="print the resolved configuration and exit")]
SummaryJson = Annotated[bool, Arg(help="print the summary as the last line of stdout")]
Start = Callable[["Config", "View"], Coroutine[Any, Any, object]]
"""Runs to the end and writes the report."""


def positional(
    config: str | None, overrides: Sequence[str], *, folders: bool = False
) -> tuple[str | None, list[str]]:
    """Return (CONFIG, overrides); the first argument is an override if it has "=" and is not a file.

    Raises ConfigError for a folder, unless the verb takes `folders`.
    """
    if config is not None and "=" in config and not Path(config).exists():
        return None, [config, *overrides]
    if config is not None and not folders and Path(config).is_dir():
        raise ConfigError(f"cannot read {config}: it is a folder, not a TOML file")
    return config, list(overrides)


def print_json(value: Mapping[str, Any]) -> None:
    import orjson

    print(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode())


@contextmanager
def shown_progress(*, plain: bool = False, json: bool = True, run_dir: Path | None = None) -> Iterator[View]:
    """Yield a view on stdout; on stderr with --json, so that stdout has the result alone."""
    from insitu.progress.open import open_view

    with closing(open_view(sys.stderr if json else sys.stdout, plain=plain, run_dir=run_dir)) as view:
        yield view


def dry_run(config: Config, notes: Callable[[Config], Sequence[str]], *, trains: bool, samples: bool) -> int:
    """Check what needs no server, and print the configuration and then `notes` as comments."""
    from insitu.config import dump_toml
    from insitu.engines.server_command import describe_servers
    from insitu.runtime.preflight import check_at_hand

    check_at_hand(config, trains=trains, samples=samples)
    lines = [*describe_servers(config), *notes(config)]
    sys.stdout.write(dump_toml(config))
    sys.stdout.write("".join(f"\n# {line}" for line in lines) + "\n" * bool(lines))
    return 0


def run_to_end(
    command: str,
    config: Config,
    start: Start,
    *,
    plain: bool,
    json: bool,
    failed: Callable[[Mapping[str, Any]], bool] = lambda summary: False,
) -> int:
    """Run, then print the report and summary. `failed`: whether a finished run counts as failed."""
    from insitu.shutdown import run_interruptible
    from insitu.storage.run_dir import REPORT, name_run, read_summary

    config = name_run(config)
    run_dir = Path(config.run.dir)
    with (
        resumable(command, run_dir),
        shown_progress(plain=plain, json=json, run_dir=run_dir) as view,
    ):
        run_interruptible(start(config, view))
    summary = read_summary(run_dir) or {}
    out = sys.stderr if json else sys.stdout
    print((run_dir / REPORT).read_text(encoding="utf-8"), end="", file=out)
    program = Path(sys.argv[0])
    if program.name == "insitu" and shutil.which(program.name) is None:
        print(f'insitu is not on PATH: export PATH="{program.absolute().parent}:$PATH"', file=out)
    if json:
        print_json(summary)
    return EXIT_FAILED if failed(summary) else 0
