"""The verbs: demo, train, rollout, serve, recover, replay, grade, bench, show, tasks, conformance, attack,
doctor.

Every failure a person can meet is one line on stderr beginning `whet:`. Exit codes: 0 done, 1 failed,
2 wrong command line or configuration, 130 stopped by Ctrl-C (resumable). Each verb imports what it needs at
its own start, so that `--help` loads neither torch nor the gateway. WHET_DEBUG=1 adds tracebacks.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import __version__
from whet.errors import ConfigError, WhetError

if TYPE_CHECKING:
    from whet.config import Config
    from whet.view.base import View

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parse(argv)
    try:
        code: int = options.verb(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone, as in `whet show RUN | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (KeyboardInterrupt, WhetError, OSError, BaseExceptionGroup) as error:
        return _report_failure(error, _how_to_resume(options))
    return code


def _report_failure(error: BaseException, resume: str = "") -> int:
    """One line for a known failure; a defect is raised again, with its traceback."""
    first = next(_leaves(error))
    if os.environ.get("WHET_DEBUG"):
        traceback.print_exception(error)
    if isinstance(first, KeyboardInterrupt):
        return _fail("stopped" + resume, EXIT_STOPPED)
    if isinstance(first, ConfigError):
        return _fail(str(first) + resume, EXIT_USAGE)
    if isinstance(first, OSError) and first.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {first.filename}" if first.filename else ""
        return _fail(f"disk full{where}: free some space{resume}", EXIT_FAILED)
    if isinstance(first, WhetError | OSError):
        return _fail(str(first) + resume, EXIT_FAILED)
    raise error


def _how_to_resume(options: argparse.Namespace) -> str:
    """What to add to the line of a run that stopped; empty when nothing was stored."""
    run_dir: Path | None = options.run_dir
    if run_dir is None:
        return ""
    from whet.record.run import has_rollouts

    # A store that cannot be read just now, on a full disk for instance, is not empty.
    with contextlib.suppress(WhetError):
        if not has_rollouts(run_dir):
            return ""
    return f"; continue with: whet {options.command} --resume {run_dir}"


def _leaves(error: BaseException) -> Any:
    """The failures inside a group of a TaskGroup, whet's own first: the others are often consequences."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    leaves = [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    yield from sorted(leaves, key=lambda leaf: not isinstance(leaf, WhetError))


def _fail(line: str, code: int) -> int:
    print(f"whet: {' '.join(line.split())}", file=sys.stderr)
    return code


