"""Whole attempts on a task with a service: real agents call its MCP tool, fresh services judge the result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from insitu.attempt import AttemptExecutor, AttemptSpec
from insitu.config import Config, load_config
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.runners.find import runner_for
from insitu.runtime.agents import limits_of
from insitu.runtime.run import open_runtime
from insitu.tasks.base import TaskSource
from insitu.tasks.factory import open_source
from insitu.types import IntArray, Message, Rollout, Status, ToolCall
from insitu_lab.conformance.agent_tools import AGENT_TOOLS
from insitu_lab.open_renderer import open_renderer
from insitu_train.demo.demonstrator import call
from insitu_train.demo.scripted import ScriptedEngine
from tests.tasks.test_containers import left

pytestmark = pytest.mark.full

SERVER = '''\
"""An MCP server over HTTP with one tool, and a page."""
import http.server, json

SCHEMA = {"type": "object", "properties": {}}
TOOL = {"name": "secret", "description": "Returns the word.", "inputSchema": SCHEMA}
RESULTS = {
    "initialize": {
        "protocolVersion": "2025-03-26",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "words", "version": "1"},
    },
    "tools/list": {"tools": [TOOL]},
    "tools/call": {"content": [{"type": "text", "text": "open sesame"}], "isError": False},
    "ping": {},
}
STATE = []

class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, code, body, kind="application/json"):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/mcp":
            self.reply(405, b"")
        elif self.path == "/state":
            self.reply(200, str(len(STATE)).encode(), "text/plain")
        else:
            self.reply(200, b"open sesame", "text/plain")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("method") == "tools/call":
            STATE.append(1)
        if "id" not in asked:
            self.reply(202, b"")
            return
        reply = {"jsonrpc": "2.0", "id": asked["id"]}
        if asked["method"] in RESULTS:
            reply["result"] = RESULTS[asked["method"]]
        else:
            reply["error"] = {"code": -32601, "message": "no such method"}
        self.reply(200, json.dumps(reply).encode())

http.server.ThreadingHTTPServer(("", 8000), Answer).serve_forever()
'''
TOML = """\
[environment]
docker_image = "insitu-sandbox:bookworm"
workdir = "/app"
[[environment.mcp_servers]]
name = "words"
transport = "streamable-http"
url = "http://words:8000/mcp"
"""
COMPOSE = """\
services:
  words:
    image: insitu-sandbox:bookworm
    command: python3 /serve.py
    volumes: ["./serve.py:/serve.py:ro"]
    healthcheck:
      test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('localhost', 8000))"]
"""
TEST = """\
cat > /tmp/ask.py <<'END'
import urllib.request as r
page = lambda path: r.urlopen("http://words:8000/" + path).read().decode()
right = open("out.txt").read().strip() == page("word")
print(right * int(page("state") == "WANTED"))
END
python3 /tmp/ask.py > /logs/verifier/reward.txt
"""
BY_NAME = ToolCall(id="", name="tool_call", arguments='{"name": "mcp__words__secret", "arguments": {}}')
DONE = Message(role="assistant", text="done")


def opened(root: Path, name: str, *, live: bool) -> tuple[Config, TaskSource]:
    texts = {
        "task.toml": TOML,
        "instruction.md": "Write the word of the tool `secret` into out.txt.\n",
        "environment/docker-compose.yaml": COMPOSE,
        "environment/serve.py": SERVER,
        "tests/test.sh": TEST.replace("WANTED", "1" if live else "0"),
    }
    for path, text in texts.items():
        (root / "tasks" / "word" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "tasks" / "word" / path).write_text(text)
    config = load_config(
        None,
        [
            f"harness.agent={name}", "harness.workers=1", "limits.wall_s=120", "limits.max_call_tokens=2048",
            "model.max_context_tokens=131072", "sandbox.backend=docker", "tasks.source=harbor",
            f"tasks.path={root / 'tasks'}", "tasks.eval_share=0", "grade.timeout_s=60",
            *(["tasks.transform=insitu_tasksets.live:everywhere"] if live else []),
        ],
    )  # fmt: skip
    return config, open_source(config, limits_of(config), runner_for)


async def attempt(name: str, folder: Path, *, live: bool = False) -> tuple[Rollout, list[str]]:
    (folder / "model").mkdir()
    renderer = open_renderer(folder / "model")
    prompts: list[str] = []

    def policy(ids: IntArray, key: object) -> Message:
        prompts.append(renderer.codec.decode(ids))
        said = prompts[-1].rpartition("<|im_start|>user")[2]
        tool = re.search(r'"name": "([\w.-]*secret)"', prompts[-1])
        if "written" in said:
            return DONE
        if "open sesame" in said:
            shell, arguments = AGENT_TOOLS[name].run("echo open sesame > out.txt; echo written")
            return call(shell, **arguments)
        if tool is not None:
            return call(tool[1])
        if "mcp__words__secret" in prompts[-1]:  # deferred: its schema is asked for first
            deferred = "select:mcp__words__secret"
            if name == "claude_code":
                return call("ToolSearch", query=deferred)
            if deferred not in prompts[-1]:
                return call("tool_search", query=deferred)
            return Message(role="assistant", tool_calls=(BY_NAME,))
        return DONE

    engine = ScriptedEngine(renderer, policy, sampled=True)
    config, source = opened(folder, name, live=live)
    spec = AttemptSpec(rollout_id="train/00001/000/00", task=source.tasks("train", 0, 1)[0], seed=1)
    async with open_runtime(config, TokenBackend(engine, renderer), source) as runtime:
        rollout = await AttemptExecutor(runtime.gateway, runtime.workers, runtime.judge).run(spec)
    return rollout, prompts


@pytest.mark.parametrize("name", ["claude_code", "codex", "opencode", "qwen_code", "gemini_cli"])
async def test_an_agent_calls_a_tool_of_its_tasks_server(
    docker_image: str, name: str, tmp_path: Path
) -> None:
    rollout, prompts = await attempt(name, tmp_path)
    assert (rollout.status, rollout.error) == (Status.OK, "")
    assert any("open sesame" in prompt for prompt in prompts)
    assert rollout.verdict is not None
    assert (rollout.reward, rollout.verdict.reason) == (1.0, "the tests gave 1")
    assert left() == ""


async def test_the_services_of_the_agent_are_asked_when_its_sandbox_is_judged(
    docker_image: str, tmp_path: Path
) -> None:
    rollout, _ = await attempt("claude_code", tmp_path, live=True)
    assert (rollout.status, rollout.error) == (Status.OK, "")
    assert rollout.verdict is not None
    assert rollout.verdict.reason == "in the agent's own sandbox: the tests gave 1"
    assert (rollout.reward, rollout.verdict.trust) == (1.0, "weak")
    assert left() == ""
