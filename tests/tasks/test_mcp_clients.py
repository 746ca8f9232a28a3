"""MCP servers of a task in the configuration of agents; tests/full/test_task_services.py runs them."""

from __future__ import annotations

import json
import tomllib

import pytest

from insitu.agents.recipe import Start, named_recipe
from insitu_tasksets.container_plan import ContainerPlan, McpServer
from insitu_tasksets.mcp_clients import CLIENTS, HomeFile, offer_servers

SERVERS = (
    McpServer(name="web", transport="streamable-http", url="http://web:8000/mcp"),
    McpServer(name="old", url="http://old:8000/sse"),
    McpServer(name="own", transport="stdio", command="/bin/own", args=("-x", 'a "b"')),
)
PLAN = ContainerPlan(mcp_servers=SERVERS).text
START = Start(address="a", api_key="k", model="m", prompt="p", max_call_tokens=9, context_tokens=99)


def files_of(agent: str, plan: str = PLAN) -> dict[str, HomeFile]:
    files = named_recipe(agent).home_files(START)
    return {file[0]: file for file in offer_servers(agent, START.home, files, plan)}


@pytest.mark.parametrize(
    ("agent", "key", "entries"),
    [
        (
            "claude_code",
            "mcpServers",
            [
                {"type": "http", "url": "http://web:8000/mcp"},
                {"type": "sse", "url": "http://old:8000/sse"},
                {"type": "stdio", "command": "/bin/own", "args": ["-x", 'a "b"']},
            ],
        ),
        (
            "codex",
            "mcp_servers",
            [{"url": "http://web:8000/mcp"}, {"command": "/bin/own", "args": ["-x", 'a "b"']}],
        ),
        (
            "opencode",
            "mcp",
            [
                {"type": "remote", "url": "http://web:8000/mcp", "enabled": True},
                {"type": "remote", "url": "http://old:8000/sse", "enabled": True},
                {"type": "local", "command": ["/bin/own", "-x", 'a "b"'], "enabled": True},
            ],
        ),
        (
            "qwen_code",
            "mcpServers",
            [
                {"httpUrl": "http://web:8000/mcp", "trust": True},
                {"url": "http://old:8000/sse", "trust": True},
                {"command": "/bin/own", "args": ["-x", 'a "b"'], "trust": True},
            ],
        ),
    ],
)
def test_servers_join_what_the_recipe_says(agent: str, key: str, entries: list[object]) -> None:
    place = f"{START.home}/{CLIENTS[agent][0]}"
    content = files_of(agent)[place][1].decode()
    config = tomllib.loads(content) if place.endswith("toml") else json.loads(content)
    found = config.pop(key)
    assert list(found.values()) == entries
    before = {path: content for path, content, _ in named_recipe(agent).home_files(START)}.get(place, b"{}")
    assert config == (tomllib.loads if place.endswith("toml") else json.loads)(before.decode())
    assert set(found) == {server.name for server in SERVERS} - ({"old"} if agent == "codex" else set())


def test_codex_reads_any_text() -> None:
    words = ("\U0001f600", "\x7f", 'a"\\\n\t\x01', "\u2028")
    plan = ContainerPlan(mcp_servers=(McpServer(name="a", transport="stdio", command="x", args=words),))
    content = files_of("codex", plan.text)[f"{START.home}/{CLIENTS['codex'][0]}"][1].decode()
    assert tomllib.loads(content)["mcp_servers"]["a"]["args"] == list(words)


def test_an_agent_without_a_client_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert files_of("pi") == {file[0]: file for file in named_recipe("pi").home_files(START)}
    assert [line for line in caplog.messages if "agent=pi" in line] == [
        "agent=pi has no MCP client that insitu knows: such servers of tasks are not offered to it"
    ]


def test_a_task_without_servers_changes_nothing() -> None:
    plain = {file[0]: file for file in named_recipe("codex").home_files(START)}
    assert files_of("codex", ContainerPlan(env={"A": "b"}).text) == plain
