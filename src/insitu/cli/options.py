"""Command line options."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from insitu import __version__
from insitu.cli import exchange, look, verbs
from insitu.cli.completion import SCRIPTS, candidates
from insitu.cli.gpu import add_gpu_check
from insitu.cli.init import ENGINES

EXPORT_FORMS = tuple("jsonl parquet hf atif otlp openenv prime skyrl tinker verifiers verl".split())
GROUPS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "demo": "--agent script run.seed=3",
        "init": "my.toml --agent pi --tasks tasks.jsonl --model models/MODEL",
        "train": "my.toml run.steps=8 train.lr=1e-4",
        "sft": "runs/DIR sft.min_reward=0.5",
        "rollout": "my.toml rollout.count=8 rollout.samples=4",
    },
    "look": {
        "view": "runs/DIR --export run.html",
        "runs": "runs",
        "top": "runs/DIR",
        "show": "runs/DIR train/00001/000/00 --diff",
        "compare": "runs/A runs/B",
        "query": 'runs/DIR "SELECT task, AVG(reward) FROM v_rollouts GROUP BY task"',
        "track": "runs/DIR --to tensorboard",
        "export": "runs/DIR --to parquet --out data",
        "import": "data",
        "push": "runs/DIR --to hub:ORG/NAME --dry-run",
        "replay": "runs/DIR",
        "grade": "runs/DIR",
    },
    "tasks": {"tasks": "validate my.toml --out gate.json", "attack": "my.toml"},
    "tools": {
        "serve": "my.toml --agent claude_code",
        "deploy": "slurm my.toml --out job",
        "recover": "runs/DIR",
        "conformance": "--agents pi,codex",
        "install": "pi claude_code",
        "completion": "bash",
        "doctor": "",
        "gpu-check": "",
    },
}
"""Commands by topic, in the order of the help text, with the arguments of an example."""
_INVALID_CHOICE = re.compile(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)")


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        if choice := _INVALID_CHOICE.search(message):
            message += _similar(choice[1], re.findall(r"[\w-]+", choice[2]))
        command = self.prog.removeprefix("insitu").strip()
        text = f"{command}: {message}" if command else message
        self.exit(2, f"insitu: {' '.join(text.split())}; see {self.prog} --help\n")


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _as_key(option: str, after: str) -> str:
    """Return a hint where an option is a key of the configuration, as --steps 3 is run.steps=3."""
    from insitu.config import dotted_keys

    name, equals, value = option.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value if equals else after if not after.startswith("-") else ""
    keys = [key for key in dotted_keys() if name in (key, key.rpartition(".")[2])]
    return f"; write {' or '.join(f'{key}={value}' for key in keys)}" if keys else ""


def _subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return action.choices


def _path(text: str) -> Path:
    # The shell does not expand the ~ of `--resume=~/x`.
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text} is in no known home folder") from error


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides may be at any position."""
    # argparse by itself accepts positional overrides only as one contiguous group.
    parser = _parser()
    if os.environ.get("INSITU_COMPLETE"):
        words = sys.argv[1:] if argv is None else argv
        print("\n".join(candidates(words, _subcommands(parser))))
        parser.exit()
    options, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or "=" not in text or "overrides" not in options]
    if unknown:
        command = _subcommands(parser)[options.command]
        known = command._option_string_actions
        hints = [
            ("overrides" in options and _as_key(text, after)) or _similar(text.partition("=")[0], known)
            for text, after in zip(unknown, [*unknown[1:], ""], strict=True)
            if text.startswith("-")
        ]
        command.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="insitu",
        description="Train a language model inside the coding agent people really use.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"insitu {__version__}")
    parser.set_defaults(run_dir=None)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help="see below; COMMAND --help has its options"
    )
    _add_demo(commands)
    _add_init(commands)
    _add_train(commands)
    _add_sft(commands)
    _add_rollout(commands)
    _add_serve(commands)
    _add_deploy(commands)
    _add_recover(commands)
    _add_view(commands)
    replay = commands.add_parser(
        "replay", description="repeat a stored run's training and compare it bit for bit"
    )
    replay.add_argument("run", type=_path, metavar="RUN", help="run directory")
    _add_output(replay)
    replay.set_defaults(verb=verbs.replay_verb)
    _add_look(commands)
    _add_exchange(commands)
    _add_conformance(commands)
    _add_attack(commands)
    _add_tasks(commands)
    _add_grade(commands)
    install = commands.add_parser(
        "install", description="install agents into the cache, for use without a network"
    )
    install.add_argument(
        "agents", nargs="+", metavar="AGENT", help="NAME, NAME@VERSION or TOML file with [harness]"
    )
    install.set_defaults(verb=verbs.install_verb)
    completion = commands.add_parser("completion", description="print the completion script of a shell")
    completion.add_argument("shell", choices=tuple(SCRIPTS), help='bash: eval "$(insitu completion bash)"')
    completion.set_defaults(verb=lambda options: print(SCRIPTS[options.shell], end="") or 0)
    doctor = commands.add_parser("doctor", description="check this machine for insitu's requirements")
    doctor.add_argument(
        "--fleet",
        metavar="CONFIG",
        default="",
        help="check the nodes of [fleet] in this file instead: each starts an agent in a sandbox",
    )
    doctor.add_argument("--json", action="store_true", help="print the checks as one JSON object")
    doctor.set_defaults(verb=verbs.doctor_verb)
    parser.epilog = _overview(commands.choices)
    for name, arguments in (each for group in GROUPS.values() for each in group.items()):
        commands.choices[name].epilog = f"example: insitu {name} {arguments}".rstrip()
    return parser


