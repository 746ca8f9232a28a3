"""Every TOML and Python example of docs/agents.md is taken as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import insitu
from insitu.agents.recipe import PLACEHOLDERS, SDK_ENV, parse_agent
from insitu.config.harness import AgentCommand
from insitu_lab.testing import AgentContract

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text()
TABLES = [text for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "[harness]" in text]
EXAMPLES = sorted([*(ROOT / "examples/agents").glob("*.toml"), ROOT / "examples/own/agent.toml"])


@pytest.mark.parametrize("text", TABLES, ids=range(len(TABLES)))
def test_a_table_of_the_page_is_an_agent(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bin/crush", "bin/goose", "examples/own/agent.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(text)
    recipe = parse_agent("my.toml")
    wanted = tomllib.loads(text)["harness"]
    assert list(recipe.command) == wanted["command"] if "command" in wanted else recipe.version == "0.166.0"


def test_the_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = {}
    monkeypatch.setattr("insitu.api.rollout", lambda **tables: seen.update(tables))
    code, contract = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "agents.md", "exec"), {})
    config = insitu.load_config(tables=seen)
    assert config.harness.agent.startswith("object:")
    (tmp_path / "my_package.py").write_text("from insitu.agents.script import RECIPE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(contract, "agents.md", "exec"), names)
    assert issubclass(names["TestMyAgent"], AgentContract)


def test_the_page_names_every_key_placeholder_and_variable() -> None:
    for name in (*AgentCommand.model_fields, *(f"{{{name}}}" for name in PLACEHOLDERS)):
        assert f"`{name}`" in PAGE, name
    for variables in SDK_ENV.values():
        assert all(f"`{name}`" in PAGE for name in variables)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_an_agent(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = parse_agent(str(example))
    assert recipe.pip
    for path, entry in recipe.files.items():
        compile(entry.content, path, "exec")
