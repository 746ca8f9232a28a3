"""Commands of the CLI; each imports its dependencies when it runs."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.cli.report import EXIT_FAILED, fail, process_began
from insitu.errors import ConfigError

if TYPE_CHECKING:
    from insitu.config import Config
    from insitu.progress.base import View


SCRIPT_DEMO = ["run.steps=24"]
"""Overrides of the quick demo with the script agent."""


def demo_verb(options: argparse.Namespace) -> int:
    from insitu.config import demo_preset, load_config

    chosen = [f"harness.agent={options.agent}"] if options.agent else []
    overrides = chosen + (SCRIPT_DEMO if options.agent == "script" else []) + options.overrides
    if options.resume:
        config = _resumed(options, overrides + ["--from-scratch"] * options.from_scratch)
    else:
        config = load_config(None, overrides, demo_preset())

    def run(config: Config, view: View) -> Coroutine[Any, Any, str]:
        from insitu.api import DemoOptions, demo_with

        demo = DemoOptions(from_scratch=options.from_scratch, resume=options.resume, began=process_began())
        return demo_with(config, view, demo)

    return _run(options, config, run)


def init_verb(options: argparse.Namespace) -> int:
    from insitu.cli.init import first_config, write_config

    text = first_config(options.agent, options.model, options.engine, options.tasks)
    print("\n  ".join([f"wrote {options.file}; next:", *write_config(options.file, text, options.tasks)]))
    return 0


def train_verb(options: argparse.Namespace) -> int:
    from insitu.config import load_config

    overrides, path = _positional(options)
    if str(options.resume or "").startswith("hub:"):
        from insitu.api import from_hub

        config, found = from_hub(str(options.resume), path, overrides)
        options.resume = Path(config.run.dir) if found else None
    elif options.resume:
        config = _resumed(options, overrides + ([path] if path else []))
    elif path is None:
        raise ConfigError("give a configuration file, for instance examples/demo.toml, or --resume DIR")
    elif Path(path).is_dir():
        from insitu.api import config_from_run

        config = load_config(None, overrides, config_from_run(Path(path), "collect"))
    else:
        config = load_config(Path(path), overrides)

    def run(config: Config, view: View) -> Coroutine[Any, Any, str]:
        from insitu.api import TrainOptions, train_with

        return train_with(config, view, TrainOptions(resume=options.resume, began=process_began()))

    return _run(options, config, run)


def sft_verb(options: argparse.Namespace) -> int:
    overrides = list(options.overrides)
    if options.resume and options.source is not None:
        overrides.append(str(options.source))
    config = _resumed(options, overrides, ()) if options.resume else _sft_config(options.source, overrides)

    def run(config: Config, view: View) -> Coroutine[Any, Any, str]:
        from insitu.api import TrainOptions, sft_with

        return sft_with(config, view, TrainOptions(resume=options.resume, began=process_began()))

    return _run(options, config, run, samples=False)


def _sft_config(source: Path | None, overrides: Sequence[str]) -> Config:
    """Return the configuration of the source run with a new run directory."""
    from insitu.api import config_from_run
    from insitu.config import load_config

    if source is None:
        raise ConfigError("give the run directory with the rollouts to imitate, or --resume DIR")
    base = config_from_run(source, "sft")
    config = load_config(None, overrides, base)
    if config.sft.run != str(source.absolute()):
        raise ConfigError(f"RUN {source} already sets sft.run: drop sft.run={config.sft.run}")
    return config


def rollout_verb(options: argparse.Namespace) -> int:
    from insitu.config import load_config

    overrides, path = _positional(options)
    if options.resume and path:
        raise ConfigError(f"a resumed run keeps its configuration; drop {path}")
    if options.resume:
        from insitu.api import resumed_config

        config = resumed_config(options.resume, overrides)
    elif path is None and not overrides:
        raise ConfigError("give a configuration file, for instance examples/rollout.toml, or --resume DIR")
    else:
        config = load_config(Path(path) if path else None, overrides)

    def run(config: Config, view: View) -> Coroutine[Any, Any, str]:
        from insitu.api import RolloutOptions, rollout_with

        return rollout_with(config, view, RolloutOptions(resume=options.resume, began=process_began()))

    return _run(options, config, run, failed=lambda summary: not summary["graded"], trains=False)


def _positional(options: argparse.Namespace) -> tuple[list[str], str | None]:
    """Return (overrides, CONFIG); the first argument is an override if it has "=" and is not a file."""
    overrides, path = list(options.overrides), options.config
    if path is not None and "=" in path and not Path(path).exists():
        return [path, *overrides], None
    return overrides, path


def _resumed(
    options: argparse.Namespace, changes: Sequence[str], changeable: Sequence[str] | None = None
) -> Config:
    """Return the stored configuration, changed in keys of `changeable` or TRAINING; raise ConfigError."""
    from insitu.api import TRAINING, resumed_config

    return resumed_config(options.resume, changes, TRAINING if changeable is None else changeable)


Run = Callable[["Config", "View"], Coroutine[Any, Any, str]]
"""Runs to the end and returns the report."""


def _run(
    options: argparse.Namespace,
    config: Config,
    run: Run,
    failed: Callable[[Mapping[str, Any]], bool] = lambda summary: False,
    trains: bool = True,
    samples: bool = True,
) -> int:
    """Print the configuration (dry run), or run and print the report and summary.

    `failed`: whether a finished run counts as failed. `trains`: a dry run predicts the learner's memory.
    `samples`: the command runs agents.
    """
    from insitu.config import dump_toml

    if options.dry_run:
        from insitu.api import check_at_hand, describe_memory, describe_servers

        check_at_hand(config, trains=trains, samples=samples)
        lines = describe_servers(config) + (describe_memory(config) if trains else [])
        sys.stdout.write(dump_toml(config))
        sys.stdout.write("".join(f"\n# {line}" for line in lines) + "\n" * bool(lines))
        return 0
    from insitu.api import name_run, read_summary
    from insitu.shutdown import run_interruptible

    config = name_run(config)
    options.run_dir = Path(config.run.dir)
    view = _view(config, options)
    try:
        report = run_interruptible(run(config, view))
    finally:
        view.close()
    summary = read_summary(options.run_dir) or {}
    out = sys.stderr if options.json else sys.stdout
    print(report, end="", file=out)
    program = Path(sys.argv[0])
    if program.name == "insitu" and shutil.which(program.name) is None:
        print(f'insitu is not on PATH: export PATH="{program.absolute().parent}:$PATH"', file=out)
    if options.json:
        _print_json(summary)
    return EXIT_FAILED if failed(summary) else 0


def _view(config: Config, options: argparse.Namespace) -> View:
    """Return the view of a run; on stderr with --json."""
    from insitu.progress.open import open_view

    stream = sys.stderr if options.json else sys.stdout
    return open_view(stream, plain=options.plain or config.run.plain, run_dir=options.run_dir)


def replay_verb(options: argparse.Namespace) -> int:
    from insitu.api import read_config
    from insitu.shutdown import run_interruptible
    from insitu.tools import replay_with

    view = _view(read_config(options.run), options)
    try:
        result = run_interruptible(replay_with(options.run, view))
    finally:
        view.close()
    _print_json(result)
    if not result["identical"]:
        steps = ", ".join(map(str, result["differing_steps"]))
        return fail(f"the replay of {options.run} differs at steps {steps}", EXIT_FAILED)
    return 0


def show_verb(options: argparse.Namespace) -> int:
    from insitu.api import open_run
    from insitu.view.run_report import show_run

    if options.rollout or options.failed is not None or options.unparsed is not None:
        from insitu.cli.look import show_rollouts

        return show_rollouts(options)
    if options.tokens or options.diff:
        raise ConfigError("--tokens and --diff are of one rollout: give its id, as in train/00001/000/00")
    if not options.json:
        print(show_run(options.run), end="")
        return 0
    summary = open_run(options.run).summary
    if summary is None:
        raise ConfigError(f"{options.run} has no summary.json: the run is not finished")
    _print_json(summary)
    return 0


def view_verb(options: argparse.Namespace) -> int:
    """Serve the viewer until Ctrl-C, which is a success, or write one run as one file."""
    from insitu.shutdown import run_interruptible
    from insitu.view.web.command import DEFAULT_FOLDER, ViewOptions, view
    from insitu.view.web.export import ExportOptions, export

    if options.export is not None:
        wanted = ExportOptions(
            paths=options.runs or [DEFAULT_FOLDER],
            file=options.export,
            rollouts=options.rollouts,
            redact=options.redact,
            tokens=not options.no_tokens,
            checks=options.with_checks,
            max_mib=options.max_mib,
        )
        export(wanted, sys.stdout)
        return 0
    chosen = ViewOptions(
        paths=options.runs,
        host=options.host,
        port=options.port,
        allow_network=options.allow_network,
        opens=not options.no_open,
        json=options.json,
        at=options.at,
    )
    with contextlib.suppress(KeyboardInterrupt):
        run_interruptible(view(chosen, sys.stdout))
    return 0


def serve_verb(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C, which is a success."""
    from insitu.api import SERVE_BASE, ServeOptions, name_run, read_tools, serve_with
    from insitu.config import load_config
    from insitu.shutdown import run_interruptible

    overrides, path = _positional(options)
    if options.port is not None:
        overrides.append(f"gateway.port={options.port}")
    if not 0 < options.sessions <= 64:
        raise ConfigError("--sessions takes 1 to 64")
    config = name_run(load_config(Path(path) if path else None, overrides, SERVE_BASE))
    chosen = ServeOptions(
        sessions=options.sessions,
        agents=options.agent,
        admin=options.admin,
        json=options.json,
        tools=read_tools(options.tools) if options.tools else (),
    )
    with contextlib.suppress(KeyboardInterrupt):
        run_interruptible(serve_with(config, chosen, sys.stdout))
    return 0


