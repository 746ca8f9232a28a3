"""The base of one-shot agents with a small shell recipe; and what every shipped recipe must keep to."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from scripted_server import ScriptedServer

from insitu import registry
from insitu.agents import claude_code
from insitu.agents import pi as pi_module
from insitu.agents.base import ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import Installed
from insitu.agents.recipe import HOME, Recipe, Start, resolve_agent, shipped_recipes
from insitu.config import Config, load_config
from insitu.errors import ConfigError, HarnessError
from insitu.sandbox.base import ExecResult
from insitu.sandbox.local import LocalBackend
from insitu.types import Limits, Task

ACCESS = ModelAccess(
    public_id="pub", secret="secret-of-rollout", model="tiny", max_call_tokens=100, max_context_tokens=1000
)
START = Start(
    address="http://127.0.0.1:8080/s/pub",
    api_key="secret-of-rollout",
    model="tiny",
    prompt="Fix f.",
    max_call_tokens=100,
    context_tokens=1000,
)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    program = tmp_path / "shell-3" / "node_modules" / "a" / "run"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\ncat > in; cat {HOME}/config; echo "$KEY" "$1" >&2; eval "$1"\n')
    program.chmod(0o755)
    return Installed(folder=tmp_path / "shell-3", program=("{root}/node_modules/a/run",))


def recipe(text: str) -> Recipe:
    return Recipe(
        name="shell",
        npm=("shell@3",),
        command=("node_modules/*/run", text),
        env={"KEY": "{api_key}"},
        config_files={"config": "{address} {compact_tokens}\n"},
    )


@pytest.mark.slow
async def test_an_agent_gets_its_files_prompt_and_secret(
    backend: LocalBackend, server: ScriptedServer, task: Task, installed: Installed
) -> None:
    harness = RecipeHarness(recipe("exit 0"), backend, installed=installed)
    assert (harness.name, harness.version) == ("shell", "3")
    async with harness.worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
        assert not worker.healthy
        with pytest.raises(HarnessError, match="used up"):
            await worker.run(task, ACCESS)
    assert (result.exit, result.tree["in"].content) == ("finished", b"Fix f.")
    assert result.log == b"http://127.0.0.1:8080/s/pub 750\n*** exit 0\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "exit_", "detail"),
    [
        (r'printf "\033[91moh $KEY\033[0m" >&2; exit 3', "failed", "exit code 3: oh ***"),
        ("kill -9 $$", "failed", "exit code -9"),
        ("sleep 60 & sleep 60", "timeout", "stopped after 0.5 s"),
    ],
)
async def test_the_exit_is_the_authority(
    backend: LocalBackend,
    server: ScriptedServer,
    task: Task,
    installed: Installed,
    text: str,
    exit_: str,
    detail: str,
) -> None:
    short = dataclasses.replace(task, limits=Limits(wall_s=0.5))
    async with RecipeHarness(recipe(text), backend, installed=installed).worker(server.path) as worker:
        result = await worker.run(short, ACCESS)
    assert result.exit == exit_
    assert result.detail.startswith(detail)
    assert "app.py" in result.tree


@pytest.mark.parametrize(
    ("code", "stdout", "expected"),
    [
        (0, b'{"type":"result","is_error":false,"result":"Done."}\n', ("finished", "")),
        (0, b'{"type":"result","is_error":true,"result":"No.\\nx"}', ("failed", "exit code 0: No.")),
        (1, b'x\n{"type":"result","is_error":true,"subtype":"e"}', ("failed", "exit code 1: e")),
        (1, b'{"type":"system"}', ("failed", "exit code 1: noise")),
        (-9, b"{", ("failed", "exit code -9: noise")),
        (0, b"", ("finished", "")),
    ],
)
def test_claude_code_is_judged_by_its_last_line(code: int, stdout: bytes, expected: tuple[str, str]) -> None:
    result = ExecResult(exit_code=code, stdout=stdout, stderr=b"noise\n")
    assert claude_code.RECIPE.rule(result) == expected


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_recipes_keep_secrets_out_of_argv_and_files_in_the_home(name: str) -> None:
    agent = shipped_recipes()[name]
    assert agent.name == name
    files = {path: content.decode() for path, content, _ in agent.home_files(START)}
    assert not [path for path in files if not path.startswith(f"{HOME}/")]
    given = [*agent.environment(START).values(), *files.values()]
    assert any(START.address in text for text in given) or name == "pi"
    assert any(START.api_key in text for text in given)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_recipe_can_be_configured_in_another_version(name: str) -> None:
    table = load_config(None, [f"harness.agent={name}", "harness.version=9.9.9"]).harness
    if shipped_recipes()[name].npm or shipped_recipes()[name].pip:
        assert resolve_agent(table).version == "9.9.9"
        return
    with pytest.raises(ConfigError, match="has no version to choose"):
        resolve_agent(table)


def test_only_pi_has_a_switch_for_compaction() -> None:
    assert load_config(None, ["harness.compact=true"]).harness.compact
    with pytest.raises(ConfigError, match=r"harness.compact = true is pi's own, not of codex"):
        load_config(None, ["harness.compact=true", "harness.agent=codex"])


@pytest.mark.parametrize("name", ["claude_code", "codex", "pi"])
def test_a_number_says_from_where_an_agent_compacts(name: str) -> None:
    table = load_config(None, [f"harness.agent={name}", "harness.compact=400"]).harness
    found, start = resolve_agent(table), dataclasses.replace(START, compact=table.compact)
    given = [*found.environment(start).values(), *(text.decode() for _, text, _ in found.home_files(start))]
    wanted = {"claude_code": "40", "codex": "token_limit = 400", "pi": '"reserveTokens": 600'}[name]
    assert any(wanted in text for text in given)
    assert found.compacts
    assert not resolve_agent(load_config(None, ["harness.agent=mini_swe"]).harness).compacts


def test_a_shipped_agent_takes_arguments_variables_files_and_a_prompt() -> None:
    settings = json.dumps({"compaction": {"more": 1}, "theme": "{model}"})
    table = load_config(
        None,
        {
            "harness.command": ["{agent}", "--more", "{model}"],
            "harness.env": {"PI_OFFLINE": "0", "OWN": "{context_tokens}"},
            "harness.config_files": {
                ".pi/agent/settings.json": settings,
                "own.md": "I am {model}.",
                "prompt.txt": "Think of {model}.\n{prompt}",
            },
        },
    ).harness
    assert table.label == "pi"
    found, plain = resolve_agent(table), pi_module.RECIPE
    assert found.command == (*plain.command, "--more", "{model}")
    assert found.without_pipes == (*plain.without_pipes, "--more", "{model}")
    assert found.env == {**plain.env, "PI_OFFLINE": "0", "OWN": "{context_tokens}"}
    files = {path: content.decode() for path, content, _ in found.home_files(START)}
    own = json.loads(files[f"{HOME}/.pi/agent/settings.json"])
    assert own == {**pi_module.SETTINGS, "compaction": {"enabled": False, "more": 1}, "theme": "tiny"}
    assert files[f"{HOME}/own.md"] == "I am tiny."
    assert f"{HOME}/prompt.txt" not in files
    curly = dataclasses.replace(START, prompt="Fix {model}.")
    assert found.asked(curly) == "Think of tiny.\nFix {model}."
    assert plain.asked(curly) == "Fix {model}."


def test_a_variable_with_the_key_comes_beside_those_of_the_sdk() -> None:
    table = load_config(None, {"harness.agent": "script", "harness.env": {"OWN_KEY": "{api_key}"}}).harness
    plain = resolve_agent(load_config(None, ["harness.agent=script"]).harness).environment(START)
    assert resolve_agent(table).environment(START) == {**plain, "OWN_KEY": START.api_key}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["harness.command=['{agent}', 'x']", "harness.npm=['a@1']"], 'npm has no effect with "{agent}"'),
        (["harness.config_files={'prompt.txt'='Work.'}"], "the agent would not know its task"),
        (["harness.agent=single_turn", "harness.env={A='b'}"], "single_turn has no command, env"),
        (
            ["harness.command=['mine']", "harness.agent=codex"],
            "agent and version have no effect with command",
        ),
        (["harness.env={'A B'='x'}"], "harness.env.A B"),
        (["harness.env={'A=B'='x'}"], "harness.env.A=B"),
        (
            ["harness.agent=codex", "harness.compact=900000"],
            "no prompt is as long as model.max",
        ),
    ],
)
def test_keys_that_would_change_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(None, overrides)


def test_a_file_that_cannot_be_merged_with_the_agents_own_is_refused() -> None:
    def resolved(text: str) -> Recipe:
        return resolve_agent(
            load_config(None, {"harness.config_files": {".pi/agent/settings.json": text}}).harness
        )

    for text in ("{'theme': 'dark'}", '{"theme": "dark",} // mine', "[1]", ""):
        with pytest.raises(ConfigError, match=r"agent pi: config_files.*settings.json.* is no JSON object"):
            resolved(text)
    assert resolved('{"window": {context_tokens}}').config_files


@pytest.mark.slow
async def test_an_agent_is_asked_by_the_template(
    backend: LocalBackend, server: ScriptedServer, task: Task, installed: Installed
) -> None:
    made = recipe("exit 0")
    asking = dataclasses.replace(
        made, config_files={**made.config_files, "prompt.txt": "First plan. {prompt}"}
    )
    async with RecipeHarness(asking, backend, installed=installed).worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    assert result.tree["in"].content == b"First plan. Fix f."


@pytest.mark.slow
@pytest.mark.parametrize("compact", [False, True])
async def test_pi_hears_of_its_true_window_when_it_may_compact(
    backend: LocalBackend, server: ScriptedServer, task: Task, pi: Installed, compact: bool
) -> None:
    """The scripted server tells 100 prompt tokens: over three quarters of the window, so Pi asks for a
    summary once it has stopped."""
    tight = dataclasses.replace(ACCESS, model="policy", max_call_tokens=20, max_context_tokens=120)
    harness = RecipeHarness(pi_module.RECIPE, backend, installed=pi, access=tight, compact=compact)
    async with harness.worker(server.path) as worker:
        await worker.run(task, tight)
    summaries = [body for body in server.requests if not body.get("tools")]
    assert bool(summaries) == compact


@pytest.mark.slow
async def test_pi_works_without_its_own_shell(
    backend: LocalBackend, server: ScriptedServer, task: Task, pi: Installed
) -> None:
    """With an environment's tools instead: docs/tasks.md."""
    words = load_config(None, {"harness.command": ["{agent}", "--exclude-tools", "bash"]}).harness
    access = dataclasses.replace(ACCESS, model="policy")
    async with RecipeHarness(resolve_agent(words), backend, installed=pi, access=access).worker(
        server.path
    ) as worker:
        await worker.run(task, access)
    offered = {tool["function"]["name"] for body in server.requests for tool in body.get("tools", [])}
    assert "read" in offered
    assert "bash" not in offered


def test_built_in_agents_can_be_configured() -> None:
    assert {"single_turn", *shipped_recipes()} == {*registry.BUILT_IN["agents"]}
    assert Config().harness.agent == "pi"
    with pytest.raises(ConfigError, match=r"harness.agent: unknown name 'codx' of kind agents; did you mean"):
        load_config(None, ["harness.agent=codx"])
