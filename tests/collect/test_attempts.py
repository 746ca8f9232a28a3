"""One attempt against a real gateway, with an agent in this process: what is kept of attempts that fail."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import pytest

from insitu.agents.base import AgentResult, FinishedCheck, ModelAccess
from insitu.agents.pool import Sockets, WorkerPool
from insitu.attempt import AttemptExecutor, AttemptSpec, Judge
from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.config import load_config
from insitu.errors import HarnessError, SandboxLost
from insitu.gateway.host_tools import HostTool
from insitu.gateway.request import GatewayConfig
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.verdict import NOTHING_CHANGED
from insitu.runtime.agents import limits_of
from insitu.runtime.run import open_runtime
from insitu.storage.logs import AgentLogs
from insitu.tasks.toy import ToySource
from insitu.types import FileEntry, Limits, Message, Outcome, Rollout, Setup, Status, Task, Tree, Verdict
from insitu_train.demo.demonstrator import call
from insitu_train.demo.make_warm_start import write_renderer
from insitu_train.demo.scripted import ScriptedEngine

TASK = ToySource(Limits()).tasks("train", 0, 1)[0]
SPEC = AttemptSpec(rollout_id="train/00001/000/00", task=TASK, seed=1)
End = Callable[[Task], AgentResult]


@dataclass
class Agent:
    """A harness and its only worker: asks the model once, then ends as the test says."""

    gateway_socket: Path
    end: End
    name: str = "inside"
    version: str = "1"
    healthy: bool = True
    tools: tuple[str, ...] = ()

    def worker(self, gateway_socket: Path, setup: Setup, gateway_url: str = "") -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def run(self, task: Task, access: ModelAccess, finished: FinishedCheck) -> AgentResult:
        body: dict[str, object] = {"messages": [{"role": "user", "content": task.prompt}]}
        if self.tools:
            body["tools"] = [{"type": "function", "function": {"name": name}} for name in self.tools]
        url = f"http://gateway/s/{access.public_id}/v1/chat/completions"
        connector = aiohttp.UnixConnector(str(self.gateway_socket))
        async with aiohttp.ClientSession(connector=connector) as http:
            key = {"Authorization": f"Bearer {access.secret}"}
            async with http.post(url, json=body, headers=key) as response:
                assert response.status == 200, await response.text()
        return self.end(task)


async def unresolved(task: Task, tree: Tree) -> Verdict:
    return Verdict(outcome=Outcome.UNRESOLVED, reward=0.0, trust="strong")


@pytest.fixture
def renderer(tmp_path: Path) -> TemplateRenderer:
    write_renderer(tmp_path / "family", "")
    return template_renderer(read_folder(tmp_path / "family"))


DONE = Message(role="assistant", text="done")


def scripted(renderer: TemplateRenderer, said: Message = DONE) -> ScriptedEngine:
    return ScriptedEngine(renderer, lambda ids, key: said, sampled=True)


@asynccontextmanager
async def attempts(
    renderer: TemplateRenderer,
    tmp_path: Path,
    end: End,
    judge: Judge = unresolved,
    *,
    said: Message = DONE,
    tools: tuple[HostTool, ...] = (),
) -> AsyncIterator[AttemptExecutor]:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            Gateway(TokenBackend(scripted(renderer, said), renderer), GatewayConfig(tools=tools))
        )
        await stack.enter_async_context(gateway.listen_unix(tmp_path / "g"))
        agent = Agent(tmp_path / "g", end, tools=("own",) if tools else ())
        pool = await stack.enter_async_context(WorkerPool(agent, 1, Sockets([tmp_path / "g"])))
        (tmp_path / "logs").mkdir()
        keep = AgentLogs(tmp_path / "logs").keep
        yield AttemptExecutor(gateway, pool, judge, keep_log=keep, ending=lambda turns: f"{len(turns)} turns")


async def run(renderer: TemplateRenderer, tmp_path: Path, end: End) -> Rollout:
    async with attempts(renderer, tmp_path, end) as under_test:
        return await under_test.run(SPEC)


@pytest.mark.parametrize("error", [SandboxLost("the sandbox vanished"), HarnessError("no answer")])
async def test_tokens_of_an_attempt_that_raises_stay_in_the_ledger(
    renderer: TemplateRenderer, tmp_path: Path, error: Exception
) -> None:
    def end(task: Task) -> AgentResult:
        raise error

    rollout = await run(renderer, tmp_path, end)
    assert (rollout.status, rollout.error) == (Status.INFRA_FAILED, str(error))
    ledger = rollout.trajectory.ledger
    assert ledger.captured > 0
    assert ledger.excluded == {"infra": ledger.captured}
    assert len(rollout.trajectory.turns) == 1
    log = tmp_path / "logs" / "train-00001-000-00.log"
    assert log.read_text() == f"--- attempt 1: infra_failed {error}\n\n"


@pytest.mark.parametrize("reward", [math.nan, math.inf, -0.5, 7.0, None])
async def test_a_reward_that_can_be_none_is_a_failure_of_the_grader_and_not_a_zero(
    renderer: TemplateRenderer, tmp_path: Path, reward: float | None
) -> None:
    async def judge(task: Task, tree: Tree) -> Verdict:
        return Verdict(outcome=Outcome.UNRESOLVED, reward=reward, trust="strong")

    def end(task: Task) -> AgentResult:
        return AgentResult(exit="finished", tree=task.files)

    async with attempts(renderer, tmp_path, end, judge) as under_test:
        rollout = await under_test.run(SPEC)
    assert (rollout.status, rollout.reward) == (Status.INFRA_FAILED, None)
    assert rollout.error == f"the grader returned reward {reward}, expected a number from 0 to 1"
    assert rollout.trajectory.ledger.excluded == {"infra": rollout.trajectory.ledger.captured}


async def test_what_the_judge_refuses_is_not_kept(renderer: TemplateRenderer, tmp_path: Path) -> None:
    def end(task: Task) -> AgentResult:
        junk = {"junk.bin": FileEntry(content=bytes(6 << 20))}
        return AgentResult(exit="finished", tree={**task.files, **junk})

    rollout = await run(renderer, tmp_path, end)
    assert (rollout.status, rollout.changed, rollout.deleted) == (Status.OK, {}, ())


async def test_only_what_the_judge_saw_is_kept(renderer: TemplateRenderer, tmp_path: Path) -> None:
    def end(task: Task) -> AgentResult:
        added = {name: FileEntry(content=b"x = 1\n") for name in ("note.py", "a.pyc", "conftest.py")}
        return AgentResult(exit="finished", tree={**task.files, **added})

    assert list((await run(renderer, tmp_path, end)).changed) == ["note.py"]


async def test_the_log_of_a_failed_agent_is_kept_and_that_of_a_good_one_is_not(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    results = [
        AgentResult(exit="failed", tree=TASK.files, detail="exit code 3", log=b"Traceback: boom"),
        AgentResult(exit="finished", tree=TASK.files, log=b"all is well"),
    ]
    async with attempts(renderer, tmp_path, lambda task: results.pop(0)) as under_test:
        await under_test.run(SPEC)
        await under_test.run(AttemptSpec(rollout_id="train/00001/000/01", task=TASK, seed=1))
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name == "train-00001-000-00.log"
    assert log.read_text() == "--- attempt 1: agent_failed exit code 3\nTraceback: boom\n"


async def test_an_agent_that_fails_after_its_answer_has_ended_well(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    def end(task: Task) -> AgentResult:
        return AgentResult(exit="failed", tree=task.files, detail="the provider closed the session")

    for name, status in (("other", Status.AGENT_FAILED), ("answer", Status.OK)):
        (tmp_path / name).mkdir()
        ends = HostTool(name=name, description="", parameters={"type": "object"}, ends=name == "answer")
        async with attempts(renderer, tmp_path / name, end, said=call(name), tools=(ends,)) as under_test:
            assert (await under_test.run(SPEC)).status is status


@pytest.mark.slow
async def test_the_operators_port_serves_the_session_of_a_sandbox(renderer: TemplateRenderer) -> None:
    """A call by hand with the session's secret, on the address of `gateway.listen`."""
    config = load_config(None, ["harness.agent=script", "harness.workers=1", f"gateway.listen={free_port()}"])
    async with (
        open_runtime(config, TokenBackend(scripted(renderer), renderer), ToySource(Limits())) as runtime,
        runtime.workers.lease() as worker,
        aiohttp.ClientSession() as http,
    ):
        session = runtime.gateway.open_session(
            "r", seed=1, limits=limits_of(config), listener=worker.gateway_socket
        )
        url = f"http://127.0.0.1:{config.gateway.listen}/s/{session.public_id}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hello"}]}
        for secret, status in ((session.secret, 200), ("wrong", 401)):
            key = {"Authorization": f"Bearer {secret}"}
            async with http.post(url, json=body, headers=key) as response:
                assert response.status == status


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize("reason", [NOTHING_CHANGED, f"{NOTHING_CHANGED}: 1 of 2 cases pass"])
async def test_the_verdict_on_an_unchanged_tree_says_how_the_rollout_ended(
    renderer: TemplateRenderer, tmp_path: Path, reason: str
) -> None:
    async def judge(task: Task, tree: Tree) -> Verdict:
        return Verdict(outcome=Outcome.UNRESOLVED, reward=0.0, trust="strong", reason=reason)

    def end(task: Task) -> AgentResult:
        return AgentResult(exit="finished", tree=task.files)

    async with attempts(renderer, tmp_path, end, judge) as under_test:
        rollout = await under_test.run(SPEC)
    assert rollout.verdict is not None
    assert rollout.verdict.reason == f"{reason}; 1 turns"