def conformance_verb(options: argparse.Namespace) -> int:
    from insitu.cli.conformance import choose, run

    recipes = choose(options.agents, options.own_command, options.config)
    return 0 if run(recipes, json=options.json, record=options.record) else EXIT_FAILED


def install_verb(options: argparse.Namespace) -> int:
    from insitu.progress.open import open_view
    from insitu.shutdown import run_interruptible
    from insitu.tools import install_with

    view = open_view(sys.stderr)
    try:
        folders = run_interruptible(install_with(options.agents, view))
    finally:
        view.close()
    for name, folder in folders.items():
        print(f"{name}: {folder or 'no packages to install'}")
    return 0


def attack_verb(options: argparse.Namespace) -> int:
    from insitu.cli.attack import run

    overrides, path = _positional(options)
    return 0 if run(options, Path(path) if path else None, overrides) else EXIT_FAILED


def tasks_verb(options: argparse.Namespace) -> int:
    from insitu.cli.tasks import run

    return run(options)


def grade_verb(options: argparse.Namespace) -> int:
    from insitu.progress.open import open_view
    from insitu.shutdown import run_interruptible
    from insitu.tools import grade_report, grade_with

    view = open_view(sys.stderr)
    try:
        found = run_interruptible(grade_with(options.run, view, write=options.write))
    finally:
        view.close()
    print(grade_report(found), end="", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        _print_json({"compared": found.compared()})
        _print_json(found.as_json())
    return EXIT_FAILED if found.differences else 0


def recover_verb(options: argparse.Namespace) -> int:
    from insitu.tools import recover

    found = recover(options.run)
    if not found:
        raise ConfigError(f"{options.run} holds no log of an unsealed session")
    for rollout in found:
        ledger = rollout.trajectory.ledger
        kept = f"sampled {ledger.captured}, trainable {ledger.trained}"
        print(f"{rollout.id}: {len(rollout.turns)} turns, {kept}; {rollout.error}")
    return 0


def doctor_verb(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from insitu.tools import check_machine, check_nodes, doctor_report

    checks = check_nodes(options.fleet) if options.fleet else check_machine()
    text, complete = doctor_report(checks)
    if options.json:
        _print_json({"complete": complete, "checks": [asdict(check) for check in checks]})
    else:
        print(text)
    return 0 if complete else EXIT_FAILED


def _print_json(value: Mapping[str, Any]) -> None:
    import orjson

    print(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode())
