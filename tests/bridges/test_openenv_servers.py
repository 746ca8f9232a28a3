"""The packages in envs/ with the real `openenv`: its validator, client and server (scripts/test-bridges)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from env_server import ENVS, NAMES, LocalProcess, serving, start

from insitu.concurrency import run_all

pytestmark = [pytest.mark.bridge, pytest.mark.filterwarnings("default")]

SOLVE = (ENVS / "terminus_env" / "validation" / "oracle.sh").read_text()
TASK = {"split": "eval", "index": 0}
OPENENV = [sys.executable, "-c", "from openenv.cli.__main__ import main; main()"]


def client(url: str) -> Any:
    from terminus_env import TerminusEnv

    return TerminusEnv(url)


def call(**arguments: str) -> Any:
    from openenv.core.env_server.mcp_types import CallToolAction

    return CallToolAction(tool_name="terminal", arguments=arguments)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("terminus_env") as found:
        yield found


def validate(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*OPENENV, "validate", *arguments, "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.parametrize("name", NAMES)
def test_the_package_passes_the_static_level(name: str) -> None:
    code, report = validate(str(ENVS / name), "--level", "static")
    assert (code, report["verdict"]) == (0, "pass"), report


@pytest.mark.parametrize("name", NAMES)
def test_the_graders_of_the_runtime_level_pass(name: str) -> None:
    from openenv.validation.runner import run_validation
    from openenv.validation.types import Level

    report = run_validation(ENVS / name, max_level=Level.RUNTIME, provider=LocalProcess())
    found = json.loads(report.model_dump_json())
    checks = {check["check_id"]: check["status"] for check in found["results"]}
    evidence = [(check["check_id"], check["evidence"]) for check in found["results"]]
    assert {name for name, status in checks.items() if status == "pass"} >= {
        "static.manifest", "runtime.startup", "runtime.reward_well_formed", "runtime.observation_schema",
        "runtime.state_contract",
    }, evidence  # fmt: skip
    assert "fail" not in checks.values(), evidence


def test_a_live_server_passes_six_of_six(url: str) -> None:
    code, report = validate("--url", url)
    passed = [check["passed"] for check in report["criteria"]]
    assert (code, passed) == (0, [True] * 6), report


async def episode(env: Any, *work: str) -> tuple[Any, list[str]]:
    """Reset, run the commands, submit; return the last step and what the tool said."""
    said = []
    reset = await env.reset(**TASK)
    assert (reset.done, reset.reward) == (False, 0.0)
    for command in work:
        step = await env.step(call(command=command))
        assert (step.done, step.reward) == (False, 0.0)
        said.append(text_of(step))
    last = await env.step(call(final_answer="done"))
    return last, [*said, text_of(last)]


def text_of(step: Any) -> str:
    result = step.observation.result
    return str(result["data"] if isinstance(result, dict) else result.data)


async def test_the_solution_earns_1_and_nothing_else_does(url: str) -> None:
    forge = (
        "mkdir -p /tmp/logs/verifier; echo 1.0 | tee /tmp/logs/verifier/reward.txt reward.txt verdict.json"
    )
    async with client(url) as env:
        assert [tool.name for tool in await env.list_tools()] == ["terminal"]
        solved, said = await episode(env, "cat yard.py", SOLVE)
        assert (solved.done, solved.reward, said[-1]) == (True, 1.0, "Answer submitted.")
        assert "return cost + step" in said[0]
        state = await env.state()
        assert (state.last_reward, state.outcome, state.step_count) == (1.0, "resolved", 3)
        assert [one["command"] for one in state.commands] == ["cat yard.py", SOLVE]
        assert (state.verify_commands, state.verify_results) == ([], []), "the server's checks are hidden"
        for work in ((), (forge,), ("echo 'def quota(step, cost): return 1.0' > yard.py",)):
            last, said = await episode(env, *work)
            assert (last.done, last.reward, said[-1]) == (True, 0.0, "Answer submitted.")
        after = await env.step(call(command="ls"))
        assert text_of(after) == "Error: no episode is running; reset first."


def test_openenvs_session_adapter_plays_an_episode(url: str) -> None:
    from openenv.core.env_server.mcp_types import Tool
    from openenv.core.harness import StepEnvSessionAdapter

    session = StepEnvSessionAdapter(
        client(url),
        tool_specs=[Tool(name="terminal", description="A shell.", input_schema={"type": "object"})],
        action_builder=lambda name, arguments: call(**arguments),
        initial_messages_builder=lambda result, task: [],
        reset_kwargs=TASK,
    )
    # Of a call with both, the command is run and the answer is still to come, as in upstream's shim.
    worked = session.call_tool("terminal", {"command": SOLVE, "final_answer": "done"})
    assert not worked.done
    ended = session.call_tool("terminal", {"final_answer": "done"})
    assert (ended.done, ended.metadata["reward"], ended.metadata["state"]["step_count"]) == (True, 1.0, 2)
    session.close()


async def test_upstreams_options_and_state() -> None:
    """The options of `reset` and the state of OpenEnv's own terminus_env."""
    setup, verify = ["echo 41 > question", "echo ready"], ["grep -qx 42 answer.txt", "echo no; exit 3"]
    upstream = {
        "setup_scripts": setup, "verify_scripts": verify, "sandbox_timeout": 60, "forward_hf_token": False,
    }  # fmt: skip
    with serving("terminus_env", INSITU_ENV_TRUST_CALLERS="1") as url:
        async with client(url) as env:
            assert not (await env.reset(**upstream, sandbox_backend="local", sandbox_root=None)).done
            await env.step(call(command="echo 42 > answer.txt"))
            await env.step(call(command="ls; exit 7"))
            assert (await env.step(call(final_answer="done"))).reward == 0.5
            state = await env.state()
            assert state.sandbox_id
            assert [one["output"] for one in state.setup_results] == ["", "ready\n"]
            assert [one["error"] for one in state.commands] == [None, "exit code 7"]
            assert state.verify_commands == verify
            found = [(one["success"], one["error"], one["output"].strip()) for one in state.verify_results]
            assert found == [(True, None, ""), (False, "exit code 3", "no")]
            # The quick start of upstream's README.
            work = "/home/user/work"
            await env.reset(setup=[f"mkdir -p {work}"], verify=[f"grep -qx 42 {work}/answer.txt"])
            await env.step(call(command=f"echo 42 > {work}/answer.txt"))
            assert (await env.step(call(final_answer="done"))).reward == 1.0
            failed = await env.reset(setup=["true", "echo why >&2; false"], verify=["true"])
            assert failed.done
            state = await env.state()
            assert [one["success"] for one in state.setup_results] == [True, False]
            assert "setup command 2 ended with 1: why" in state.last_error
            # The first task of a split is no missing index, and a name of one's own wins over upstream's.
            first = []
            for seed in (0, 3):
                await env.reset(seed=seed, split="eval", index=0)
                first.append((await env.state()).task_id)
            assert first[0] == first[1]
            both = {"setup": ["true"], "setup_scripts": ["false"], "verify": ["true"]}
            assert not (await env.reset(**both)).done
            for option, said in (
                ({"sandbox_backend": "docker"}, "[sandbox] of INSITU_ENV_CONFIG decides, backend local"),
                ({"hf_sandbox_flavor": "cpu"}, "[sandbox] of INSITU_ENV_CONFIG decides, backend local"),
                ({"sandbox_timeout": "soon"}, "is no number of seconds"),
                ({"forward_hf_token": True}, "gets no secret"),
            ):
                await env.reset(**{**upstream, **option})
                assert said in (await env.state()).last_error


