"""The command line as a person meets it: exact lines, exit codes, nothing heavy loaded for help."""

from __future__ import annotations

import errno
import json
import os
import pty
import shlex
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from insitu import cli
from insitu.cli import console, report
from insitu.cli.options import commands, parse
from insitu.config import Config, demo_preset, dump_toml, load_config
from insitu.errors import ConfigError, EngineError, SandboxError
from insitu.install_hints import install_extra
from insitu.progress.base import View
from insitu.storage.run_dir import RunDir
from insitu.types import Ledger, Rollout, Status, Timings, Trajectory
from insitu_train.init import ENGINES

ROLLOUT = Rollout(
    id="train/00001/000/00",
    task_id="t",
    category="swapped",
    status=Status.OK,
    reward=1.0,
    trajectory=Trajectory(segments=(), turns=(), ledger=Ledger()),
    verdict=None,
    changed={},
    deleted=(),
    timings=Timings(),
)


def insitu(*argv: str, cwd: Path | None = None, speaks: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """`speaks`: the encoding of its output, as of PYTHONIOENCODING."""
    command = [sys.executable, "-m", "insitu", *argv]
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2]), "PYTHONIOENCODING": speaks}
    encoding = speaks.partition(":")[0]
    return subprocess.run(
        command, capture_output=True, encoding=encoding, timeout=60, env=env, cwd=cwd, check=False
    )


def only_line(text: str) -> str:
    assert text.count("\n") == 1, text
    return text.rstrip("\n")


KEPT = "insitu: a resumed run keeps its configuration; drop {}"
OF_RUN = (
    " (run.steps, run.stop_after_evals, run.alarms, run.checkpoint_every_steps, run.keep_checkpoints may"
    " change)"
)


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (
            ["demo", "train.lrr=1"],
            2,
            "insitu: override 'train.lrr=1': unknown key train.lrr; did you mean train.lr?",
        ),
        (
            ["demo", "--agent", "script", "run.seed=x"],
            2,
            "insitu: run.seed: input should be a valid integer, got 'x'",
        ),
        (
            ["train"],
            2,
            "insitu: give a configuration file, for instance examples/demo.toml, or --resume DIR",
        ),
        (
            ["train", "run.seed=3"],
            2,
            "insitu: give a configuration file, for instance examples/demo.toml, or --resume DIR",
        ),
        (
            ["train", "none.toml"],
            2,
            "insitu: cannot read none.toml: [Errno 2] No such file or directory: 'none.toml'",
        ),
        (["demo", "--resume", "none"], 1, "insitu: none is not a run directory: it has no config.toml"),
        (
            ["train", "--resume", "none", "run.seed=3"],
            2,
            KEPT.format("run.seed=3") + OF_RUN,
        ),
        (
            ["demo", "--resume", "none", "--agent", "pi"],
            2,
            KEPT.format("harness.agent=pi") + " (harness.workers may change)",
        ),
        (["show", "none"], 1, "insitu: none is not a run directory: it has no config.toml"),
        (["show", "none", "--json"], 1, "insitu: none is not a run directory: it has no config.toml"),
        (
            ["demo", "--from-scratch", "--resume", "none"],
            2,
            KEPT.format("--from-scratch"),
        ),
        (["replay", "none"], 1, "insitu: none is not a run directory: it has no config.toml"),
    ],
)
def test_failures_are_one_line_with_a_code(
    argv: list[str],
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == code
    captured = capsys.readouterr()
    assert only_line(captured.err) == line
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_overrides_alone_say_what_to_roll_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollout", "run.seed=3", "--dry-run"]) == 0
    assert "seed = 3 " in capsys.readouterr().out
    assert cli.main(["rollout"]) == 2
    assert "give a configuration file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["dmeo"], ["demo", "--frm-scratch"], ["export", "x", "a=b"], ["demo", "nonsense"]]
)
def test_a_wrong_command_line_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        code = cli.main(argv)
        raise SystemExit(code)
    assert stop.value.code == 2
    assert only_line(capsys.readouterr().err).startswith("insitu: ")


