"""The public Python API: its names, and runs from scripts, coroutines, notebooks and threads."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import insitu
from insitu.config import demo_preset, load_config
from insitu.install_hints import install_extra
from insitu.shutdown import descendants
from insitu.stalls import stalled_s
from insitu.storage.run_dir import RunDir

SMALL = {
    "harness.agent": "script",
    "run.steps": 1,
    "eval.count": 4,
    "collect.groups_per_step": 2,
    "collect.group_size": 4,
    "harness.workers": 4,
    "train.threads": 1,
    "train.min_groups": 1,
}


def test_the_public_names_are_these() -> None:
    assert set(insitu.__all__) == {
        "Case", "Config", "FileEntry", "FinishedRollout", "GradingPlan", "InsituError", "Ledger", "Limits",
        "Oracle", "Outcome", "Recipe", "Rollout", "Run", "RunEvent", "Segment", "ServedSession", "Server",
        "Setup", "Status", "StepRecord", "Task", "Tokens", "ToolEvent", "Trajectory", "Trust", "Turn",
        "Verdict",
        "attack", "attack_async", "check_machine", "conformance", "conformance_async", "export_model",
        "export_run", "export_tasks", "grade", "grade_async", "import_run", "install", "install_async",
        "list_tasks",
        "load_config", "open_run", "push", "recover", "replay", "replay_async", "rollout", "rollout_async",
        "serve", "sft", "sft_async", "show_task", "track", "train", "train_async", "validate",
        "validate_async",
    }  # fmt: skip
    assert all(getattr(insitu, name) is not None for name in insitu.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = insitu.nothing


@pytest.mark.slow
def test_importing_the_package_imports_nothing_of_it() -> None:
    code = "import sys, insitu; print(*(name for name in sys.modules if name.startswith('insitu.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "insitu._version\n"


@pytest.mark.slow
async def test_a_run_inside_a_running_event_loop(tmp_path: Path) -> None:
    events: list[insitu.RunEvent] = []
    stalled_s()  # its thread stays for the life of the process
    before = signal.getsignal(signal.SIGINT), threading.active_count()
    run = insitu.train(
        demo_preset(), run={"dir": str(tmp_path / "run")}, overrides=SMALL, progress=events.append
    )
    assert (signal.getsignal(signal.SIGINT), threading.active_count()) == before
    assert [step.step for step in run.steps] == [1]
    assert run.kind == "train"
    assert run.summary is not None
    assert run.ledger.balanced
    trained = run.rollouts(phase="train")
    assert len(trained) == 8
    assert len(run.rollouts()) == 8 + 4 + 4
    assert {r.id for r in run.rollouts(outcome="unresolved")} <= {r.id for r in run.rollouts()}
    tokens = trained[0].tokens()
    assert len(trained[0].turns) > 0
    assert tokens.mask.sum() == sum(len(t.ids) for t in trained[0].turns if not t.excluded)
    assert np.all(tokens.logprobs[tokens.mask] <= 0)
    assert (
        len({len(a) for a in (tokens.ids, tokens.mask, tokens.logprobs, tokens.versions, tokens.segment)})
        == 1
    )
    kinds = [event.kind for event in events]
    assert kinds.count("rollout") == 16
    assert kinds.count("step") == 1
    assert events[-1].to_dict()["kind"] == events[-1].kind
    # the finished run again, from its directory, as a coroutine
    again = await insitu.train_async(resume=run.path)
    assert again.summary == run.summary
    assert insitu.open_run(run.path).config == run.config
    with pytest.raises(insitu.InsituError, match="unknown status or outcome: 'won' is not a valid"):
        run.rollouts(outcome="won")


def reward(rollout: insitu.FinishedRollout) -> float:
    return 0.5 if "a.py" in rollout.files else 0.0


@pytest.mark.slow
async def test_rollouts_of_tasks_that_the_caller_made(tmp_path: Path) -> None:
    files = {"a.py": insitu.FileEntry(content=b"x = 1\n")}
    tasks = [insitu.Task(id=f"t{i}", prompt=f"Set x to {i}.", files=files) for i in range(2)]
    run = await insitu.rollout_async(
        tasks=tasks,
        agent="script",
        reward=reward,
        n=2,
        run={"dir": str(tmp_path / "run")},
        engine={"temperature": 1.0},
        harness={"workers": 4},
    )
    rollouts = run.rollouts()
    assert sorted((r.task_id, r.reward) for r in rollouts) == [("t0", 0.5)] * 2 + [("t1", 0.5)] * 2
    plain = rollouts[0].to_dict()
    assert plain["status"] == "ok"
    assert plain["trajectory"]["ledger"]["captured"] == rollouts[0].trajectory.ledger.captured
    assert isinstance(plain["trajectory"]["segments"][0]["ids"], np.ndarray)


def test_keywords_stand_for_keys(tmp_path: Path) -> None:
    server = insitu.serve(model="http://127.0.0.1:9", engine={"model": "big"}, agent="pi")
    assert (server.config.engine.kind, server.config.engine.url) == ("upstream", "http://127.0.0.1:9")
    assert insitu.serve(model="http://127.0.0.1:9", engine={"kind": "vllm"}).config.engine.kind == "vllm"
    assert insitu.serve(model=tmp_path).config.model.path == str(tmp_path)
    assert insitu.serve(model=None, agent=None).config.harness == insitu.serve().config.harness
    assert insitu.serve({"limits": {"max_calls": 3}}).config.limits.max_calls == 3


@pytest.mark.slow
async def test_cancelling_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    begun, before = asyncio.Event(), descendants(os.getpid())

    def progress(event: insitu.RunEvent) -> None:
        if event.kind == "rollout_started":
            begun.set()

    task = asyncio.create_task(
        insitu.rollout_async(
            demo_preset(),
            overrides=SMALL | {"rollout.count": 4, "run.dir": str(tmp_path / "run")},
            progress=progress,
        )
    )
    async with asyncio.timeout(120):
        await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert descendants(os.getpid()) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": {"train.lrr": 1}}, "unknown key train.lrr; did you mean train.lr?"),
        ({"overrides": {"lr": 1}}, "override 'lr' is not of the form table.key; did you mean train.lr"),
        ({"overrides": ["train.lr=x"]}, "train.lr: input should be a valid number"),
        ({"train": {"lr": "x"}}, "train.lr: input should be a valid number"),
        ({"trian": {"lr": 1}}, "keyword tables: unknown key trian.lr; did you mean train.lr?"),
        ({"resume": "x", "run": {"steps": 1}}, "a resumed run keeps its configuration"),
        ({"config": "missing.toml"}, "cannot read missing.toml"),
        ({"config": 3}, "config must be a Config, a TOML file or a mapping of tables, got 3"),
        ({"overrides": "train.lr=1"}, "overrides must be a mapping or a list"),
        ({"agent": []}, "agent: the command is empty"),
        ({"progress": 3}, "progress must be a plain function of a RunEvent or True, got 3"),
        ({"progress": asyncio.sleep}, "progress must be a plain function of a RunEvent"),
        (
            {"tasks": [insitu.Task(id="a", prompt="", files={})]},
            "task a has no hidden tests: pass (task, oracle)",
        ),
    ],
)
def test_wrong_arguments_are_one_line_and_leave_nothing(
    arguments: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(insitu.InsituError) as caught:
        insitu.train(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "rollout", "serve", "sft", "stored"])
def test_without_torch_every_call_says_what_to_install_before_it_writes(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "stored"
    with RunDir.create(load_config(None, [f"run.dir={stored}"])) as run, run.store():
        pass
    monkeypatch.setattr("insitu_train.learner.process.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    calls: dict[str, Callable[[], object]] = {
        "train": lambda: insitu.train(overrides=SMALL),
        "rollout": lambda: insitu.rollout("examples/rollout.toml"),
        "serve": lambda: insitu.serve().start(),
        "sft": lambda: insitu.sft(stored),
        "stored": lambda: insitu.train(stored),
    }
    with pytest.raises(insitu.InsituError) as raised:
        calls[verb]()
    assert f"torch and safetensors are not installed: {install_extra('train')}" in str(raised.value)
    assert list(tmp_path.iterdir()) == [stored]


@pytest.mark.slow
def test_progress_can_be_what_the_command_line_shows(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with pytest.raises(insitu.InsituError):
            insitu.train(agent="script", tasks={"source": "jsonl", "path": "none.jsonl"}, progress=shown)
        assert ("checking the configuration and the tasks" in capsys.readouterr().out) == shown


def test_an_error_is_one_line_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(insitu.InsituError) as raised:
        insitu.train(overrides={"train.lrr": 1})
    assert raised.value._render_traceback_() == [f"ConfigError: {raised.value}"]
    monkeypatch.setenv("INSITU_DEBUG", "1")
    assert raised.value._render_traceback_()[0].startswith("Traceback")


_BLOCKED = """
import asyncio, os, signal, threading, insitu

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def progress(event):
    if event.kind == "rollout_started":
        os.kill(os.getpid(), signal.SIGINT)

