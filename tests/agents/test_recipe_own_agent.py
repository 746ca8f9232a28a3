"""A user's own agent: by TOML, by Python object and by entry point; and what is said when it cannot run."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from scripted_server import ScriptedServer, play

from insitu.agents.base import ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.recipe import Recipe, Start, named_recipe, parse_agent, resolve_agent
from insitu.config import dump_toml, load_config
from insitu.doctor import examine
from insitu.errors import ConfigError
from insitu.runtime.agents import make_harness
from insitu.sandbox.local import LocalBackend
from insitu.types import Task
from insitu_lab.conformance.run import conform
from insitu_lab.conformance.table import choose, print_report

ROOT = Path(__file__).parents[2]
ACCESS = ModelAccess(public_id="pub", secret="secret-of-rollout", model="tiny")
START = Start(
    address="http://127.0.0.1:8080/s/pub",
    api_key="secret-of-rollout",
    model="tiny",
    prompt="Fix f.",
    max_call_tokens=100,
    context_tokens=1000,
)
CALL = """
import json, os, sys, urllib.request
def ask(messages, tools):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **({"tools": tools} if tools else {})}
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": sys.stdin.read()}]
"""
TALKS = CALL + "print(ask(messages, []))\n"
LOOKS = (
    CALL
    + """
fields = {"path": {"type": "string"}, "depth": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}
schema = {"type": "object", "properties": fields, "required": list(fields)}
tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": schema}}]
while calls := (message := ask(messages, tools)).get("tool_calls"):
    messages.append(message)
    for call in calls:
        given = json.loads(call["function"]["arguments"])
        assert given["depth"] == 1 and given["kind"] == "a", given
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "nothing"})
"""
)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(f"[harness]\n{text}\n")
    return path


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
async def test_an_agent_with_the_openai_sdk_conforms_token_by_token(at_root: None) -> None:
    assert len((ROOT / "examples/own/agent.py").read_text().splitlines()) <= 50
    ((name, recipe),) = choose("", "", Path("examples/own/agent.toml")).items()
    finding = await conform(recipe, LocalBackend("auto"))
    assert (name, finding.failures) == ("agent", ())
    assert finding.calls >= 5
    assert finding.sampled == finding.trained > 0
    assert finding.split >= 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("code", "calls"), [(TALKS, 1), (LOOKS, 5)])
async def test_agents_without_a_shell_conform_too(code: str, calls: int) -> None:
    recipe = Recipe(name="mine", command=("python3", "-c", code))
    finding = await conform(recipe, LocalBackend("auto"))
    assert finding.failures == ()
    assert (finding.calls, finding.unexplained) == (calls, 0)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
async def test_a_title_asked_without_tools_may_be_auxiliary(after: bool) -> None:
    title = 'ask([{"role": "user", "content": "A title for: " + messages[0]["content"]}], [])\n'
    code = LOOKS + title if after else CALL + title + LOOKS.removeprefix(CALL)
    finding = await conform(Recipe(name="mine", command=("python3", "-c", code)), LocalBackend("auto"))
    assert finding.failures == ()
    assert (finding.calls, finding.unexplained, finding.notes) == (6, 0, ())
    assert set(finding.excluded) == {"auxiliary"}
    assert (finding.compactions, finding.subagents) == (None, None)


@pytest.mark.slow
async def test_replies_that_the_agents_own_limit_cut_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    code = TALKS.replace('"messages": messages,', '"messages": messages, "max_completion_tokens": 3,')
    finding = await conform(Recipe(name="mine", command=("python3", "-c", code)), LocalBackend("auto"))
    assert finding.failures == ()
    (note,) = finding.notes
    assert "1 replies were cut at the max_tokens that the agent itself sent (3 at the least; turns 0)" in note
    print_report({"mine": finding}, Console(width=200))
    shown = capsys.readouterr().out
    assert f"mine: {note}" in shown
    assert "-: not asked for" in shown
    assert [line.split()[-4:-2] for line in shown.splitlines() if line.startswith("mine ")] == [["-", "-"]]
    assert finding.as_json()["compactions"] is None


@pytest.mark.slow
async def test_conformance_takes_a_command_and_finds_an_agent_that_fails() -> None:
    (recipe,) = choose("", "sh -c 'exit 4'", None).values()
    finding = await conform(recipe, LocalBackend("auto"))
    assert "the agent failed: exit code 4: " in finding.failures
    assert "the agent sent no request with the task's prompt" in finding.failures


def test_a_table_is_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("x = '{model}'")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    text = f"""
    command = ["{{files}}/run.sh", "--ask", "{{prompt_file}}", "{{unknown}}", "${{HOME}}"]
    protocol = "anthropic"
    files = ["{tmp_path}/run.sh", "{tmp_path}/lib"]
    config_files = {{ ".my/config.json" = '{{"url": "{{address}}/v1", "window": {{context_tokens}}}}' }}
    env = {{ MY_LIMIT = "{{call_tokens}}" }}
    ok_exit_codes = [0, 3]
    """
    recipe = parse_agent(str(toml(tmp_path, text)))
    assert (recipe.name, len(recipe.version)) == ("run", 12)
    files = {path: (content, executable) for path, content, executable in recipe.home_files(START)}
    assert files == {
        "/home/agent/agent/run.sh": (b"#!/bin/sh\n", True),
        "/home/agent/agent/lib/a.py": (b"x = '{model}'", False),
        "/home/agent/.my/config.json": (
            b'{"url": "http://127.0.0.1:8080/s/pub/v1", "window": 1000}', False
        ),
        "/home/agent/prompt.txt": (b"Fix f.", False),
    }  # fmt: skip
    assert [START.fill(word) for word in recipe.command[2:]] == [
        "/home/agent/prompt.txt", "{unknown}", "${HOME}"
    ]  # fmt: skip
    assert recipe.stdin(START) == b""
    assert recipe.environment(START) == {
        "ANTHROPIC_BASE_URL": START.address,
        "ANTHROPIC_API_KEY": START.api_key,
        "ANTHROPIC_MODEL": "tiny",
        "MY_LIMIT": "100",
    }
    config = load_config(tmp_path / "my.toml")
    assert load_config(base=tomllib.loads(dump_toml(config))) == config
    own = Recipe(name="own", command=("x",), env={"KEY": "{api_key}"})
    assert own.environment(START) == {"KEY": START.api_key}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'command = ["a", "{promt_file}"]',
            r"unknown placeholder {promt_file}; did you mean {prompt_file}\?",
        ),
        ('command = ["a", "--key={api_key}"]', r"{api_key} belongs in env or config_files, not in command"),
        ('command = ["a"]\npip = ["openai"]', "'openai' is not pinned as name==version"),
        ('command = ["a"]\nnpm = ["@x/y"]', "'@x/y' is not pinned as name@version"),
        (
            'command = ["a"]\nfiles = ["no/such.py"]',
            r"files of the agent: .*No such file or directory: 'no/such.py'",
        ),
        ('command = ["a"]\nversion = "2"', "agent and version have no effect with command"),
        ('command = ["a"]\nagent = "codex"', "agent and version have no effect with command"),
        ('protocol = "gemini"', "protocol has no effect with command"),
        ('agent = "script"\nversion = "2"', "agent script has no version to choose: it installs no package"),
        ('agent = "math:pi"', "agent math:pi is a float, not a Recipe or a function returning one"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_agent(str(toml(tmp_path, text)))
    assert "\n" not in str(caught.value)


ENTRY = """
from insitu.agents.recipe import Recipe
def recipe():
    return Recipe(name="tiny_agent", command=("sh", "-c", "cat > said; echo $OPENAI_MODEL"))
