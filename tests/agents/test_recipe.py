"""The base of one-shot agents with a small shell recipe; and what every shipped recipe must keep to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from scripted_server import ScriptedServer

from insitu import registry
from insitu.agents import claude_code, install
from insitu.agents.base import ModelAccess
from insitu.agents.install import Installed, Package, PiInstall
from insitu.agents.pi import PiHarness
from insitu.agents.recipe import HOME, CliHarness, Recipe, Start, shipped_recipes
from insitu.config import Config, load_config
from insitu.errors import ConfigError, HarnessError, SetupError
from insitu.sandbox.base import ExecResult
from insitu.sandbox.local import LocalBackend
from insitu.types import Limits, Task

ACCESS = ModelAccess(
    public_id="pub", secret="secret-of-rollout", model="tiny", max_call_tokens=100, max_context_tokens=1000
)
PACKAGE = Package(registry="npm", name="shell", version="3", label="shell", program="node_modules/*/run")
START = Start(
    address="http://127.0.0.1:8080/s/pub",
    secret="secret-of-rollout",
    model="tiny",
    prompt="Fix f.",
    program="/opt/agent/node_modules/a/run",
    max_call_tokens=100,
    context_tokens=1000,
)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    program = tmp_path / "shell-3" / "node_modules" / "a" / "run"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\ncat > in; cat {HOME}/config; echo "$KEY" "$1" >&2; eval "$1"\n')
    program.chmod(0o755)
    return Installed(package=PACKAGE, folder=tmp_path / "shell-3", program="node_modules/a/run")


def recipe(text: str) -> Recipe:
    return Recipe(
        name="shell",
        package=PACKAGE,
        argv=lambda start: [start.program, text],
        env=lambda start: {"KEY": start.secret},
        files=lambda start: {f"{HOME}/config": f"{start.address} {start.compact_tokens}\n".encode()},
    )


async def test_an_agent_gets_its_files_prompt_and_secret(
    backend: LocalBackend, server: ScriptedServer, task: Task, installed: Installed
) -> None:
    harness = CliHarness(recipe("exit 0"), installed, backend)
    assert (harness.name, harness.version) == ("shell", "3")
    async with harness.worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
        assert not worker.healthy
        with pytest.raises(HarnessError, match="used up"):
            await worker.run(task, ACCESS)
    assert (result.exit, result.tree["in"].content) == ("finished", b"Fix f.")
    assert result.log == b"http://127.0.0.1:8080/s/pub 750\n*** exit 0\n"


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
    async with CliHarness(recipe(text), installed, backend).worker(server.path) as worker:
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
    assert not [part for part in agent.argv(START) if START.secret in part]
    assert not [path for path in agent.files(START) if not path.startswith(f"{HOME}/")]
    told = [*agent.env(START).values(), *(content.decode() for content in agent.files(START).values())]
    assert any(START.address in text for text in told)
    assert any(START.secret in text for text in told)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_recipe_can_be_configured_and_starts_anew_each_time(name: str) -> None:
    assert load_config(None, [f"harness.agent={name}"]).harness.agent == name
    with pytest.raises(ConfigError, match="warm does not support"):
        load_config(None, [f"harness.agent={name}", "harness.mode=warm"])


def test_only_pi_has_a_switch_for_compaction() -> None:
    assert load_config(None, ["harness.compact=true"]).harness.compact
    with pytest.raises(ConfigError, match=r"harness.compact only applies to pi, not to codex"):
        load_config(None, ["harness.compact=true", "harness.agent=codex"])


@pytest.mark.parametrize("compact", [False, True])
async def test_pi_hears_of_its_true_window_when_it_may_compact(
    backend: LocalBackend, server: ScriptedServer, task: Task, pi: PiInstall, compact: bool
) -> None:
    """The scripted server tells 100 prompt tokens: over three quarters of the window, so Pi asks for a
    summary once it has stopped."""
    tight = dataclasses.replace(ACCESS, model="policy", max_call_tokens=20, max_context_tokens=120)
    harness = PiHarness(pi, "fresh", backend, model=tight, compact=compact)
    async with harness.worker(server.path) as worker:
        await worker.run(task, tight)
    summaries = [body for body in server.requests if not body.get("tools")]
    assert bool(summaries) == compact


def test_built_in_agents_can_be_configured() -> None:
    assert {"pi", "script", "single_turn", "terminus", *shipped_recipes()} == {*registry.BUILT_IN["agents"]}
    assert Config().harness.agent == "pi"
    with pytest.raises(ConfigError, match=r"harness.agent: unknown name 'codx' of kind agents; did you mean"):
        load_config(None, ["harness.agent=codx"])


def test_an_install_is_complete_or_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(install, "_wheel_node", lambda: None)
    for name, script in (("node", "echo v22.20.0"), ("npm", "exit 0")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(SetupError, match="shell 3 has no program for this machine"):
        install.install(PACKAGE)
    # What the fake npm gets: install --prefix TREE ...
    script = '[ "$1 $2" = "install --prefix" ] && mkdir -p $3/node_modules/a && echo > $3/node_modules/a/run'
    (tmp_path / "bin" / "npm").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    found = install.install(PACKAGE)
    assert found.folder / found.program == tmp_path / "cache" / "shell-3" / "node_modules" / "a" / "run"
    (tmp_path / "bin" / "npm").unlink()
    assert install.install(PACKAGE) == found
    old = dataclasses.replace(PACKAGE, version="4", node=(23, 0))
    with pytest.raises(SetupError, match=r"Node 23.0 or newer is needed"):
        install.install(old)
    assert install.main(["nobody"]) == 1
    assert "known: pi, script" in capsys.readouterr().err