def test_options_that_are_paths_may_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bash expands neither `--resume=~/x` nor `run.dir=~/x`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(["train", "--resume=~/x"])[1].resume == tmp_path / "x"
    assert parse(["show", "~/x"])[1].run == tmp_path / "x"
    with pytest.raises(SystemExit):
        parse(["show", "~no-such-user/x"])
    assert only_line(capsys.readouterr().err).startswith(
        "insitu: show: argument RUN: ~no-such-user/x is in no"
    )


def test_imitation_takes_the_rollouts_of_the_run_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = tmp_path / "a", tmp_path / "b"
    for folder in (source, other):
        with RunDir.create(load_config(None, [f"run.dir={folder}"])):
            pass
    assert cli.main(["sft", str(source), f"sft.run={other}", "--dry-run"]) == 2
    line = only_line(capsys.readouterr().err)
    assert line == f"insitu: RUN {source} already sets sft.run: drop sft.run={other}"
    assert cli.main(["sft", str(source), "policy.kind=hf", "policy.lora_rank=4", "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["sft"]["run"] == str(source)


@pytest.mark.slow
def test_dry_run_prints_what_would_run_and_writes_nothing(tmp_path: Path) -> None:
    done = insitu("demo", "run.seed=3", "--agent", "script", "--dry-run", "train.lr=1e-3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    fewer = ["harness.agent=script", "run.steps=24"]
    expected = load_config(None, [*fewer, "run.seed=3", "train.lr=1e-3"], demo_preset())
    assert load_config(base=tomllib.loads(done.stdout)) == expected
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.toml").write_text(done.stdout)
    again = insitu("train", "a.toml", "--dry-run", cwd=tmp_path)
    assert again.stdout == done.stdout == dump_toml(expected)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["", "train", "rollout", "tasks", "attack", "conformance", "deploy", "view"])
def test_help_loads_nothing_heavy(verb: str) -> None:
    code = (
        "import sys; from insitu import cli\n"
        f"try: cli.main({[*filter(None, [verb]), '--help']!r})\n"
        "finally: print(sorted(sys.modules), file=sys.stderr)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=env, check=False
    )
    assert done.returncode == 0
    assert (verb or "demo") in done.stdout
    assert "insitu.cli" in done.stderr
    for heavy in ("torch", "numpy", "aiohttp", "pydantic", "rich", "transformers"):
        assert f"'{heavy}'" not in done.stderr


@pytest.mark.slow
def test_verbs_of_a_package_that_cannot_be_imported_are_left_out_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from insitu.command import Command\n"
        "VERBS = [Command(name=name, group='tools', text='mine', example='', run='mine:run')"
        " for name in ('hello', 'train')]\n"
        "def run(): print('hello'); return 0\n"
    )
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    points = "[insitu.commands]\nlost = nosuchmodule:VERBS\nmine = mine:VERBS\nodd = mine:run\n"
    (info / "entry_points.txt").write_text(points)

    def said(*argv: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(Path(cli.__file__).parents[2]), str(tmp_path)])
        command = [sys.executable, "-m", "insitu", *argv]
        env = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)

    done = said("hello")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    lines = done.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["insitu"] * 3
    assert "the verbs of lost are left out" in lines[0]
    assert "mine has a verb train, which exists" in lines[1]
    assert "the verbs of odd are left out" in lines[2]
    assert said("train").returncode == 2


@pytest.mark.slow
def test_verbs_work_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    script = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m insitu show {tmp_path}/none"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    assert only_line(done.stderr).endswith("is not a run directory: it has no config.toml")


def test_a_folder_is_no_configuration_of_a_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("rollout", "attack", "serve"):
        assert cli.main([verb, str(tmp_path)]) == 2
        assert "it is a folder, not a TOML file" in only_line(capsys.readouterr().err)


