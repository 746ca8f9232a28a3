"""Servers that a run starts: their command, their GPUs, their deaths, and that none is left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import insitu
from insitu.config import Config, load_config
from insitu.engines import launch
from insitu.engines import server_command as server_module
from insitu.engines.factory import open_server
from insitu.engines.launch import launched
from insitu.engines.server_command import ServerCommand, describe_servers, interpreter, place, server_command
from insitu.errors import ConfigError, EngineError
from insitu.types import RequestKey, SamplingParams
from tests.fakes.server_program import interpreter as fake_interpreter

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("FAKE_SERVER", str(tmp_path / "started"))
    monkeypatch.setattr(launch, "RESTART_S", 0.0)


def config(folder: Path, *more: str, kind: str = "vllm") -> Config:
    given = [f"engine.kind={kind}", f"engine.python={fake_interpreter(folder / 'env')}"]
    return load_config(None, [*given, f"run.dir={folder / 'run'}", *more])


def started(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "started").read_text().splitlines()]


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and not zombie(pid)]


def zombie(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def gone(pids: Sequence[int], within_s: float = 20.0) -> bool:
    ends = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < ends:
        time.sleep(0.05)
    return not alive(pids)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_servers_are_started_used_and_ended_with_all_their_processes(kind: str, tmp_path: Path) -> None:
    said: list[str] = []
    chosen = config(tmp_path, "engine.replicas=2", "engine.args=--seed,7", kind=kind)
    async with open_server(chosen, None, said.append, probe=False) as engines:  # type: ignore[arg-type]
        key = RequestKey(seed=1, rollout_id="r", turn=0)
        reply = await engines.generate(np.arange(1, 9, dtype=np.int32), SamplingParams(max_tokens=4), key)
        assert len(reply.ids) > 0
        running = started(tmp_path)
        pids = [pid for one in running for pid in one["pids"]]
        assert len(alive(pids)) == 4
    assert gone(pids)
    assert len(running) == 2
    assert all(one["argv"][-2:] == ["--seed", "7"] for one in running)
    assert said == [f"starting 2 {kind} servers on the CPU; the CPU"]
    if kind == "vllm":
        assert running[0]["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
        assert running[0]["environment"]["VLLM_TARGET_DEVICE"] == "cpu"
        assert "PYTHONPATH" not in running[0]["environment"]
        model = running[0]["argv"][3]
        assert json.loads((Path(model) / "config.json").read_text())["tie_word_embeddings"] is False
    else:
        assert running[0]["argv"][:3] == ["-m", "sglang.launch_server", "--model-path"]


async def test_one_that_dies_is_started_again_at_its_address_so_many_times(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    async with launched(config(tmp_path, "train.restarts=1"), said.append) as urls:
        first = started(tmp_path)[0]
        os.kill(first["pids"][0], signal.SIGKILL)
        assert gone(first["pids"]), "its own processes end with it"
        async with asyncio.timeout(60.0):
            while len(started(tmp_path)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        second = started(tmp_path)[1]
        assert second["argv"] == first["argv"]
        assert urls == [f"http://127.0.0.1:{second['argv'][second['argv'].index('--port') + 1]}"]
        os.kill(second["pids"][0], signal.SIGKILL)
        async with asyncio.timeout(30.0):
            while len(said) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert re.search(r"^vllm server 0 died \(exit status 137: .*\); restarting it \(1 of 1\)$", said[1])
    assert "vllm server 0 died 2 times and is not restarted (train.restarts): exit status 137" in said[2]


async def test_one_that_does_not_start_ends_the_run_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(EngineError) as caught:
        async with launched(config(tmp_path, "engine.replicas=2"), lambda line: None):
            pass
    line = str(caught.value)
    wanted = r"vllm server \d did not start \(exit status 1: ValueError: no memory for the KV cache \(.*\)\)$"
    assert re.match(wanted, line)
    assert "logs/engine-" in line
    assert "\n" not in line


def test_the_cause_of_a_log_is_its_first_error(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    server = launch._ServerProcess(
        "vllm server 0", "", [], server_command(config(tmp_path), "x", cpu=True), log
    )
    cause = (
        "ValueError: Available memory on node 0 (14.68/23.59 GiB) is less than desired. To resolve: decrease"
    )
    log.write_text(
        "WARNING 11-28 [x.py:3] ImportError: no module named triton\n"
        f"(EngineCore pid=7) ERROR 11-28 [core.py:1] {cause}\n"
        + "(EngineCore) File x\n" * 500
        + "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert server.first_error() == f"{cause} ({log})"
    log.write_text("no\nreason\n")
    assert server.first_error() == f"no | reason ({log})"


MODEL = {
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def on_cpu(folder: Path, *more: str, number: int = 0, **described: object) -> ServerCommand:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | described))
    keys = ("model.max_context_tokens=1024", "harness.workers=6", "engine.publish_dtype=auto")
    return server_command(config(folder, *keys, *more), str(folder), cpu=True, number=number)


def test_a_server_on_a_cpu_asks_for_the_memory_of_its_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache(command: ServerCommand) -> int:
        at = list(command.arguments).index("--kv-cache-memory-bytes")
        return int(command.arguments[at + 1])

    free = {"SC_AVPHYS_PAGES": 16 << 30, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(server_module.os, "sysconf", free.__getitem__)
    context = 10 * 128 * 2 * 30 * 3 * 64 * 2
    assert cache(on_cpu(tmp_path)) == 6 * context
    assert cache(on_cpu(tmp_path, "engine.replicas=2")) == 3 * context
    assert cache(on_cpu(tmp_path, "engine.publish_dtype=float32")) == 12 * context
    assert cache(on_cpu(tmp_path, head_dim=128)) == 12 * context
    free["SC_AVPHYS_PAGES"] = 1 << 20
    assert cache(on_cpu(tmp_path)) == context
    for given in ("engine.args=--gpu-memory-utilization,0.2", "engine.args=--kv-cache-memory-bytes=9"):
        assert "--kv-cache-memory-bytes" not in on_cpu(tmp_path, given).arguments
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert "--kv-cache-memory-bytes" not in on_cpu(tmp_path).arguments
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    assert "--kv-cache-memory-bytes" not in server_command(config(tmp_path), "MODEL", cpu=True).arguments
    assert (
        "--kv-cache-memory-bytes" not in server_command(config(tmp_path), str(tmp_path), cpu=False).arguments
    )


def test_a_server_on_a_cpu_is_not_compiled_unless_asked(tmp_path: Path) -> None:
    assert "--enforce-eager" in on_cpu(tmp_path).arguments
    arguments = on_cpu(tmp_path, "engine.args=--no-enforce-eager").arguments
    assert arguments[-1] == "--no-enforce-eager"  # the last one counts
    assert "--enforce-eager" not in server_command(config(tmp_path), "MODEL", cpu=False).arguments


def test_a_server_on_few_cpus_uses_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    cpus = {0, 1, 2, 5}
    monkeypatch.setattr(server_module.os, "sched_getaffinity", lambda _: cpus)
    assert on_cpu(tmp_path).environment[bind] == "0,1,2,5"
    two = [on_cpu(tmp_path, "engine.replicas=2", number=number).environment[bind] for number in range(2)]
    assert two == ["0,1", "2,5"]
    cpus |= set(range(64))
    assert bind not in on_cpu(tmp_path).environment
    cpus.clear()
    cpus.add(3)
    assert bind not in on_cpu(tmp_path, "engine.replicas=2").environment
    monkeypatch.setenv(bind, "nobind")
    assert bind not in on_cpu(tmp_path).environment


HOLDS = """
import asyncio, sys
from insitu.config import load_config
from insitu.engines.launch import launched