def _overview(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the commands by topic."""
    lines = []
    for group, names in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<13}{commands[name].description}" for name in names), ""]
    return "\n".join([*lines, "INSITU_DEBUG=1 in the environment adds tracebacks to errors."])


def _add_deploy(commands: Any) -> None:
    deploy = commands.add_parser(
        "deploy", description="write the files that start a run as a container, Space or cluster job"
    )
    deploy.add_argument("target", choices=("space", "slurm", "k8s", "sky"))
    deploy.add_argument("config", type=_path, metavar="CONFIG", help="TOML file of the run")
    deploy.add_argument("--out", type=_path, required=True, metavar="DIR", help="new folder")
    deploy.add_argument("--name", default="insitu", metavar="NAME", help="name of the job")
    deploy.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (slurm, sky)")
    deploy.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of a machine; 0 = CPU image")
    deploy.add_argument("--image", default="", metavar="REF", help="k8s: the pushed image")
    deploy.set_defaults(verb=exchange.deploy_verb)


def _add_conformance(commands: Any) -> None:
    conformance = commands.add_parser(
        "conformance",
        description="run agents against a scripted policy and check every captured token",
    )
    conformance.add_argument("--agents", default="", metavar="A,B@VERSION", help="agents (default: all)")
    conformance.add_argument(
        "--command",
        dest="own_command",
        default="",
        metavar="TEXT",
        help='own agent that speaks chat completions, e.g. "my-agent {prompt_file}"',
    )
    conformance.add_argument("--config", type=_path, metavar="FILE", help="own agent: TOML with [harness]")
    conformance.add_argument("--json", action="store_true", help="print the result as JSON, last on stdout")
    conformance.add_argument("--record", type=_path, metavar="DIR", help="record the wire traffic here")
    conformance.set_defaults(verb=verbs.conformance_verb)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo", description="watch a small model learn to use a coding agent, on a CPU"
    )
    demo.add_argument("--agent", choices=("pi", "script"), help="the agent (default: pi)")
    demo.add_argument(
        "--from-scratch", action="store_true", help="record demonstrations and train the warm start first"
    )
    _add_run_options(demo)
    demo.set_defaults(verb=verbs.demo_verb)


def _add_init(commands: Any) -> None:
    init = commands.add_parser("init", description="write a first configuration file")
    init.add_argument("file", nargs="?", type=_path, default=Path("insitu.toml"), metavar="FILE")
    init.add_argument("--agent", default="pi", help="the agent (default: pi)")
    init.add_argument("--model", default="", help="model folder (default: the small model of the demo)")
    init.add_argument("--engine", choices=tuple(ENGINES), default="embedded", help="the sampler")
    init.add_argument("--tasks", default="", help="JSONL file with tasks (default: generated tasks)")
    init.set_defaults(verb=verbs.init_verb)


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", description="train from a configuration file")
    train.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="TOML file, e.g. examples/demo.toml, or the run directory of `insitu serve` with the sessions",
    )
    _add_run_options(train)
    train.set_defaults(verb=verbs.train_verb)


def _add_sft(commands: Any) -> None:
    sft = commands.add_parser(
        "sft", description="imitate the best rollouts of a run (supervised fine-tuning)"
    )
    sft.add_argument("source", nargs="?", type=_path, metavar="RUN", help="run directory with the rollouts")
    _add_run_options(sft)
    sft.set_defaults(verb=verbs.sft_verb)


def _add_rollout(commands: Any) -> None:
    rollout = commands.add_parser(
        "rollout", description="run many rollouts without training and report pass@k"
    )
    rollout.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file, e.g. examples/rollout.toml")
    _add_run_options(rollout)
    rollout.set_defaults(verb=verbs.rollout_verb)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", description="serve the model to an agent that you run yourself")
    serve.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file (default: the warm start)")
    serve.add_argument(
        "--agent",
        action="append",
        default=[],
        metavar="NAME",
        help="print the setup of this agent (default: write all to files)",
    )
    serve.add_argument("--port", type=int, help="loopback port (default: a free one)")
    serve.add_argument("--sessions", type=int, default=1, metavar="N", help="sessions to open (default: 1)")
    serve.add_argument("--tools", type=_path, metavar="FILE", help="host tools of every session, as JSON")
    serve.add_argument("--admin", action="store_true", help="also serve the admin API, on a separate port")
    serve.add_argument("--json", action="store_true", help="one JSON object per line")
    serve.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a key")
    serve.set_defaults(verb=verbs.serve_verb)


def _add_view(commands: Any) -> None:
    view = commands.add_parser("view", description="look at runs in the browser")
    view.add_argument(
        "runs",
        nargs="*",
        type=_path,
        metavar="RUN",
        help="run directories, or folders of them (default: runs)",
    )
    view.add_argument("--port", type=int, help="port (default: 7430, or the next free one)")
    view.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    view.add_argument(
        "--allow-network", action="store_true", help="permit a --host that other machines can reach"
    )
    view.add_argument("--at", default="", metavar="PLACE", help="page to open, as the key y copies it")
    view.add_argument("--export", type=_path, metavar="FILE", help="write the runs as one HTML file instead")
    view.add_argument(
        "--rollouts",
        default="",
        metavar="N|ID,…|all",
        help="rollouts that the file holds whole: the newest N, ids, or all (default: the telling ones, and"
        " pairs before and after training)",
    )
    view.add_argument(
        "--redact",
        action="append",
        default=[],
        metavar="REGEX",
        help="replace this in the file too; may be repeated",
    )
    view.add_argument("--no-tokens", action="store_true", help="leave tokens out of the file")
    view.add_argument(
        "--with-checks", action="store_true", help="keep failing checks: they show hidden tests"
    )
    view.add_argument("--max-mib", type=int, default=25, help="largest size of the file (default: 25)")
    view.add_argument("--no-open", action="store_true", help="open no browser")
    view.add_argument("--json", action="store_true", help='print {"url": ..., "token": ...}')
    view.set_defaults(verb=verbs.view_verb)


def _add_look(commands: Any) -> None:
    show = commands.add_parser("show", description="look at a run, finished or not, or at one rollout")
    show.add_argument("run", type=_path, metavar="RUN", help="run directory")
    show.add_argument("rollout", nargs="?", default="", metavar="ROLLOUT", help="id, as train/00001/000/00")
    show.add_argument("--failed", type=int, metavar="N", help="newest N (most: 200) not solved")
    show.add_argument("--unparsed", type=int, metavar="N", help="newest N with malformed or unknown calls")
    show.add_argument("--diff", action="store_true", help="also the diff of the rollout")
    show.add_argument("--tokens", action="store_true", help="also every token of the rollout with its fate")
    show.add_argument("--json", action="store_true", help="print summary.json, or the rollout as JSON")
    show.set_defaults(verb=verbs.show_verb)
    runs = commands.add_parser("runs", description="list runs: state, step, held-out before and after")
    runs.add_argument("folder", nargs="?", type=_path, default=Path("runs"), metavar="DIR")
    runs.add_argument("--json", action="store_true", help="print one JSON object")
    runs.set_defaults(verb=look.runs_verb)
    query = commands.add_parser("query", description="run a SELECT over a run's rollouts, turns and steps")
    query.add_argument("run", type=_path, metavar="RUN", help="run directory")
    query.add_argument(
        "sql", metavar="SQL", help="one SELECT; views: v_rollouts, v_turns, v_steps, v_attempts"
    )
    query.add_argument("--limit", type=int, default=1000, metavar="N", help="most rows (default: 1000)")
    form = query.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object per row")
    form.add_argument("--csv", action="store_true", help="CSV with a header")
    query.set_defaults(verb=look.query_verb)
    compare = commands.add_parser("compare", description="compare two runs: scores, tasks, differing keys")
    compare.add_argument("a", type=_path, metavar="A", help="run directory")
    compare.add_argument("b", type=_path, metavar="B", help="run directory")
    compare.add_argument("--json", action="store_true", help="print one JSON object")
    compare.set_defaults(verb=look.compare_verb)
    top = commands.add_parser("top", description="watch a run under way from another terminal")
    top.add_argument("run", type=_path, metavar="RUN", help="run directory")
    top.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    top.set_defaults(verb=look.top_verb)
    track = commands.add_parser("track", description="send a run to wandb, trackio, tensorboard or your own")
    track.add_argument("run", type=_path, metavar="RUN", help="run directory")
    track.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="NAME",
        help="tracker; repeatable (default: track.to)",
    )
    track.set_defaults(verb=look.track_verb)


def _add_exchange(commands: Any) -> None:
    export = commands.add_parser(
        "export", description="write a run's rollouts for other programs and trainers"
    )
    export.add_argument("run", type=_path, metavar="RUN", help="run directory")
    export.add_argument(
        "--to", default="jsonl", metavar="FORM", help=f"{', '.join(EXPORT_FORMS)} (default: jsonl)"
    )
    export.add_argument("--out", type=_path, metavar="DIR", help="new folder (default: JSON lines on stdout)")
    export.add_argument("--phase", default="", help="only these: train, rollout, serve, eval_after ...")
    export.add_argument("--steps", default="", metavar="A:B", help="steps from A on, without B")
    export.add_argument("--check", action="store_true", help="read the export back and compare every value")
    export.add_argument(
        "--send", default="", metavar="URL", help="otlp: also send the spans to this receiver"
    )
    export.add_argument(
        "--checkpoint", default="", metavar="best|last|N", help="a model instead of rollouts, --to hf or peft"
    )
    export.add_argument("--dtype", default="auto", help="--checkpoint: auto, float32 or bfloat16")
    export.add_argument("--json", action="store_true", help="print the counts as JSON")
    export.set_defaults(verb=exchange.export_verb)
    importing = commands.add_parser("import", description="make a run directory from exported rollouts")
    importing.add_argument("folder", type=_path, metavar="DIR", help="folder of jsonl, parquet or hf")
    importing.add_argument("--out", type=_path, metavar="RUN", help="new run directory (default: in runs/)")
    importing.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a key: model.path=FOLDER")
    importing.set_defaults(verb=exchange.import_verb)
    push = commands.add_parser("push", description="upload a checkpoint, or a run's rollouts, to a hub")
    push.add_argument("what", type=_path, metavar="RUN|CHECKPOINT", help="run directory or checkpoint")
    push.add_argument("--to", required=True, metavar="hub:ORG/NAME", help="repository at Hugging Face")
    push.add_argument("--public", action="store_true", help="visible to everybody (default: private)")
    push.add_argument("--dry-run", action="store_true", help="list what would be uploaded")
    push.add_argument("--json", action="store_true", help="print the report as JSON")
    push.set_defaults(verb=exchange.push_verb)


def _add_tasks(commands: Any) -> None:
    add_gpu_check(commands)
    tasks = commands.add_parser("tasks", description="list, show, validate or export the tasks of a data set")
    tasks.add_argument("what", choices=("list", "show", "validate", "export"), help="what to do")
    tasks.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file (default: overrides only)")
    tasks.add_argument("--id", action="append", default=[], metavar="ID", help="only this task (repeatable)")
    tasks.add_argument("--set", default="", metavar="NAME", help="only this of [[tasks]] (default: all)")
    tasks.add_argument("--limit", type=int, default=0, metavar="N", help="the first N tasks of each set only")
    tasks.add_argument("--repeats", type=int, default=3, metavar="N", help="validate: runs of each task")
    tasks.add_argument(
        "--out", type=_path, metavar="FILE", help="validate: its result; export: JSONL file (default: stdout)"
    )
    tasks.add_argument("--json", action="store_true", help="print JSON, last on stdout")
    tasks.add_argument("--tests", action="store_true", help="show: also print the tests")
    tasks.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a key")
    tasks.set_defaults(verb=verbs.tasks_verb)


def _add_recover(commands: Any) -> None:
    recover = commands.add_parser("recover", description="store the sessions of a killed `insitu serve`")
    recover.add_argument("run", type=_path, metavar="RUN", help="its run directory")
    recover.set_defaults(verb=verbs.recover_verb)


def _add_grade(commands: Any) -> None:
    grade = commands.add_parser(
        "grade", description="grade a run's stored rollouts again and report differences"
    )
    grade.add_argument("run", type=_path, metavar="RUN", help="run directory")
    grade.add_argument(
        "--write", action="store_true", help="store new verdicts of rollouts that were not trained on"
    )
    grade.add_argument(
        "--json", action="store_true", help="print the differences and the counts as JSON on stdout"
    )
    grade.set_defaults(verb=verbs.grade_verb)


def _add_attack(commands: Any) -> None:
    attack = commands.add_parser(
        "attack", description="run fifty attacks on the grader, each with an honest control"
    )
    attack.add_argument(
        "config", nargs="?", metavar="CONFIG", help="attack this file's tasks, in its sandboxes"
    )
    attack.add_argument("--tasks", type=int, default=3, metavar="N", help="tasks of your own (default: 3)")
    attack.add_argument("--runner", default="", metavar="A,B", help="grading runners (default: all)")
    attack.add_argument("--only", default="", metavar="N,M-K", help="attacks by number (default: all)")
    attack.add_argument("--json", action="store_true", help="print the result as JSON, last on stdout")
    attack.add_argument("--markdown", action="store_true", help="print the expected results and exit")
    attack.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a key, e.g. sandbox.backend")
    attack.set_defaults(verb=verbs.attack_verb)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)
    parser.add_argument("--resume", type=_path, metavar="DIR", help="continue the run in this directory")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a key, e.g. run.seed=3")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    parser.add_argument("--json", action="store_true", help="print the summary as the last line of stdout")