async def main():
    overrides = {{"rollout.count": 200, "run.dir": {folder!r}, "harness.workers": 1}}
    insitu.rollout("examples/rollout.toml", overrides=overrides, progress=progress)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    left = {{thread.name for thread in threading.enumerate()}} - {{"MainThread", "stall-clock"}}
    assert not left, left
    print("stopped")
"""


@pytest.mark.full
@pytest.mark.slow
def test_ctrl_c_stops_a_blocking_call_inside_asyncio_run(tmp_path: Path) -> None:
    """asyncio.run answers the first Ctrl-C by cancelling its task, which the call itself blocks."""
    code = _BLOCKED.format(folder=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=180, check=False)
    assert done.stdout == b"stopped\n", f"exit code {done.returncode}: {done.stderr.decode()}"
    stored = (
        insitu.open_run(tmp_path / "run").rollouts() if (tmp_path / "run" / "run.sqlite").exists() else []
    )
    assert len(stored) < 200


def test_tasks_are_listed_through_the_api() -> None:
    tables = {"tasks": {"source": "toy"}}
    rows, totals = insitu.list_tasks(tables, limit=2)
    assert (len(rows), totals["tasks"]) == (2, 2)
    assert insitu.show_task(rows[0]["id"], tables)["id"] == rows[0]["id"]
    assert len(list(insitu.export_tasks(tables, limit=2))) == 2
