"""The agents of insitu-tasksets: each by name, pinned, with files that the agent can read."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import yaml

from insitu.agents.recipe import Start, parse_agent
from insitu.config import HarnessTable, load_config
from insitu.registry import SATELLITES, names

# terminus is a program of our own (test_terminus.py)
NAMED = [name for name in SATELLITES["tasksets"]["agents"].split() if name != "terminus"]
START = Start(
    address="http://127.0.0.1:1/s/x", api_key="key", model="policy", prompt="Do it.", max_call_tokens=96,
    context_tokens=4096,
)  # fmt: skip
READ = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_agent_is_a_pinned_recipe_whose_key_is_in_no_argument(name: str) -> None:
    recipe = parse_agent(name)
    assert recipe.name == name
    assert re.fullmatch(r"\d+(\.\d+)+", recipe.version)
    assert parse_agent(f"{name}@9.9.9").version == "9.9.9"
    assert not any("{api_key}" in word for word in recipe.command)
    environment = recipe.environment(START)
    assert "key" in environment.values()
    texts = [*environment.values(), *(content.decode() for _, content, _ in recipe.home_files(START))]
    assert any(START.address in text for text in texts)


@pytest.mark.parametrize("name", NAMED)
def test_its_files_are_what_they_say_and_hold_the_limits(name: str) -> None:
    for path, content, _ in parse_agent(name).home_files(START):
        kind = path.rpartition(".")[2]
        if kind == "txt":
            continue
        held = str(READ[kind](content.decode()))
        assert START.address in held
        assert "{" + "model}" not in held
        assert kind == "json" or ("4096" in held and "96" in held)


def test_the_harness_table_takes_one_by_name() -> None:
    assert load_config(None, ("harness.agent=cline",)).harness == HarnessTable(agent="cline")
    assert set(NAMED) <= set(names("agents"))
