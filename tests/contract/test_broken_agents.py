"""The contract of agents catches broken agents: each fault makes the test that is named fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.agents.base import PLAIN, AgentResult, FinishedCheck, ModelAccess, never_finished
from insitu.agents.single_turn import SingleTurn
from insitu.tasks.user_functions import UserFunction
from insitu.types import FileEntry, Setup, Task
from insitu_lab.open_renderer import open_renderer
from insitu_lab.testing import AgentContract

TESTS = [name for name in dir(AgentContract) if name.startswith("test_")]


def no_files(reply: str, task: Task) -> Mapping[str, str | bytes]:
    return {}


class SoundAgent(SingleTurn):
    """Ask once and change no file; keeps the whole contract."""

    name = "sound"

    def __init__(self) -> None:
        super().__init__(UserFunction("test:no_files", no_files))

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN, gateway_url: str = "") -> Any:
        return Worker(self, super().worker(gateway_socket, setup))

    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        result: AgentResult = await inner.run(task, access)
        return result


class Worker:
    """The worker of an agent, whose run the agent may change."""

    healthy = True

    def __init__(self, agent: SoundAgent, inner: Any) -> None:
        self._agent, self._inner = agent, inner

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def run(
        self, task: Task, access: ModelAccess, finished: FinishedCheck = never_finished
    ) -> AgentResult:
        return await self._agent.run(self._inner, task, access)


class AsksNothing(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        return AgentResult(exit="finished", tree=task.files)


class Fails(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        return replace(await super().run(inner, task, access), exit="failed")


class ChangesAFile(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        result = await super().run(inner, task, access)
        return replace(result, tree={**result.tree, "app.py": FileEntry(content=b"")})


class ForgetsThePrompt(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        return await super().run(inner, replace(task, prompt="Do something."), access)


class HidesATimeout(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        return replace(await super().run(inner, task, access), exit="finished")


class LosesTheFilesAtATimeout(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        result = await super().run(inner, task, access)
        return replace(
            result, tree={"app.py": FileEntry(content=b"")} if result.exit == "timeout" else result.tree
        )


class LogsTheSecret(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        return replace(await super().run(inner, task, access), log=f"key={access.secret}".encode())


class NamesTheSecret(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        return replace(await super().run(inner, task, access), detail=f"key={access.secret}")


class KeepsTheSecret(SoundAgent):
    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        return replace(await super().run(inner, task, access), artifacts={"env": access.secret.encode()})


class SharesAPrompt(SoundAgent):
    """Ask with the prompts of all runs so far."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    async def run(self, inner: Any, task: Task, access: ModelAccess) -> AgentResult:
        self.prompts.append(task.prompt)
        return await super().run(inner, replace(task, prompt="\n".join(self.prompts)), access)


async def failed_tests(agent: SoundAgent, folder: Path, names: list[str]) -> set[str]:
    """Return the names of the agent contract's tests that fail."""
    found = set()
    for name in names:
        try:
            await getattr(AgentContract(), name)(agent, open_renderer(folder / name))
        except AssertionError:
            found.add(name)
    return found


@pytest.mark.slow
async def test_a_sound_agent_passes(tmp_path: Path) -> None:
    assert await failed_tests(SoundAgent(), tmp_path, TESTS) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "caught"),
    [
        (AsksNothing, "test_a_run_ends_by_itself"),
        (AsksNothing, "test_every_token_is_in_the_ledger"),
        (Fails, "test_a_run_ends_by_itself"),
        (ChangesAFile, "test_a_run_ends_by_itself"),
        (ForgetsThePrompt, "test_the_prompt_reaches_the_model"),
        (HidesATimeout, "test_a_timeout_stops_the_agent"),
        (LosesTheFilesAtATimeout, "test_a_timeout_stops_the_agent"),
        (LogsTheSecret, "test_the_secret_is_in_no_log_or_artifact"),
        (NamesTheSecret, "test_the_secret_is_in_no_log_or_artifact"),
        (KeepsTheSecret, "test_the_secret_is_in_no_log_or_artifact"),
        (SharesAPrompt, "test_concurrent_runs_do_not_mix"),
        (Fails, "test_concurrent_runs_do_not_mix"),
    ],
)
async def test_a_broken_agent_is_caught(agent: type[SoundAgent], caught: str, tmp_path: Path) -> None:
    assert await failed_tests(agent(), tmp_path, [caught]) == {caught}


def test_each_test_of_the_contract_catches_something() -> None:
    (mark,) = [mark for mark in test_a_broken_agent_is_caught.pytestmark if mark.name == "parametrize"]
    assert {caught for _, caught in mark.args[1]} == set(TESTS)