async def main():
    async with launched(load_config(None, sys.argv[1:]), print):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_is_left_of_a_controller_that_is_killed_9(tmp_path: Path) -> None:
    async def run() -> None:
        chosen = config(tmp_path, "engine.replicas=2")
        keys = [f"engine.{key}={getattr(chosen.engine, key)}" for key in ("kind", "python", "replicas")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOLDS, *keys, f"run.dir={tmp_path / 'run'}"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(insitu.__file__).parents[1])},
        )
        assert process.stdout is not None
        async with asyncio.timeout(60.0):
            while (await process.stdout.readline()).strip() != b"ready":
                pass
        process.kill()
        await process.wait()

    asyncio.run(run())
    pids = [pid for one in started(tmp_path) for pid in one["pids"]]
    assert len(pids) == 4
    assert gone(pids)


PAIRS = ["engine.replicas=2", "engine.gpus=[0,1,2,3]"]
GPU = ["policy.kind=hf", "engine.publish_dtype=bfloat16"]


@pytest.mark.parametrize(
    ("keys", "present", "servers", "learner"),
    [
        ([], "", [()], ()),
        (GPU, "0 1", [["0"]], ["1"]),
        (
            [*GPU, *PAIRS],
            "0 1 2 3 4",
            [["0", "1"], ["2", "3"]],
            ["4"],
        ),
        ([*GPU, "engine.gpus=[3]"], "0 1 2 3", [["3"]], ["2"]),
        ([*GPU, "engine.gpus=[0,1]", "engine.replicas=2"], "", [["0"], ["1"]], ()),
        ([*GPU, "engine.share_gpu=true"], "0", [["0"]], ["0"]),
        ([*GPU, "train.ranks=2"], "5 6 7", [["5"]], ["6", "7"]),
        ([], "0", [["0"]], ()),
    ],
)
def test_who_computes_where(
    keys: list[str], present: str, servers: list[list[str]], learner: list[str], tmp_path: Path
) -> None:
    placed = place(config(tmp_path, *keys), present.split())
    assert [list(gpus) for gpus in placed.servers] == [list(gpus) for gpus in servers]
    assert list(placed.learner) == list(learner)


