"""One attempt for real: sandbox, agent, gateway, forest, diff, second sandbox, verdict. The engine is
scripted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from insitu.attempt import AttemptExecutor, AttemptSpec
from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.config import Config, load_config
from insitu.errors import EngineError
from insitu.gateway.token_backend import TokenBackend
from insitu.gateway.tool_hooks import BLOCKED
from insitu.runtime.agents import AgentSetup, limits_of
from insitu.runtime.run import open_runtime
from insitu.runtime.sandboxes import make_pool
from insitu.tasks.toy import ToyProblem, ToySource
from insitu.types import IntArray, Message, Outcome, RequestKey, Rollout, Status, Task, Tree, Verdict
from insitu_train.demo.demonstrator import call, edit
from insitu_train.demo.make_warm_start import write_renderer
from insitu_train.demo.scripted import ScriptedEngine
from tests.fakes.agents import command_harness

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Stage:
    """Everything but the policy."""

    config: Config
    renderer: TemplateRenderer
    source: ToySource

    @property
    def task(self) -> Task:
        return self.source.tasks("train", 0, 1)[0]

    @property
    def problem(self) -> ToyProblem:
        return self.source.problem(self.task)

    @contextlib.asynccontextmanager
    async def attempts(self, engine: ScriptedEngine) -> AsyncIterator[AttemptExecutor]:
        backend = TokenBackend(engine, self.renderer)
        async with open_runtime(self.config, backend, self.source) as runtime:
            yield AttemptExecutor(runtime.gateway, runtime.workers, runtime.judge)

    async def run(self, script: list[Message], **changes: object) -> tuple[Rollout, ScriptedEngine]:
        engine = ScriptedEngine(self.renderer, playing(script), sampled=True)
        spec = AttemptSpec(rollout_id="train/00001/000/00", task=self.task, seed=1)
        async with self.attempts(engine) as attempts:
            return await attempts.run(replace(spec, **changes)), engine  # type: ignore[arg-type]


def playing(script: list[Message]) -> Callable[[IntArray, RequestKey], Message]:
    return lambda ids, key: script[min(key.turn, len(script) - 1)]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    config = load_config(
        None,
        [
            "harness.agent=script",
            "harness.mode=warm",
            "harness.workers=2",
            "limits.wall_s=20",
            "limits.max_call_tokens=512",
            "model.max_context_tokens=16384",
        ],
    )
    write_renderer(tmp_path / "family", "")
    return Stage(
        config,
        template_renderer(read_folder(tmp_path / "family")),
        ToySource(limits_of(config)),
    )


DONE = Message(role="assistant", text="done")


async def test_a_right_edit_is_resolved_and_every_token_kept(stage: Stage) -> None:
    p = stage.problem
    rollout, engine = await stage.run([call("read", path=p.path), edit(p, p.fault.old, p.fault.new), DONE])
    assert (rollout.status, rollout.reward) == (Status.OK, 1.0)
    assert rollout.verdict is not None
    assert rollout.verdict.outcome is Outcome.RESOLVED
    assert rollout.verdict.trust == "strong"
    assert rollout.changed[p.path].content.decode() == p.text(solved=True)
    (segment,) = rollout.trajectory.segments
    assert len(engine.sent) == 3
    for sent in engine.sent:
        assert (segment.ids[: len(sent.ids)] == sent.ids).all()
    ledger = rollout.trajectory.ledger
    assert ledger.balanced
    assert ledger.trained == ledger.captured == int(segment.mask.sum())
    assert rollout.timings.agent_s > 0
    assert rollout.timings.grade_s > 0
    assert rollout.egress_attempts == 0


async def test_an_answer_ends_the_rollout_and_is_graded(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(
        '[{"name": "answer", "ends": true, "parameters": {"type": "object", "required": ["text"]}}]'
    )
    own = load_config(
        None, {"gateway.tools": f"{tmp_path}/tools.json"}, stage.config.model_dump(exclude_unset=True)
    )
    p = stage.problem
    script = [edit(p, p.fault.old, p.fault.new), call("answer"), call("answer", text="fixed"), DONE]
    rollout, engine = await replace(stage, config=own).run(script)
    assert (rollout.status, rollout.reward, len(engine.sent)) == (Status.OK, 1.0, 3)
    ledger = rollout.trajectory.ledger
    assert ledger.balanced
    assert ledger.trained == ledger.captured > 0


async def test_a_blocked_call_does_not_run_and_the_rollout_goes_on(stage: Stage, tmp_path: Path) -> None:
    hook = {"gateway.tools": "examples/own/guard.py:guard"}
    own = load_config(None, hook, stage.config.model_dump(exclude_unset=True))
    p = stage.problem
    push = call("bash", command="echo pushed > pushed.txt; git push")
    key = call("bash", command="echo sk-0123456789")
    rollout, engine = await replace(stage, config=own).run(
        [push, key, edit(p, p.fault.old, p.fault.new), DONE]
    )
    assert (rollout.status, rollout.reward, len(engine.sent)) == (Status.OK, 1.0, 4)
    assert "pushed.txt" not in rollout.changed
    first, _, third, _ = rollout.turns
    assert first.labels == {BLOCKED}
    assert ("hook", "rewrote bash") in third.hints
    assert rollout.trajectory.ledger.trained == rollout.trajectory.ledger.captured > 0


async def test_a_wrong_edit_and_no_edit_earn_nothing(stage: Stage) -> None:
    p = stage.problem
    wrong, _ = await stage.run([edit(p, p.fault.old, "0"), DONE])
    idle, _ = await stage.run([DONE])
    for rollout in (wrong, idle):
        assert (rollout.status, rollout.reward) == (Status.OK, 0.0)
        assert rollout.verdict is not None
        assert rollout.verdict.outcome is Outcome.UNRESOLVED


async def test_editing_the_visible_check_earns_nothing_and_is_recorded(stage: Stage) -> None:
    p = stage.problem
    cheat = call("bash", command="echo 'print(\"pass\")' > check.py")
    rollout, _ = await stage.run([cheat, DONE])
    assert rollout.reward == 0.0
    assert rollout.verdict is not None
    assert rollout.verdict.dropped_paths == ("check.py",)
    honest, _ = await stage.run([cheat, edit(p, p.fault.old, p.fault.new), DONE])
    assert honest.reward == 1.0


async def test_evaluation_tokens_are_never_trained(stage: Stage) -> None:
    rollout, _ = await stage.run([DONE], evaluation=True)
    ledger = rollout.trajectory.ledger
    assert ledger.trained == 0
    assert ledger.excluded == {"evaluation": ledger.captured}


async def test_an_agent_that_never_stops_is_truncated_and_graded(stage: Stage) -> None:
    p = stage.problem
    rollout, engine = await stage.run([edit(p, p.fault.old, p.fault.new), call("read", path=p.path)])
    assert (rollout.status, rollout.reward) == (Status.TRUNCATED, 1.0)
    assert len(engine.sent) == stage.config.limits.max_calls


async def test_an_engine_failure_is_unscorable_and_in_the_ledger(stage: Stage) -> None:
    engine = ScriptedEngine(
        stage.renderer,
        playing([call("read", path=stage.problem.path)]),
        sampled=True,
        fail=lambda key: EngineError("engine on fire") if key.turn == 1 else None,
    )
    async with stage.attempts(engine) as attempts:
        rollout = await attempts.run(AttemptSpec(rollout_id="train/00001/000/00", task=stage.task, seed=1))
    assert (rollout.status, rollout.reward) == (Status.INFRA_FAILED, None)
    assert "engine on fire" in rollout.error
    ledger = rollout.trajectory.ledger
    assert ledger.captured > 0
    assert ledger.excluded == {"infra": ledger.captured}


async def test_the_secret_of_a_rollout_dies_with_it(stage: Stage) -> None:
    """A worker is used twice; both rollouts are served, each with a secret of its own."""
    secrets: set[str] = set()
    p = stage.problem
    leak = call("bash", command="echo $OPENAI_API_KEY > key.txt")
    engine = ScriptedEngine(stage.renderer, playing([leak, DONE]), sampled=True)
    async with stage.attempts(engine) as attempts:
        for slot in range(3):
            spec = AttemptSpec(rollout_id=f"train/00001/000/0{slot}", task=stage.task, seed=1)
            rollout = await attempts.run(spec)
            secrets.add(rollout.changed["key.txt"].content.decode())
    assert len(secrets) == 3
    assert p.path not in rollout.changed


SENDS = """
import os, urllib.request
for key, body in {sent!r}:
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode())
    request.add_header("Authorization", "Bearer " + (key or os.environ["OPENAI_API_KEY"]))
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
"""An agent that sends each of these (key, body); an empty key is the one it was given."""


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ("import time; time.sleep(60)", "the agent never called the model: stopped after 2 s"),
        ("", "the agent never called the model: exit code 127: no-such-agent: No such file or directory"),
        (
            "raise SystemExit('no route to the model')",
            "the agent never called the model: exit code 1: no route to the model",
        ),
        ("print('nothing to do')", "the agent never called the model: it ended without an error"),
        (
            SENDS.format(sent=[("sk-of-somebody", "{}")] * 2),
            "the gateway refused all 2 requests of the agent (HTTP 401: Incorrect API key provided.): it"
            " ended without an error",
        ),
        (
            SENDS.format(sent=[("sk-of-somebody", "{}"), ("", "[]")]),
            "the gateway refused all 2 requests of the agent (HTTP 400: The request body must be a JSON"
            " object.): it ended without an error",
        ),
    ],
)
async def test_an_agent_that_never_calls_the_model_is_not_graded(stage: Stage, agent: str, why: str) -> None:
    engine = ScriptedEngine(stage.renderer, playing([DONE]), sampled=True)
    pool = make_pool(stage.config)
    words = ("python3", "-c", agent) if agent else ("no-such-agent",)
    setup = AgentSetup(config=stage.config, pool=pool, harness=command_harness(words, pool))
    task = replace(stage.task, limits=stage.task.limits.changed(wall_s=2.0))

    async def judge(task: Task, tree: Tree) -> Verdict:
        raise AssertionError("graded")

    backend = TokenBackend(engine, stage.renderer)
    async with open_runtime(stage.config, backend, stage.source, {"": setup}) as runtime:
        attempts = AttemptExecutor(runtime.gateway, runtime.workers, judge)
        rollout = await attempts.run(AttemptSpec(rollout_id="train/00001/000/00", task=task, seed=1))
    assert (rollout.status, rollout.reward) == (Status.INFRA_FAILED, None)
    assert rollout.error == why