def process_began() -> float:
    """Reading of time.monotonic() when this process was started, from /proc; now if that cannot be read."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - max(0.0, age)


# --------------------------------------------------------------------------- the verbs


def _demo(options: argparse.Namespace) -> int:
    from whet.config import demo_preset, load_config

    overrides = ([f"harness.agent={options.agent}"] if options.agent else []) + options.overrides
    config = _resumed(options, overrides) if options.resume else load_config(None, overrides, demo_preset())

    def run(config: Config, view: View) -> tuple[Mapping[str, Any], str]:
        from whet.demo.run import DemoOptions, run_demo, write_report

        named = [] if options.resume else [*overrides, f"run.dir={config.run.dir}"]
        demo = DemoOptions(
            overrides=named,
            from_scratch=options.from_scratch,
            resume=options.resume,
            began=process_began(),
        )
        summary = run_demo(demo, view)
        return summary, write_report(Path(config.run.dir), summary)

    return _run(options, config, run)


def _train(options: argparse.Namespace) -> int:
    from whet.config import load_config

    overrides, path = _positional(options)
    if options.resume:
        config = _resumed(options, overrides + ([path] if path else []))
    elif path is None:
        raise ConfigError("give a configuration file, for instance examples/demo.toml, or --resume DIR")
    else:
        config = load_config(Path(path), overrides)

    def run(config: Config, view: View) -> tuple[Mapping[str, Any], str]:
        from whet.train.loop import TrainOptions, train
        from whet.view.finish import finish

        summary = train(config, view, TrainOptions(resume=options.resume, began=process_began()))
        return summary, finish(Path(config.run.dir), summary)

    return _run(options, config, run)


def _rollout(options: argparse.Namespace) -> int:
    from whet.config import load_config
    from whet.evaluate.resume import resumed_config

    overrides, path = _positional(options)
    if options.resume and path:
        raise ConfigError(f"a resumed run keeps its configuration; drop {path}")
    if options.resume:
        config = resumed_config(options.resume, overrides)
    elif path is None:
        raise ConfigError("give a configuration file, for instance examples/rollout.toml, or --resume DIR")
    else:
        config = load_config(Path(path), overrides)

    def run(config: Config, view: View) -> tuple[Mapping[str, Any], str]:
        from whet.evaluate.run import REPORT, RolloutOptions, rollout

        summary = rollout(config, view, RolloutOptions(resume=options.resume, began=process_began()))
        return summary, (Path(config.run.dir) / REPORT).read_text(encoding="utf-8")

    return _run(options, config, run, failed=lambda summary: not summary["graded"])


def _positional(options: argparse.Namespace) -> tuple[list[str], str | None]:
    """(overrides, CONFIG): the first word is an override where it looks like one and is no file."""
    overrides, path = list(options.overrides), options.config
    if path is not None and "=" in path and not Path(path).exists():
        return [path, *overrides], None
    return overrides, path


def _resumed(options: argparse.Namespace, given: Sequence[str]) -> Config:
    """The stored configuration; a resumed run takes no other, for its steps would not be comparable."""
    from whet.record.run import read_config

    if given:
        raise ConfigError(f"a resumed run keeps its configuration; drop {' '.join(given)}")
    return read_config(options.resume)


Run = Callable[["Config", "View"], tuple[Mapping[str, Any], str]]
"""Runs to the end; gives the summary and the report."""


def _run(
    options: argparse.Namespace,
    config: Config,
    run: Run,
    failed: Callable[[Mapping[str, Any]], bool] = lambda summary: False,
) -> int:
    """Dry run, or the run with its view, its report and its last line. `failed`: what ran to its end and is
    of no use."""
    from whet.config import dump_toml
    from whet.record.run import name_run

    if options.dry_run:
        sys.stdout.write(dump_toml(config))
        return 0
    config = name_run(config)
    options.run_dir = Path(config.run.dir)
    view = _view(config, options)
    try:
        summary, report = run(config, view)
    finally:
        view.close()
    print(report, end="", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        _print_json(summary)
    return EXIT_FAILED if failed(summary) else 0


def _view(config: Config, options: argparse.Namespace) -> View:
    """Live on a terminal, else plain; on stderr when stdout is for the JSON line."""
    stream = sys.stderr if options.json else sys.stdout
    if options.plain or config.run.plain or not stream.isatty():
        from whet.view.plain import PlainView

        return PlainView(stream)
    from rich.console import Console

    from whet.view.live import LiveView

    return LiveView(Console(file=stream))


def _replay(options: argparse.Namespace) -> int:
    from whet.record.run import read_config

    config = read_config(options.run)
    from whet.train.replay import replay

    view = _view(config, options)
    try:
        result = replay(options.run, view)
    finally:
        view.close()
    _print_json(result)
    if not result["identical"]:
        steps = ", ".join(map(str, result["differing_steps"]))
        return _fail(f"the replay of {options.run} differs at steps {steps}", EXIT_FAILED)
    return 0


def _bench(options: argparse.Namespace) -> int:
    folder = Path(__file__).parent / "bench"
    names = sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))
    if not options.name:
        print("\n".join(names))
        return 0
    if options.name not in names:
        raise ConfigError(f"no benchmark {options.name!r}; there are: {', '.join(names) or 'none'}")
    code: int = importlib.import_module(f"whet.bench.{options.name}").main(options.arguments)
    return code


def _show(options: argparse.Namespace) -> int:
    from whet.record.run import read_summary
    from whet.view.finish import show_run

    if not options.json:
        print(show_run(options.run), end="")
        return 0
    summary = read_summary(options.run)
    if summary is None:
        raise ConfigError(f"{options.run} has no summary.json: the run is not finished")
    _print_json(summary)
    return 0


def _serve(options: argparse.Namespace) -> int:
    """Ctrl-C is how serving ends; a failure before is a failure."""
    from whet.config import load_config
    from whet.record.run import name_run
    from whet.serve.run import BASE, ServeOptions, read_tools, serve
    from whet.stop import run_interruptible

    overrides, path = _positional(options)
    if options.port is not None:
        overrides.append(f"gateway.port={options.port}")
    if not 0 < options.sessions <= 64:
        raise ConfigError("--sessions takes 1 to 64")
    config = name_run(load_config(Path(path) if path else None, overrides, BASE))
    chosen = ServeOptions(
        sessions=options.sessions,
        agents=options.agent,
        admin=options.admin,
        json=options.json,
        tools=read_tools(options.tools) if options.tools else (),
    )
    with contextlib.suppress(KeyboardInterrupt):
        run_interruptible(serve(config, chosen, sys.stdout))
    return 0


def _conformance(options: argparse.Namespace) -> int:
    from whet.conformance.command import run

    passed = run(options.agents, json=options.json, record=options.record)
    return 0 if passed else EXIT_FAILED


def _attack(options: argparse.Namespace) -> int:
    from whet.attack.command import run

    return 0 if run(options) else EXIT_FAILED


def _tasks(options: argparse.Namespace) -> int:
    from whet.curate.command import run

    return run(options)


def _grade(options: argparse.Namespace) -> int:
    from whet.collect.regrade import run

    same = run(options.run, write=options.write, json=options.json)
    return 0 if same else EXIT_FAILED


def _recover(options: argparse.Namespace) -> int:
    from whet.serve.run import recover_run

    if not recover_run(options.run, sys.stdout):
        raise ConfigError(f"{options.run} holds no log of an unsealed session")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from whet.doctor import doctor

    text, complete = doctor()
    print(text)
    return 0 if complete else EXIT_FAILED


def _print_json(value: Mapping[str, Any]) -> None:
    import orjson

    print(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode())


# --------------------------------------------------------------------------- the command line


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere; argparse by itself takes them only in one row."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    wrong = [text for text in rest if text.startswith("-") or "=" not in text or "overrides" not in options]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whet",
        description="Train a language model inside the coding agent people really use.",
        epilog="WHET_DEBUG=1 in the environment adds tracebacks to errors.",
    )
    parser.add_argument("--version", action="version", version=f"whet {__version__}")
    parser.set_defaults(run_dir=None)
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(verbs)
    _add_train(verbs)
    _add_rollout(verbs)
    _add_serve(verbs)
    _add_recover(verbs)
    replay = verbs.add_parser("replay", help="repeat a stored run's training and compare it bit for bit")
    replay.add_argument("run", type=Path, metavar="RUN", help="run directory")
    _add_output(replay)
    replay.set_defaults(verb=_replay)
    bench = verbs.add_parser("bench", help="run one benchmark, or list them")
    bench.add_argument("name", nargs="?", default="", metavar="NAME", help="without it: list the benchmarks")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark")
    bench.set_defaults(verb=_bench)
    show = verbs.add_parser("show", help="look at a run, finished or not")
    show.add_argument("run", type=Path, metavar="RUN", help="run directory")
    show.add_argument("--json", action="store_true", help="print summary.json")
    show.set_defaults(verb=_show)
    conformance = verbs.add_parser(
        "conformance", help="run real agents through the gateway with a scripted policy and check the books"
    )
    conformance.add_argument("--agents", default="", metavar="A,B", help="which; without it: all")
    conformance.add_argument("--json", action="store_true", help="print the result as JSON, last on stdout")
    conformance.add_argument("--record", type=Path, metavar="DIR", help="keep what went over the wire here")
    conformance.set_defaults(verb=_conformance)
    _add_attack(verbs)
    _add_tasks(verbs)
    _add_grade(verbs)
    doctor = verbs.add_parser("doctor", help="say what this machine has of what whet needs")
    doctor.set_defaults(verb=_doctor)
    return parser


def _add_demo(verbs: Any) -> None:
    demo = verbs.add_parser("demo", help="watch a small model learn to use a coding agent, on a CPU")
    demo.add_argument("--agent", choices=("pi", "script"), help="the agent (default: pi)")
    demo.add_argument(
        "--from-scratch", action="store_true", help="record demonstrations and train the warm start first"
    )
    _add_run_options(demo)
    demo.set_defaults(verb=_demo)


def _add_train(verbs: Any) -> None:
    train = verbs.add_parser("train", help="train from a configuration file")
    train.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file, e.g. examples/demo.toml")
    _add_run_options(train)
    train.set_defaults(verb=_train)


def _add_rollout(verbs: Any) -> None:
    rollout = verbs.add_parser("rollout", help="run many attempts without training and tell pass@k")
    rollout.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file, e.g. examples/rollout.toml")
    _add_run_options(rollout)
    rollout.set_defaults(verb=_rollout)


def _add_serve(verbs: Any) -> None:
    serve = verbs.add_parser("serve", help="serve the model to an agent that you run yourself")
    serve.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file; without it: the warm start")
    serve.add_argument("--agent", action="append", default=[], metavar="NAME", help="print this set-up only")
    serve.add_argument("--port", type=int, help="loopback port (default: a free one)")
    serve.add_argument("--sessions", type=int, default=1, metavar="N", help="sessions to open (default: 1)")
    serve.add_argument("--tools", type=Path, metavar="FILE", help="host tools of every session, as JSON")
    serve.add_argument("--admin", action="store_true", help="serve the operator too, on a port of its own")
    serve.add_argument("--json", action="store_true", help="one JSON object per line")
    serve.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a key")
    serve.set_defaults(verb=_serve)


def _add_tasks(verbs: Any) -> None:
    tasks = verbs.add_parser("tasks", help="look at a data set; find out which tasks can be trusted")
    tasks.add_argument("what", choices=("list", "show", "validate"), help="what to do")
    tasks.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file; without it: overrides only")
    tasks.add_argument("--id", action="append", default=[], metavar="ID", help="only this task (repeatable)")
    tasks.add_argument("--limit", type=int, default=0, metavar="N", help="the first N tasks only")
    tasks.add_argument("--repeats", type=int, default=3, metavar="N", help="validate: runs of each task")
    tasks.add_argument("--out", type=Path, metavar="FILE", help="validate: gate file (default: tasks.gate)")
    tasks.add_argument("--json", action="store_true", help="print JSON, last on stdout")
    tasks.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a key")
    tasks.set_defaults(verb=_tasks)


def _add_recover(verbs: Any) -> None:
    recover = verbs.add_parser("recover", help="export the sessions that a killed `whet serve` held")
    recover.add_argument("run", type=Path, metavar="RUN", help="its run directory")
    recover.set_defaults(verb=_recover)


def _add_grade(verbs: Any) -> None:
    grade = verbs.add_parser("grade", help="judge a run's stored rollouts again and name what differs")
    grade.add_argument("run", type=Path, metavar="RUN", help="run directory")
    grade.add_argument("--write", action="store_true", help="store verdicts that differ and trained nothing")
    grade.add_argument("--json", action="store_true", help="print the counts as JSON, last on stdout")
    grade.set_defaults(verb=_grade)


def _add_attack(verbs: Any) -> None:
    attack = verbs.add_parser(
        "attack", help="try to cheat the grader in fifty ways, each with an honest twin"
    )
    attack.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="attack this file's tasks")
    attack.add_argument("--tasks", type=int, default=3, metavar="N", help="tasks of CONFIG (default: 3)")
    attack.add_argument("--runner", default="", metavar="A,B", help="grading runners; without it: all")
    attack.add_argument("--only", default="", metavar="N,M-K", help="attacks by number; without it: all")
    attack.add_argument("--json", action="store_true", help="print the result as JSON, last on stdout")
    attack.add_argument("--markdown", action="store_true", help="print what each cell must be, and stop")
    attack.set_defaults(verb=_attack)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this directory")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a key, e.g. run.seed=3")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    parser.add_argument("--json", action="store_true", help="print the summary as the last line of stdout")


if __name__ == "__main__":
    sys.exit(main())