@pytest.mark.parametrize(
    ("keys", "present", "line"),
    [
        (GPU, "0", r"the servers use 1 GPUs .*, the learner 1 .*: 2 in all, 1 are here"),
        ([*GPU, "engine.replicas=4"], "0 1 2 3", "5 in all, 4 are here"),
        ([*GPU, "engine.gpus=[7]"], "0 1", "there is no GPU 7 here, only 0, 1"),
    ],
)
def test_what_cannot_fit_is_refused(keys: list[str], present: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line):
        place(config(tmp_path, *keys), present.split())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["engine.replicas=2"], "replicas has no effect with kind = 'embedded'"),
        (
            ["engine.kind=vllm", "engine.urls=http://x", "engine.replicas=2"],
            "replicas has no effect with urls",
        ),
        (
            ["engine.kind=vllm", "engine.gpus=[0,1,2]", "engine.replicas=2"],
            "gpus names 3, not equally many for each of replicas = 2",
        ),
        (
            ["engine.kind=vllm", "engine.replicas=2", "engine.publish=ipc"],
            "reaches one server",
        ),
    ],
)
def test_keys_that_do_not_fit_together(given: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load_config(None, given)


def test_an_environment_without_the_server_is_refused_before_anything_starts(tmp_path: Path) -> None:
    here = load_config(None, ["engine.kind=vllm", f"engine.python={sys.executable}"])
    with pytest.raises(ConfigError, match=r"engine\.python: .* has no vllm; name the environment"):
        interpreter(here)
    missing = load_config(None, ["engine.kind=vllm", f"engine.python={tmp_path}/x"])
    with pytest.raises(ConfigError, match=r"engine\.python: .*/x is not a program"):
        interpreter(missing)


def test_the_commands_of_the_page_are_those_of_a_dry_run() -> None:
    """docs/servers.md: a TOML block is followed by what `insitu train FILE --dry-run` says of it."""
    page = (ROOT / "docs" / "servers.md").read_text()
    blocks = re.findall(r"<!-- dry run of: ([^\n]*) -->\n```\n(.*?)\n```", page, re.S)
    assert len(blocks) >= 2
    for keys, shown in blocks:
        assert "\n".join(describe_servers(load_config(None, keys.split()))) == shown


def test_a_server_that_returns_experts_needs_another_runner(tmp_path: Path) -> None:
    asked = config(tmp_path, "engine.replay_experts=true", "policy.kind=hf", "model.path=models/x")
    command = server_command(asked, "models/x", cpu=False)
    assert "--enable-return-routed-experts" in command.arguments
    assert command.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    plain = server_command(config(tmp_path), "models/x", cpu=False)
    assert "--enable-return-routed-experts" not in plain.arguments
    with pytest.raises(ConfigError, match=r"replay_experts has no effect"):
        config(tmp_path, "engine.replay_experts=true", kind="sglang")
