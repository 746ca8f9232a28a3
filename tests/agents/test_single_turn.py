"""The harness without an agent: what it asks, what it takes from the reply, and how it fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.agents.base import AgentResult, ModelAccess
from insitu.agents.single_turn import BuildAction, SingleTurn, code_of, code_to_file, target
from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.errors import EngineUnavailable, GradeError, HarnessError, TaskError
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.tasks.user_functions import UserFunction
from insitu.types import FileEntry, GradingPlan, Limits, Message, RequestKey, Setup, Task, Trajectory
from insitu_train.demo.make_warm_start import write_renderer
from insitu_train.demo.scripted import ScriptedEngine

BASE = {"solution.py": FileEntry(content=b"def f():\n    pass\n"), "notes.txt": FileEntry(content=b"keep\n")}
TASK = Task(
    id="t", prompt="Write f.", files=BASE, grading=GradingPlan(entry="solution.py"), limits=Limits(wall_s=20)
)


@pytest.fixture
def renderer(tmp_path: Path) -> TemplateRenderer:
    write_renderer(tmp_path / "family", "")
    return template_renderer(read_folder(tmp_path / "family"))


@asynccontextmanager
async def asked(
    engine: ScriptedEngine,
    renderer: TemplateRenderer,
    socket: Path,
    task: Task,
    build: BuildAction | None = None,
    session_wall_s: float = 20,
) -> AsyncIterator[tuple[AgentResult, Trajectory]]:
    limits = task.limits.changed(wall_s=session_wall_s)
    async with Gateway(TokenBackend(engine, renderer)) as gateway, gateway.listen_unix(socket):
        session = gateway.open_session("r", seed=0, limits=limits, listener=socket)
        access = ModelAccess(public_id=session.public_id, secret=session.secret)
        mine = None if build is None else UserFunction("tasks.parse_answer mine:build", build)
        async with SingleTurn(mine).worker(socket) as worker:
            assert worker.healthy
            result = await worker.run(task, access)
        yield result, await session.seal(5)


def saying(renderer: TemplateRenderer, text: str, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(
        renderer, lambda ids, key: Message(role="assistant", text=text), sampled=True, **options
    )


async def test_one_reply_becomes_the_file_under_test_and_every_token_is_kept(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    engine = saying(renderer, "Here:\n```python\ndef f():\n    return 1\n```\nDone.")
    async with asked(engine, renderer, tmp_path / "s", TASK) as (result, trajectory):
        assert (result.exit, result.detail) == ("finished", "")
        assert result.tree == {**BASE, "solution.py": FileEntry(content=b"def f():\n    return 1\n")}
        assert b"Done." in result.log
    (sent,) = engine.sent
    assert "Write f." in renderer.decode(sent.ids)
    assert trajectory.ledger.trained == trajectory.ledger.captured == len(engine.answers[sent.key].ids)


async def test_the_users_function_makes_the_files(tmp_path: Path, renderer: TemplateRenderer) -> None:
    def build(reply: str, task: Task) -> Mapping[str, str | bytes]:
        return {"a/b.txt": reply.upper(), "raw.bin": b"\x00\x01", "notes.txt": task.prompt}

    async with asked(saying(renderer, "yes"), renderer, tmp_path / "s", TASK, build) as (result, _):
        assert result.tree["a/b.txt"].content == b"YES"
        assert result.tree["raw.bin"].content == b"\x00\x01"
        assert result.tree["notes.txt"].content == b"Write f."
        assert result.tree["solution.py"] == BASE["solution.py"]


async def test_a_reply_of_no_use_leaves_the_tasks_own_files(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    def refuse(reply: str, task: Task) -> Mapping[str, str | bytes]:
        raise ValueError("no function f in it")

    async with asked(saying(renderer, "hm"), renderer, tmp_path / "s", TASK, refuse) as (result, _):
        assert (result.exit, result.tree) == ("failed", BASE)
        assert result.detail == "the reply cannot be used: no function f in it"
    async with asked(saying(renderer, "```python\n\n```"), renderer, tmp_path / "s2", TASK) as (result, _):
        assert (result.exit, result.tree) == ("failed", BASE)


async def test_a_reply_that_is_not_in_the_functions_format_is_the_models_fault(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    def strict(reply: str, task: Task) -> Mapping[str, str | bytes]:
        return {"x": json.loads(reply)["missing"]}

    async with asked(saying(renderer, "hm"), renderer, tmp_path / "s", TASK, strict) as (result, _):
        assert (result.exit, result.tree) == ("failed", BASE)
        assert result.detail == "the reply cannot be used: Expecting value: line 1 column 1 (char 0)"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("{}", r"raised KeyError\('missing'\) \(test_single_turn.py line \d+\)"),
        ('{"missing": 5}', "returned content of type int, not str or bytes"),
        ("[]", r"raised TypeError\('list indices must be integers or slices, not str'\)"),
    ],
)
async def test_a_users_function_that_raises_is_no_failure_of_the_model(
    tmp_path: Path, renderer: TemplateRenderer, reply: str, said: str
) -> None:
    def buggy(reply: str, task: Task) -> Mapping[str, str | bytes]:
        return {"x": json.loads(reply)["missing"]}

    with pytest.raises(GradeError, match=f"^tasks.parse_answer mine:build {said}"):
        async with asked(saying(renderer, reply), renderer, tmp_path / "s", TASK, buggy):
            pass


async def test_a_model_that_takes_too_long_is_timed_out(tmp_path: Path, renderer: TemplateRenderer) -> None:
    task = replace(TASK, limits=Limits(wall_s=0.3))
    async with asked(saying(renderer, "late", delay_s=30), renderer, tmp_path / "s", task) as (result, _):
        assert (result.exit, result.tree) == ("timeout", BASE)


async def test_the_gateways_reply_at_the_end_of_the_budget_is_not_taken_for_code(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    late = saying(renderer, "late", delay_s=30)
    async with asked(late, renderer, tmp_path / "s", TASK, session_wall_s=0.3) as (result, _):
        assert (result.exit, result.tree) == ("failed", BASE)
        assert result.detail == "the session's budget was used up before the model answered"


async def test_a_prompt_that_does_not_fit_fails_and_an_engine_that_comes_back_does_not(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    small = replace(TASK, limits=Limits(wall_s=20, max_context_tokens=8, max_call_tokens=4))
    async with asked(saying(renderer, "x"), renderer, tmp_path / "s", small) as (result, _):
        assert result.exit == "failed"
        assert "HTTP 4" in result.detail
    failures = [EngineUnavailable("restarting")]

    def fail(key: RequestKey) -> EngineUnavailable | None:
        return failures.pop() if failures else None

    engine = saying(renderer, "```\nok\n```", fail=fail)
    async with asked(engine, renderer, tmp_path / "s2", TASK) as (result, _):
        assert result.exit == "finished"
        assert len(engine.sent) == 2


async def test_a_gateway_that_is_gone_is_the_hosts_failure(tmp_path: Path) -> None:
    async with SingleTurn().worker(tmp_path / "nothing") as worker:
        with pytest.raises(HarnessError, match="the gateway cannot be reached"):
            await worker.run(TASK, ModelAccess(public_id="x", secret="y"))


def test_a_task_that_lies_in_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no sandbox"):
        SingleTurn().worker(tmp_path / "s", Setup(image="debian@sha256:0"))


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("x = 1\n", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nthen\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nrun it:\n```bash\npython x.py\n```", "x = 1\n"),
        ("```bash\nls\n```\n```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("~~~python\nx = '```'\n~~~", "x = '```'\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```Python title=a.py\r\nx = 1\r\n```", "x = 1\r\n"),
        ("  ```python\nx = 1\n  ```", "x = 1\n"),
    ],
)
def test_what_of_a_reply_is_code(reply: str, code: str) -> None:
    assert code_of(reply, ("python", "py")) == code


def test_where_a_reply_goes() -> None:
    plain = replace(TASK, grading=GradingPlan())
    assert target(TASK) == "solution.py"
    assert (
        target(replace(plain, files={"m.py": FileEntry(content=b""), "r.txt": FileEntry(content=b"")}))
        == "m.py"
    )
    assert target(replace(plain, files={})) == "solution.py"
    julia = replace(TASK, grading=GradingPlan(entry="s.jl"))
    reply = "```python\nx\n```\n```julia\ny\n```\n```python\nz\n```"
    assert code_to_file(reply, julia) == {"s.jl": "y\n"}