def test_help_names_each_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for name in commands():
        assert text.count(f"\n  {name} ") == 1, name


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["trian"], "train"),
        (["tasks", "validte"], "validate"),
        (["init", "--engine=vlm"], "vllm"),
        (["demo", "--form-scratch"], "--from-scratch"),
    ],
)
def test_verbs_and_values_get_a_suggestion(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert f"did you mean {hint}?" in only_line(capsys.readouterr().err)


@pytest.mark.parametrize("engine", ENGINES)
def test_init_writes_a_valid_file_and_names_what_comes_next(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    argv = [
        "init",
        str(path),
        "--engine",
        engine,
        "--agent",
        "codex",
        "--model",
        "models/m",
        "--tasks",
        "t.jsonl",
    ]
    assert cli.main(argv) == 0
    config = load_config(path)
    assert (config.engine.kind, config.harness.agent, config.task_set.path) == (engine, "codex", "t.jsonl")
    commands = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [command.split()[1] for command in commands] == ["doctor", "tasks", "rollout", "train"]
    for command in commands:
        parse(command.split()[1:])
    assert cli.main(argv) == 2
    assert "exists already" in only_line(capsys.readouterr().err)


def test_init_with_own_tasks_says_that_the_demos_model_does_not_know_them(tmp_path: Path) -> None:
    own, toy = tmp_path / "own.toml", tmp_path / "toy.toml"
    assert cli.main(["init", str(own), "--tasks", "t.jsonl"]) == cli.main(["init", str(toy)]) == 0
    (line,) = [line for line in own.read_text().splitlines() if line.startswith('path = ""')]
    assert "set this" in line
    assert "set this" not in toy.read_text()


@pytest.mark.parametrize("name", list(commands()))
def test_help_of_a_command_ends_with_an_example_that_parses(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    example = " ".join(capsys.readouterr().out.partition("example: ")[2].split())
    assert parse(shlex.split(example)[1:])[0].name == name


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["train", "c.toml", "--steps", "3"], "write run.steps=3; see insitu train --help"),
        (["train", "c.toml", "--run.steps=3"], "write run.steps=3; see"),
        (["rollout", "--lr", "--json"], "write train.lr=; see"),
        (["rollout", "c.toml", "--group-size=4"], "write collect.group_size=4; see"),
        (["show", "runs/a", "--steps=3"], "see insitu show --help"),
    ],
)
def test_an_option_that_is_a_key_says_how_to_write_it(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(argv)
    line = only_line(capsys.readouterr().err)
    assert hint in line
    assert ("write" in hint) == ("write" in line)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("insitu 0.")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("bad key"), 2, "insitu: bad key"),
        (EngineError("learner is gone\nsecond line"), 1, "insitu: learner is gone second line"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/r/logs/a"),
            1,
            "insitu: disk full while writing /r/logs/a: free some space",
        ),
        (
            OSError(errno.EADDRINUSE, "Address already in use"),
            1,
            f"insitu: [Errno {errno.EADDRINUSE}] Address already in use",
        ),
        (
            ExceptionGroup(
                "g", [ValueError("consequence"), ExceptionGroup("h", [SandboxError("no sandbox")])]
            ),
            1,
            "insitu: no sandbox",
        ),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130, "insitu: stopped"),
    ],
)
def test_failures_inside_a_run_are_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.report_failure(error) == code
    assert only_line(capsys.readouterr().err) == line


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def hint() -> str:
        with pytest.raises(KeyboardInterrupt) as stopped, report.resumable("train", tmp_path / "r"):
            raise KeyboardInterrupt
        return report.how_to_resume(stopped.value)

    assert hint() == ""
    with RunDir.create(load_config(None, [f"run.dir={tmp_path / 'r'}"])) as run, run.store() as store:
        assert hint() == "", "nothing is stored: it is started again, not resumed"
        store.put_attempt(ROLLOUT)
        store.put_rollout("train", 1, 0, 0, ROLLOUT)
    assert report.report_failure(KeyboardInterrupt(), hint()) == 130
    line = only_line(capsys.readouterr().err)
    assert line == f"insitu: stopped; continue with: insitu train --resume {tmp_path / 'r'}"


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ExceptionGroup):
        report.report_failure(ExceptionGroup("g", [TypeError("defect")]))


