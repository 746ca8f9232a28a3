"""Tasks and rewards of verifiers and OpenEnv, with stand-ins; tests/bridges has the real packages."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError

import pytest
from environments import check_openenv, check_verifiers, rows, taskset

from insitu.errors import ConfigError, TaskError
from insitu.grading.trust import trust_of
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.objects import location
from insitu_tasksets import openenv
from tests.fakes.environments_sdk import ROUTES, openenv_sdk, serve_guess, verifiers_sdk


@pytest.fixture
def sdks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in {**verifiers_sdk(), **openenv_sdk()}.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("sdks")
def test_a_taskset_of_verifiers_is_a_source_with_its_own_rewards(tmp_path: Path) -> None:
    check_verifiers(tmp_path)


@pytest.mark.usefixtures("sdks")
def test_a_server_of_openenv_is_a_source_with_its_own_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_guess() as url:
        check_openenv(url, tmp_path)
        monkeypatch.delitem(ROUTES, "/guess/splits")
        with pytest.raises(
            TaskError, match="501.*without the Task API needs a TOML file with url and resets"
        ):
            rows("openenv", url)
        monkeypatch.setitem(ROUTES, "/schema", {"action": {"title": "CallToolAction"}})
        (tmp_path / "tools.toml").write_text(
            f'url = "{url}"\nprompt = "Play."\nresets = [{{split = "train", index = 2}}]\n'
        )
        source = rows("openenv", str(tmp_path / "tools.toml"))
        [item] = source.every()
        row = source.row(item.task)
        assert item.task.prompt.startswith("Play.\n\n")
        assert "guess" not in item.task.prompt  # its tools are offered as tools

    own = openenv.OpenEnv().build({**row, "prompt": "Mine."}, location(row, 1), LoadOptions(untested=True))
    assert own.task.prompt.startswith("Mine.")
    assert "observation" not in own.task.prompt  # a prompt of tasks.transform stands for itself

    async def act() -> tuple[list[str], str, object]:
        async with openenv.reward.environment(row) as environment:  # type: ignore[attr-defined]
            nothing = environment.earned
            seen = await environment.call("guess", {"number": 3})
            return [tool.name for tool in environment.tools], seen, (nothing, environment.earned)

    assert asyncio.run(act()) == (["guess"], "Higher.", (0, -0.1))


@pytest.mark.usefixtures("sdks")
def test_the_trust_of_a_reward_depends_on_where_it_is_made(tmp_path: Path) -> None:
    with taskset(tmp_path, "trusted_of_a_test") as name, serve_guess() as url:
        for source, path, trust in (("verifiers", name, "standard"), ("openenv", url, "weak")):
            item = next(rows(source, path).every())
            assert trust_of(item.task, item.oracle) == (trust, "the reward function decides")


@pytest.mark.parametrize("source", ["verifiers", "openenv"])
def test_a_missing_package_is_named(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1", "openenv"):
        monkeypatch.setitem(sys.modules, name, None)
    with serve_guess() as url, pytest.raises(ConfigError, match=f"{source} is not installed: "):
        rows(source, url)


def test_an_answer_that_is_an_error_is_closed() -> None:
    with serve_guess() as url, pytest.raises(TaskError, match=f"^read {url}/none: HTTP Error") as caught:
        openenv._http(f"{url}/none")
    answer = caught.value.__cause__
    assert isinstance(answer, HTTPError)
    assert answer.closed


def test_an_openenv_without_the_client_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    with pytest.raises(
        ConfigError, match=r"^openenv: module 'openenv' has no attribute 'GenericEnvClient'; op"
    ):
        openenv._client("http://127.0.0.1:1")