async def test_a_token_is_asked_for() -> None:
    from terminus_env import TerminusEnv

    with serving("terminus_env", INSITU_ENV_TOKEN="sesame") as url:  # it waits for /health
        for headers in ({}, {"Authorization": "Bearer sesame2"}):
            with pytest.raises(Exception, match="403|401"):
                async with TerminusEnv(url, headers=headers) as env:
                    await env.reset(**TASK)
        async with TerminusEnv(url, headers={"Authorization": "Bearer sesame"}) as env:
            assert not (await env.reset(**TASK)).done
        refused = await asyncio.to_thread(answered, f"{url}/tools")
        assert refused == 401


def answered(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as page:
            return int(page.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_page_is_at_web(url: str) -> None:
    assert answered(f"{url}/web") == 200


async def test_eight_episodes_at_once_over_websockets(url: str) -> None:
    async def one(number: int) -> float:
        async with client(url) as env:
            last, said = await episode(
                env, f"echo {number} > mine; sleep 1; cat mine", *[SOLVE] * (number % 2)
            )
            assert said[0] == f"{number}\n"
            return float(last.reward)

    assert await run_all(*(one(number) for number in range(8))) == [0.0, 1.0] * 4


def mcp(url: str, method: str, **params: Any) -> Any:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    request = urllib.request.Request(url + "/mcp", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)["result"]


async def test_eight_episodes_at_once_over_mcp(url: str) -> None:
    """The trainer resets and reads the reward over a WebSocket; the agent has only the MCP session."""
    import websockets

    async def one(number: int) -> float:
        session = (await asyncio.to_thread(mcp, url, "openenv/session/create"))["session_id"]
        address = f"{url.replace('http', 'ws')}/ws?session_id={session}"

        async def use(**arguments: str) -> str:
            found = await asyncio.to_thread(
                mcp, url, "tools/call", session_id=session, name="terminal", arguments=arguments
            )
            return str(found["data"])

        async with websockets.connect(address) as socket:
            await socket.send(json.dumps({"type": "reset", "data": TASK}))
            assert json.loads(await socket.recv())["data"]["done"] is False
            assert await use(command=f"echo {number} > mine; sleep 1; cat mine") == f"{number}\n"
            if number % 2:
                await use(command=SOLVE)
            assert await use(final_answer="done") == "Answer submitted."
            await socket.send(json.dumps({"type": "state"}))
            reward = json.loads(await socket.recv())["data"]["last_reward"]
        await asyncio.to_thread(mcp, url, "openenv/session/close", session_id=session)
        return float(reward)

    assert await run_all(*(one(number) for number in range(8))) == [0.0, 1.0] * 4


def descendants(pid: int) -> set[int]:
    """Processes below one, by /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found, fresh = set(), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def test_a_killed_server_leaves_no_sandbox() -> None:
    process, url = start("terminus_env")
    try:
        with client(url) as env:
            env.reset(**TASK)
            env.step(call(command="sleep 1000 >/dev/null 2>&1 & echo on"))
            below = descendants(process.pid)
            assert below
            process.kill()
            process.wait()
            deadline = time.monotonic() + 10
            while left := {pid for pid in below if Path(f"/proc/{pid}").exists() and not zombie(pid)}:
                assert time.monotonic() < deadline, left
                time.sleep(0.1)
    except (ConnectionError, RuntimeError):
        pass  # the client cannot say goodbye
    finally:
        process.kill()
        process.wait()


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_callers_define_tasks_only_where_the_operator_trusts_them(url: str) -> None:
    own = {"setup": ["echo a > one"], "verify": ["test -f one", "grep -q b two"], "instruction": "Make two."}
    async with client(url) as env:
        refused = await env.reset(**own)
        assert refused.done
        assert "INSITU_ENV_TRUST_CALLERS=1" in refused.observation.metadata["error"]
    with serving("terminus_env", INSITU_ENV_TRUST_CALLERS="1") as trusting:
        async with client(trusting) as env:
            rewards = []
            for command in ("true > x", "echo b > two"):
                ready = await env.reset(**own)
                assert ready.observation.metadata["instruction"] == "Make two."
                assert "grep" not in str(ready.observation)
                await env.step(call(command=command))
                rewards.append((await env.step(call(final_answer="done"))).reward)
            assert rewards == [0.5, 1.0]


async def test_tasks_are_listed_without_their_checks(url: str) -> None:
    def get(path: str) -> Any:
        with urllib.request.urlopen(url + path, timeout=60) as reply:
            return json.load(reply)

    def post(path: str, body: Any) -> Any:
        request = urllib.request.Request(
            url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    splits = await asyncio.to_thread(get, "/terminus_env/splits")
    assert [split["name"] for split in splits] == ["train", "eval"]
    task = await asyncio.to_thread(post, "/terminus_env/task", {"split": "eval", "index": 0})
    assert task["task"]["id"] == "toy-1"
    assert "cost //" not in json.dumps(task)


BROKEN = """
from insitu.errors import SandboxStartError
from insitu.sandbox.local import LocalBackend


class Broken(LocalBackend):
    name = "broken"

    async def create(self, spec):
        raise SandboxStartError("no sandbox today")


def make(config):
    return Broken()
"""


async def test_a_failure_of_the_host_is_no_grade(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    config = tmp_path / "env.toml"
    config.write_text(f'[sandbox]\nbackend = "{tmp_path}/broken.py:make"\n')
    with serving("insitu_env", INSITU_ENV_CONFIG=str(config)) as found:
        async with client(found) as env:
            reset = await env.reset(**TASK)
            assert (reset.done, reset.reward) == (True, 0.0)
            assert reset.observation.metadata["infra"] is True
            assert "no sandbox today" in reset.observation.metadata["error"]
            step = await env.step(call(command="ls"))
            assert (step.done, step.reward, step.observation.metadata["env_reward"]) == (True, 0.0, None)


AGENT = """
import json, os, subprocess, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as reply:
    subprocess.run(["sh", "-c", json.load(reply)["choices"][0]["message"]["content"]], check=True)
"""


async def test_a_rollout_of_an_agent_is_graded(tmp_path: Path) -> None:
    """The call shapes of upstream's MiniSWEEnv; only the model is not real."""
    from mini_swe_env import MiniSWEEnv

    from tests.fakes.provider import KEY, serve_provider

    (tmp_path / "agent.py").write_text(AGENT)
    config = tmp_path / "env.toml"
    command = '["python3", "{files}/agent.py"]'
    config.write_text(f'[harness]\ncommand = {command}\nfiles = ["{tmp_path}/agent.py"]\n')
    async with serve_provider() as provider:
        provider.replies = lambda body: {"content": SOLVE}
        access = {"base_url": f"{provider.url}/v1", "api_key": KEY, "model": "big-model", "agent": ""}
        with serving("mini_swe_env", INSITU_ENV_CONFIG=str(config)) as url:
            async with MiniSWEEnv(base_url=url) as env:
                (tool,) = await env.list_tools()
                assert not tool.input_schema["properties"].keys() & {
                    "api_key",
                    "base_url",
                    "verify",
                    "sandbox_image",
                }
                refused = await env.run_swe_rollout(task_id="toy-1", **access)
                assert (refused.reward, "TRUST_CALLERS" in str(refused.error)) == (None, True)
        with serving("mini_swe_env", INSITU_ENV_CONFIG=str(config), INSITU_ENV_TRUST_CALLERS="1") as url:
            async with MiniSWEEnv(base_url=url) as env:
                await env.reset()
                (tool,) = await env.list_tools()
                assert (tool.name, "api_key" in tool.input_schema["properties"]) == ("run_swe_rollout", True)
                assert "sandbox_backend" not in tool.input_schema["properties"]
                solved = await env.run_swe_rollout(task_id="toy-1", **access)
                assert (solved.reward, solved.resolved, solved.error) == (1.0, True, None)
                assert "cost // step" in solved.files["yard.py"]
                assert KEY not in solved.model_dump_json()
                state = await env.state()
                assert (state.last_reward, state.outcome) == (1.0, "resolved")
                # A task of the caller's own commands.
                own = await env.run_swe_rollout(
                    instruction="Fix it.",
                    setup=["printf 'return cost + step\\n' > yard.py"],
                    verify=["grep -q // yard.py", "test -f other"],
                    **access,
                )
                assert (own.reward, own.resolved, own.error) == (0.5, False, None)
                assert [one.exit_code for one in (*own.setup_results, *own.verify_results)] == [0, 0, 1]
                late = await env.run_swe_rollout(task_id="toy-1", timeout_s=0.01, **access)
                assert (late.reward, late.wall_s > 0) == (None, True)
                lost = await env.run_swe_rollout(task_id="toy-1", **access | {"api_key": "sk-not-the-key"})
                assert lost.reward is None
                assert "HTTP 401" in str(lost.error)
                assert "sk-not-the-key" not in lost.model_dump_json()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MAX_CONCURRENT_ENVS": "many"}, "MAX_CONCURRENT_ENVS = 'many' is not a number from 1"),
        ({"INSITU_ENV_TRUST_CALLERS": "yes"}, "INSITU_ENV_TRUST_CALLERS = 'yes' is neither 0 nor 1"),
        ({"INSITU_ENV_CONFIG": "/nowhere.toml"}, "cannot read /nowhere.toml"),
    ],
)
def test_a_bad_setting_is_one_line(variables: dict[str, str], said: str) -> None:
    from insitu.errors import ConfigError
    from insitu_bridges.openenv.settings import ServerSettings

    with pytest.raises(ConfigError, match=said):
        ServerSettings.read(os.environ | variables)