@pytest.mark.slow
def test_show_works_on_a_run_with_no_process_alive(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path / 'r'}", "run.steps=2"])
    with RunDir.create(config) as run, run.store() as store:
        trajectory = replace(ROLLOUT.trajectory, ledger=Ledger(captured=12, trained=12))
        store.put_rollout("train", 1, 0, 0, replace(ROLLOUT, trajectory=trajectory))
        store.assign(1, [ROLLOUT.id])
        store.commit_step(1, {"loss": 0.5}, "c", "h", trajectory.ledger, trained=[ROLLOUT.id])
    done = insitu("show", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert "step    1  solved 1.00 (1/1)  trained 12 of 12 tokens" in done.stdout
    assert f"not finished: 1 of 2 steps\ncontinue with: insitu train --resume {tmp_path / 'r'}" in done.stdout
    assert insitu("show", "--json", str(tmp_path / "r")).returncode == 2
    for wrong in ("[]", '{"a": 1}'):
        (tmp_path / "r" / "summary.json").write_text(wrong)
        refused = insitu("show", str(tmp_path / "r"))
        assert refused.returncode == 1
        assert "summary.json" in refused.stderr
        assert "Traceback" not in refused.stderr


SUMMARY = {
    "agent": "gödel → \U0001f600",
    "seed": 0,
    "ledger": {"captured": 0, "trained": 0, "excluded": {}},
    "wall_s": 12.0,
    "rl_steps": 0,
    "updates": 0,
    "rollouts": 0,
    "max_logprob_gap": 1e-6,
    "max_logprob_gap_seen": 1e-6,
    "mismatched": 0,
    "evaluations": {},
    "best_step": None,
    "stopped_early": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "encoding",
    [
        pytest.param("ascii", marks=pytest.mark.full),
        "latin-1",
        "ascii:surrogateescape",
        pytest.param("utf-8", marks=pytest.mark.full),
    ],
)
def test_no_character_is_too_much_for_the_terminal(tmp_path: Path, encoding: str) -> None:
    folder = tmp_path / "läufe-→"
    with RunDir.create(load_config(None, [f"run.dir={folder}"])) as run, run.store():
        run.write_summary(SUMMARY)
    reported = insitu("show", str(folder), speaks=encoding)
    assert (reported.returncode, reported.stderr) == (0, "")
    assert ("→" if encoding == "utf-8" else r"\u2192") in reported.stdout
    line = insitu("show", "--json", str(folder), speaks=encoding).stdout
    assert json.loads(line) == SUMMARY


@pytest.mark.parametrize("verb", ["show", "replay"])
def test_a_damaged_run_is_said_to_be_unreadable(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(load_config(None, [f"run.dir={tmp_path / 'r'}"])) as run:
        (run.path / "run.sqlite").write_bytes(b"hello" * 1000)
    assert cli.main([verb, str(tmp_path / "r")]) == 1
    line = only_line(capsys.readouterr().err)
    assert line == f"insitu: cannot read {tmp_path / 'r' / 'run.sqlite'}: file is not a database"


@pytest.mark.slow
def test_a_run_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.create(load_config(None, [f"run.dir={tmp_path / 'r'}"])):
        code = (
            "import sys; from pathlib import Path; from insitu.storage.run_dir import RunDir\n"
            "RunDir.open(Path(sys.argv[1]))"
        )
        env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
        argv = [sys.executable, "-c", code, str(tmp_path / "r")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=env, check=False)
    assert f"in use by process {os.getpid()}" in done.stderr


@pytest.mark.slow
def test_doctor_says_one_line_each() -> None:
    done = insitu("doctor")
    lines = done.stdout.splitlines()
    assert {line.split()[1] for line in lines} >= {
        "python",
        "machine",
        "disk",
        "bubblewrap",
        "cgroups",
        "node",
        "pi",
        "torch",
    }
    assert all(line[:4] in ("ok  ", "--  ", "NO  ") for line in lines[:-1])
    assert lines[-1] == "nothing that is needed is missing"
    found = json.loads(insitu("doctor", "--json").stdout)
    assert found["complete"] is True
    assert [check["name"] for check in found["checks"]] == [line.split("  ")[1] for line in lines[:-1]]


@pytest.mark.slow
def test_the_start_of_the_process_is_known() -> None:
    code = "import time; time.sleep(0.4); from insitu.cli.report import process_began as began\n"
    code += "print(time.monotonic() - began())"
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True, timeout=20)
    assert 0.4 <= float(done.stdout) <= time.monotonic() - began + 0.05


async def finished(config: Config, view: View) -> None:
    """A run that ends at once."""
    view.stage("training", 4)
    view.note(f"in {config.run.dir}")
    write_report(Path(config.run.dir))


def write_report(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text("the report\n")


def test_the_summary_is_the_last_line_of_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(None, [f"run.dir={tmp_path}", "run.seed=3"])
    (tmp_path / "summary.json").write_text('{"seed": 3}')
    assert console.run_to_end("demo", config, finished, plain=False, json=True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"seed": 3}
    assert captured.err.endswith("the report\n")
    assert f"in {tmp_path}" in captured.err


def test_without_json_the_report_is_the_end_of_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert console.run_to_end("demo", Config(), finished, plain=False, json=False) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("the report\n")
    assert "\x1b" not in captured.out
    assert captured.err == ""
    (run,) = (tmp_path / "runs").iterdir()
    assert f"in {run}" in captured.out, "an unnamed run has its name before it starts"


VIEWED = (
    "import sys; from pathlib import Path\n"
    "from insitu.cli import console; from insitu.cli.options import parse\n"
    "from insitu.config import load_config\n"
    "async def run(config, view):\n"
    "    view.stage('training', 4)\n"
    "    view.note('a note')\n"
    "    Path(config.run.dir).mkdir(parents=True, exist_ok=True)\n"
    "    (Path(config.run.dir) / 'report.txt').write_text('the report')\n"
    "_, options = parse(['demo', *sys.argv[2:]])\n"
    "config = load_config(None, [f'run.dir={sys.argv[1]}/r', *options.overrides])\n"
    "console.run_to_end('demo', config, run, plain=options.plain, json=False)\n"
)


@pytest.mark.slow
def test_on_a_terminal_the_view_is_live(tmp_path: Path) -> None:
    """A pseudo-terminal; --plain switches the colours off."""
    assert "\x1b[" in on_a_terminal(tmp_path, VIEWED)
    assert "\x1b[" not in on_a_terminal(tmp_path, VIEWED, "--plain")


@pytest.mark.slow
def test_on_a_dumb_terminal_every_event_is_a_line(tmp_path: Path) -> None:
    said = on_a_terminal(tmp_path, VIEWED, TERM="dumb")
    assert "\x1b[" not in said
    assert "s] training (4)\r\n" in said
    assert "s] a note\r\n" in said


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_on_a_terminal_without_unicode_every_event_is_a_line(encoding: str, tmp_path: Path) -> None:
    said = on_a_terminal(tmp_path, VIEWED, PYTHONIOENCODING=encoding)
    assert "\x1b[" not in said
    assert "s] training (4)\r\n" in said


def on_a_terminal(folder: Path, code: str, *argv: str, **env: str) -> str:
    ours, theirs = pty.openpty()
    source = {"PYTHONPATH": str(Path(cli.__file__).parents[2]), "TERM": "xterm-256color"}
    command = [sys.executable, "-c", code, str(folder), *argv]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | source | env
    ) as program:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            said += part
        assert program.wait(timeout=20) == 0, said
    os.close(ours)
    assert b"the report" in said
    return said.decode()


WITHOUT = """
import sys
from importlib import util

there = util.find_spec
util.find_spec = lambda name, *more: None if name in ("torch", "transformers") else there(name, *more)
from insitu.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["demo"], f"torch is not installed: {install_extra('train')}"),
        pytest.param(
            ["demo", "--from-scratch"],
            f"torch is not installed: {install_extra('train')}",
            marks=pytest.mark.full,
        ),
        pytest.param(["serve"], f"torch is not installed: {install_extra('train')}", marks=pytest.mark.full),
        (["train", "policy.kind=hf"], f"torch and transformers are not installed: {install_extra('hf')}"),
    ],
)
def test_a_run_without_torch_says_what_to_install(argv: list[str], line: str, tmp_path: Path) -> None:
    if argv[0] == "train":
        (tmp_path / "c.toml").write_text('[engine]\nkind = "vllm"\nurls = ["http://127.0.0.1:1"]\n')
        argv.insert(1, "c.toml")
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, "-c", WITHOUT, *argv]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path, check=False
    )
    assert (done.returncode, only_line(done.stderr)) == (2, f"insitu: {line}")
    assert [path.name for path in tmp_path.iterdir() if path.name != "c.toml"] == []
