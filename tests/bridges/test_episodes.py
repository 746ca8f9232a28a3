"""Episodes of a terminal, which OpenEnv environments serve, in real sandboxes; and the packages in envs/."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, TaskError
from insitu.types import Task
from insitu_bridges.openenv.episodes import Episodes, Graded
from insitu_bridges.openenv.settings import ServerSettings
from insitu_bridges.openenv.tasks import EpisodeTasks, described

ROOT = Path(__file__).parents[2]
PACKAGES = ("insitu_env", "terminus_env", "mini_swe_env")
FIX = (ROOT / "envs" / "insitu_env" / "validation" / "oracle.sh").read_text()


@pytest.fixture(scope="module")
def episodes() -> Iterator[Episodes]:
    found = Episodes(load_config())
    try:
        yield found
    finally:
        found.close()


async def played(episodes: Episodes, task: Task, *work: str) -> tuple[list[str], Graded]:
    episode = await episodes.open(task)
    try:
        said = [(await episode.run(command, 20.0)).text for command in work]
        return said, await episode.grade()
    finally:
        await episode.close()


def test_a_task_of_several_steps_is_no_episode() -> None:
    settings = ["tasks.source=harbor", f"tasks.path={ROOT}/examples/steps", "sandbox.backend=docker"]
    with pytest.raises(ConfigError, match="task stock has several steps, and an episode is one"):
        Episodes(load_config(None, settings))


@pytest.mark.slow
def test_an_episode_is_graded_after_its_sandbox_has_ended(episodes: Episodes) -> None:
    task = episodes.tasks.at("eval", 0)
    said, solved = episodes.call(played(episodes, task, "ls", FIX))
    assert (said[0], solved.reward, solved.outcome) == ("check.py\nyard.py\n", 1.0, "resolved")
    _, untouched = episodes.call(played(episodes, task, "echo 1.0 > reward.txt"))
    assert (untouched.reward, untouched.outcome) == (0.0, "unresolved")


@pytest.mark.slow
def test_an_agent_that_ends_its_sandbox_is_graded(episodes: Episodes) -> None:
    _, graded = episodes.call(played(episodes, episodes.tasks.at("eval", 0), "kill -9 -1; rm -rf *"))
    assert graded.reward == 0.0


@pytest.mark.slow
def test_a_command_has_a_deadline_and_a_limit_of_output(episodes: Episodes) -> None:
    async def run() -> list[str]:
        episode = await episodes.open(episodes.tasks.at("eval", 0))
        try:
            late = await episode.run("echo a; sleep 60", 0.5)
            long = await episode.run("head -c 1000000 /dev/zero | tr '\\0' x", 20.0)
            assert late.timed_out
            return [late.text, long.text]
        finally:
            await episode.close()

    late, long = episodes.call(run())
    assert late == "a\n\n(stopped after 0.5 s)"
    assert len(long) < 70_000
    assert long.endswith("(output truncated)")


@pytest.mark.slow
def test_a_task_of_commands_is_graded_by_the_share_that_passes(episodes: Episodes) -> None:
    task = episodes.tasks.define("own", "Make two.", ["echo a > one"], ["test -f one", "grep -q b two"])
    assert "grep" not in repr(task)
    for work, reward in (("true > x", 0.5), ("echo b > two", 1.0), ("rm one; echo b > two", 0.5)):
        assert episodes.call(played(episodes, task, work))[1].reward == reward


@pytest.mark.slow
def test_the_quick_start_of_terminus_env_has_its_answer_in_the_home_of_e2b(episodes: Episodes) -> None:
    folder = "/home/user/work"
    setup = [f"mkdir -p {folder}", f"echo 41 > {folder}/question.txt"]
    verify = [f"test -f {folder}/answer.txt", f"grep -qx 42 {folder}/answer.txt"]
    task = episodes.tasks.define("own", f"Write {folder}/answer.txt.", setup, verify)
    for work, reward in (
        (f"expr $(cat {folder}/question.txt) + 1 > {folder}/answer.txt", 1.0),
        (f"echo 41 > {folder}/answer.txt", 0.5),
        ("echo 42 > answer.txt", 0.0),
    ):
        assert episodes.call(played(episodes, task, work))[1].reward == reward


@pytest.mark.full
def test_tasks_are_found_by_id_and_index() -> None:
    tasks = EpisodeTasks(load_config())
    task = tasks.at("eval", 3)
    assert tasks.find(task.id) == task
    assert described("eval", 3, task)["instruction"] == task.prompt
    with pytest.raises(TaskError, match="asked for -1"):
        tasks.at("eval", -1)
    with pytest.raises(TaskError, match="no task 'nothing'"):
        tasks.find("nothing")
    with pytest.raises(TaskError, match="no command"):
        tasks.define("own", "", [], [])


def test_a_reward_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(rollout):\n    return 1.0\n")
    config = load_config(None, {"reward.function": f"{tmp_path}/mine.py:reward"})
    with pytest.raises(ConfigError, match="needs a trajectory"):
        EpisodeTasks(config)


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "env.toml"
    path.write_text("[limits]\nwall_s = 7\n")
    variables = {"INSITU_ENV_CONFIG": str(path), "MAX_CONCURRENT_ENVS": "3", "INSITU_ENV_TRUST_CALLERS": "1"}
    found = ServerSettings.read(variables)
    assert (found.config.limits.wall_s, found.max_episodes, found.trust_callers) == (7.0, 3, True)
    assert not ServerSettings.read({}).trust_callers


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_what_openenv_asks_for(name: str) -> None:
    folder = ROOT / "envs" / name
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    for file in ("__init__.py", "client.py", "openenv.yaml", "server/app.py", "server/__init__.py"):
        assert (folder / file).is_file()
    described_by = tomllib.loads((folder / "pyproject.toml").read_text())
    project, sources = described_by["project"], described_by["tool"]["uv"]["sources"]
    assert project["name"] == f"openenv-{name.replace('_', '-')}"
    assert project["scripts"] == {"server": f"{name}.server.app:main"}
    # uv takes a package from a path only where the project itself names it.
    named = {re.split("[<>=]", one)[0] for one in project["dependencies"]}
    own = {one for one in named if one.startswith("insitu")}
    assert own == sources.keys() == {"insitu", "insitu-train", "insitu-bridges", "insitu-tasksets"}
    assert all((folder / source["path"] / "pyproject.toml").is_file() for source in sources.values())
    docker = (folder / "Dockerfile").read_text()
    assert re.search(r"^USER 1000$", docker, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", docker, re.MULTILINE)
    assert not re.search(r"(?i)(token|secret|password|api_key)\s*=", docker)
    head = (folder / "README.md").read_text().split("---")[1]
    assert "sdk: docker" in head
    assert "app_port: 8000" in head