"""


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package installed beside insitu that declares an agent."""
    info = tmp_path / "site" / "tiny_agent-0.3.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "tiny_agent.py").write_text(ENTRY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-agent\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[insitu.agents]\ntiny_agent = tiny_agent:recipe\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "tiny_agent", raising=False)


@pytest.mark.slow
async def test_another_package_adds_an_agent_by_an_entry_point(
    other_package: None, backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    config = load_config(None, ["harness.agent=tiny_agent"])
    async with make_harness(config, backend).worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    assert (result.exit, result.log, result.tree["said"].content) == ("finished", b"tiny\n", b"Fix f.")
    assert "tiny_agent" in str(list(examine()))
    assert named_recipe("tiny_agent").name == "tiny_agent"


@pytest.mark.slow
async def test_an_object_is_an_agent(backend: LocalBackend, server: ScriptedServer, task: Task) -> None:
    recipe = Recipe(name="mine", command=("true",))
    config = load_config(tables={"harness": {"agent": recipe}})
    assert resolve_agent(config.harness) is resolve_agent(recipe) is recipe
    assert make_harness(config, backend).name == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "detail"),
    [
        (["no-such-agent", "{prompt_file}"], "no-such-agent"),
        (["python3", "-c", "import openai_is_missing"], "No module named 'openai_is_missing'"),
    ],
)
async def test_an_agent_that_cannot_start_says_why_in_one_line(
    backend: LocalBackend, server: ScriptedServer, task: Task, words: list[str], detail: str
) -> None:
    server.script = play(["Done."])
    async with RecipeHarness(Recipe(name="mine", command=words), backend).worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    assert result.exit == "failed"
    assert detail in result.detail
    assert "\n" not in result.detail
    assert server.requests == []
