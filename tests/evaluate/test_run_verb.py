"""`insitu rollout` on an engine of tokens: what is counted is what the engine saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, load_config
from insitu.errors import (
    ConfigError,
    EngineError,
    RecordError,
    SandboxError,
    SetupError,
    TaskError,
    TrainError,
)
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.progress.plain import PlainView
from insitu.runtime.engine import Sampler
from insitu.storage.run_dir import read_store
from insitu.tasks.toy import ToyProblem, ToySource
from insitu.types import IntArray, Limits, Message, RequestKey, Rollout
from insitu_train.demo.demonstrator import call, edit
from insitu_train.demo.scripted import ScriptedEngine
from insitu_train.loop import TrainOptions
from insitu_train.run import run_training

pytestmark = pytest.mark.slow

SETTINGS = [
    "harness.agent=script", "harness.mode=warm", "harness.workers=2", "rollout.count=3", "rollout.samples=2",
    "limits.wall_s=20", "limits.max_call_tokens=512", "model.max_context_tokens=8192",
]  # fmt: skip
DONE = Message(role="assistant", text="done")
Fail = Callable[[RequestKey], EngineError | None]


class Scripted:
    """Solves slot 0 of every task and gives up in slot 1."""

    def __init__(self, fail: Fail = lambda key: None) -> None:
        source = ToySource(Limits())
        self.problems = [source.problem(task) for task in source.tasks("eval", 0, 3)]
        self.engine: ScriptedEngine | None = None
        self._fail = fail

    def policy(self, ids: IntArray, key: RequestKey) -> Message:
        group, slot = (int(part) for part in key.rollout_id.split("/")[2:])
        p: ToyProblem = self.problems[group]
        solving = [call("read", path=p.path), edit(p, p.fault.old, p.fault.new), DONE]
        return solving[key.turn] if slot == 0 else DONE

    @asynccontextmanager
    async def sampler(
        self, config: Config, renderer: ChatRenderer, log: Path, say: object
    ) -> AsyncIterator[Sampler]:
        self.engine = ScriptedEngine(renderer, self.policy, sampled=True, fail=self._fail)

        async def check() -> None:
            return None

        yield Sampler(engine=self.engine, check=check)


def run(
    tmp_path: Path,
    scripted: Scripted,
    *overrides: str,
    resume: bool = False,
    shown: StringIO | None = None,
    **tables: Any,
) -> dict[str, Any]:
    config = load_config(None, [*SETTINGS, f"run.dir={tmp_path / 'run'}", *overrides], tables)
    options = RolloutOptions(sampler=scripted.sampler, resume=tmp_path / "run" if resume else None)
    return dict(asyncio.run(collect_rollouts(config, PlainView(shown or StringIO()), options)))


def test_the_numbers_are_those_of_what_happened(tmp_path: Path) -> None:
    scripted = Scripted()
    summary = run(tmp_path, scripted)
    assert scripted.engine is not None
    sent, answers = scripted.engine.sent, scripted.engine.answers
    assert (summary["rollouts"], summary["graded"], summary["verdict"]["resolved"]) == (6, 6, 3)
    assert summary["pass_at"]["1"]["value"] == 0.5
    assert summary["pass_at"]["2"]["value"] == 1.0
    assert summary["calls"] == len(sent) == 3 * 3 + 3
    assert summary["prompt_tokens"] == sum(len(request.ids) for request in sent)
    assert summary["sampled_tokens"] == sum(len(answer.ids) for answer in answers.values())
    assert summary["ledger"]["trained"] == 0
    assert summary["ledger"]["excluded"] == {"evaluation": summary["ledger"]["captured"]}
    assert summary["cost"] is None
    assert summary["trust"] == {"strong": 6}
    assert summary["masked"] == {}


def test_each_task_set_gives_equally_many_tasks_and_has_a_line(tmp_path: Path) -> None:
    scripted = Scripted()
    scripted.problems = scripted.problems[:2] * 2
    single = {"name": "single", "weight": 0.0, "harness": {"agent": "single_turn"}}
    sets = [{"name": "tools"}, single]
    summary = run(tmp_path, scripted, "rollout.count=4", "harness.mode=fresh", tasks=sets)
    found = summary["sets"]
    assert [(found[name]["agent"], found[name]["tasks"], found[name]["resolved"]) for name in found] == [
        ("script", 2, 2), ("single_turn", 2, 0)
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert [line["task_set"] for line in lines] == ["tools"] * 4 + ["single"] * 4
    assert [line["agent"] for line in lines] == ["script"] * 4 + ["single_turn"] * 4
    assert lines[0]["task_id"] == lines[4]["task_id"]
    report = (tmp_path / "run" / "report.txt").read_text().splitlines()
    assert "  tools: script, 2 of 4 rollouts on 2 tasks resolved, pass@1 0.500, pass@2 1.000" in report
    assert "  single: single_turn, 0 of 4 rollouts on 2 tasks resolved, pass@1 0.000, pass@2 0.000" in report


def test_what_the_infrastructure_failed_is_tried_again_and_never_a_zero(tmp_path: Path) -> None:
    def first_task_fails(key: RequestKey) -> EngineError | None:
        return EngineError("engine on fire") if key.rollout_id.split("/")[2] == "000" else None

    summary = run(tmp_path, Scripted(first_task_fails), "collect.attempts=2")
    assert (summary["rollouts"], summary["graded"], summary["status"]["infra_failed"]) == (6, 4, 2)
    assert summary["tries"] == 4 + 2 * 2
    ((task, masked),) = summary["masked"].items()
    assert masked == 2 * 2
    assert summary["pass_at"]["1"]["tasks"] == 2
    assert "engine on fire" in summary["last_failure"]
    assert "--resume" in (tmp_path / "run" / "report.txt").read_text()
    with read_store(tmp_path / "run") as store:
        graded = {o.rollout_id: o for o in store.outcomes("rollout", 0) if o.reward is not None}
        assert {o.task_id for o in store.outcomes("rollout", 0) if o.reward is None} == {task}
    summary = run(tmp_path, Scripted(), resume=True)
    assert (summary["graded"], summary["pass_at"]["2"]["value"]) == (6, 1.0)
    with read_store(tmp_path / "run") as store:
        held = {o.rollout_id: o for o in store.outcomes("rollout", 0)}
    assert {name: held[name] for name in graded} == graded


class Hung:
    """A try that neither begins nor ends: an engine that answers no call, a pool that gives no worker."""

    scores_groups = False

    def __init__(self, *_: object, **__: object) -> None: ...

    async def run(self, *_: object, **__: object) -> Rollout:
        await asyncio.sleep(30.0)
        raise AssertionError("nobody ended the run")


def test_a_run_in_which_nothing_moves_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.runtime.run.AttemptExecutor", Hung)
    began = time.monotonic()
    with pytest.raises(TrainError, match=r"none was decided for [12] s: 0 rollouts run, 6 wait for a worker"):
        run(tmp_path, Scripted(), "limits.wall_s=0.5", "collect.stall_timeout_s=0.5")
    assert time.monotonic() - began < 20.0


def test_what_a_stopped_run_sampled_is_accounted_for_and_no_failure(tmp_path: Path) -> None:
    async def stopped() -> None:
        this = asyncio.current_task()
        assert this is not None

        def stop(key: RequestKey) -> None:
            if key.rollout_id == "rollout/00000/002/00" and key.turn == 1:
                this.cancel()

        config = load_config(None, [*SETTINGS, f"run.dir={tmp_path / 'run'}"])
        await collect_rollouts(config, PlainView(StringIO()), RolloutOptions(sampler=Scripted(stop).sampler))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stopped())
    with read_store(tmp_path / "run") as store:
        assert store.attempts_by_end()["cancelled"] >= 1
        lost = store.check_balance().tokens.excluded["unused"]
        assert lost > 0
    summary = run(tmp_path, Scripted(), resume=True)
    assert (summary["graded"], summary["masked"], summary["last_failure"]) == (6, {}, "")
    assert summary["ledger"]["excluded"]["unused"] == lost
    with read_store(tmp_path / "run") as store:
        assert {state.state for state in store.open_rollouts()} == set()


def test_a_run_ends_after_as_many_failures_as_configured(tmp_path: Path) -> None:
    broken = Scripted(lambda key: EngineError("engine on fire"))
    with pytest.raises(SandboxError, match="2 attempts in a row failed; the last: .*engine on fire"):
        run(tmp_path, broken, "collect.max_consecutive_failures=2")


def test_other_tasks_than_it_began_with_are_refused(tmp_path: Path) -> None:
    run(tmp_path, Scripted(), "rollout.samples=1")
    with pytest.raises(TaskError, match="the data set has changed since the run began: rollout/0"):
        run(tmp_path, Scripted(), "rollout.samples=1", "rollout.split=train", resume=True)


def test_a_run_is_continued_by_its_own_verb_only(tmp_path: Path) -> None:
    run(tmp_path, Scripted(), "rollout.samples=1")
    config = load_config(None, [*SETTINGS, f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(RecordError, match="holds a run of `insitu rollout`"):
        asyncio.run(run_training(config, PlainView(StringIO()), TrainOptions(resume=tmp_path / "run")))
    with pytest.raises(RecordError, match="holds a run already"):
        run(tmp_path, Scripted())


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("rollout.count=0", ConfigError, "set rollout.count"),
        ("tasks.kinds=['nonsense']", ConfigError, "tasks.kinds"),
    ],
)
def test_a_choice_of_tasks_that_cannot_be(
    tmp_path: Path, override: str, error: type[TaskError | ConfigError], said: str
) -> None:
    with pytest.raises(error, match=said):
        run(tmp_path, Scripted(), override)


DOCKER = """#!/bin/sh
# The command line of a daemon that died after insitu had asked it what it is.
[ "$1" = info ] && { echo '{"OSType": "linux", "MemoryLimit": true, "PidsLimit": true}'; exit; }
echo "Cannot connect to the Docker daemon at unix:///docker.sock. Is the docker daemon running?" >&2
exit 1
"""


@pytest.mark.parametrize("installed", [True, False])
def test_a_fall_back_takes_over_from_docker_that_is_not_there(tmp_path: Path, installed: bool) -> None:
    program = tmp_path / "docker"
    if installed:
        program.write_text(DOCKER)
        program.chmod(0o755)
    shown = StringIO()
    docker = ["sandbox.backend=docker", "sandbox.fallback=local", f"sandbox.program={program}"]
    summary = run(tmp_path, Scripted(), *docker, "sandbox.image=any", shown=shown)
    assert (summary["graded"], summary["verdict"]["resolved"], summary["tries"]) == (6, 3, 6)
    assert summary["ledger"]["excluded"] == {"evaluation": summary["ledger"]["captured"]}
    (line,) = [line for line in shown.getvalue().splitlines() if "sandbox" in line]
    assert "sandboxes come from local" in line
    assert ("daemon does not answer" if installed else "is not installed") in line


def test_without_a_fall_back_docker_that_is_not_there_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no-such-docker is not installed: put docker or podman on PATH"):
        run(
            tmp_path,
            Scripted(),
            "sandbox.backend=docker",
            "sandbox.program=no-such-docker",
            "sandbox.image=a",
        )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["sandbox.backend=docker"],
            "task .* cannot run with sandbox.backend = docker: it has no image",
        ),
        (
            ["sandbox.backend=harbor", "sandbox.environment=e2b"],
            "agents in cloud sandboxes need the gateway's public URL",
        ),
        (
            ["sandbox.fallback=harbor", "sandbox.environment=e2b"],
            "agents in cloud sandboxes need the gateway's public URL",
        ),
    ],
)
def test_what_a_backend_cannot_hold_is_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    scripted = Scripted()
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, scripted, *overrides)
    assert scripted.engine is None


def test_tasks_in_the_other_split_are_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {
            "id": f"t{i}",
            "prompt": f"Fix {i}.",
            "files": {"m.py": f"x = {i}\n"},
            "checks": [{"command": "true"}],
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ["tasks.source=jsonl", f"tasks.path={path}", "tasks.eval_share=0.5", "rollout.count=1"]
    shown = StringIO()
    run(
        tmp_path,
        Scripted(),
        *source,
        "rollout.samples=1",
        "harness.agent=single_turn",
        "harness.mode=fresh",
        shown=shown,
    )
    assert ' of 12 tasks (tasks.eval_share); rollout.split = "train" takes the others' in shown.getvalue()
    assert "eval tasks: " in shown.getvalue()
    assert "held-out" not in shown.getvalue()


def test_a_reward_function_that_raises_on_every_call_ends_the_run_and_is_no_zero(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(rollout):\n    return rollout.no_such_field\n")
    reward = f"reward.function={tmp_path / 'rewards.py'}:score"
    with pytest.raises(TaskError, match=r"rewards.py:score failed 5 times in a row.*no_such_field"):
        run(tmp_path, Scripted(), reward)
    with read_store(tmp_path / "run") as store:
        assert all(outcome.reward is None for outcome in store.outcomes("rollout", 0))


def test_tasks_that_are_judged_weaker_than_asked_for_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"id": "t", "prompt": "Fix.", "files": {"m.py": "x = 1\n"}, "checks": [{"command": "true"}]}
    path.write_text(json.dumps(row) + "\n")
    tasks = ["tasks.source=jsonl", f"tasks.path={path}", "tasks.eval_share=1", "grade.min_trust=strong"]
    scripted = Scripted()
    with pytest.raises(TaskError, match="task t, weak: runner command"):
        run(tmp_path, scripted, *tasks)
    assert scripted.engine is None
