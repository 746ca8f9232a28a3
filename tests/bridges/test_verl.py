"""The agent loop for verl: real agents, sandboxes and source; verl's servers and module by stand-ins."""

from __future__ import annotations

import ast
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from trl_cpu import toy_config

from insitu.config import WARM_START, Config, dump_toml
from insitu.errors import ConfigError
from insitu_bridges import task_ids, verl
from tests.fakes.sampler import ChanceModel

STEP = 7
MODULE = "verl.experimental.agent_loop.agent_loop"


class Servers:
    """What the loop calls of verl's LLMServerClient, at training step 7: a model of chance."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_file(str(Path(WARM_START) / "tokenizer.json"))
        self.model, self.asked = ChanceModel(tokenizer.get_vocab_size(), "w"), list[Any]()
        self.random = np.random.default_rng(0)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any) -> Any:
        self.asked.append((request_id, sampling_params))
        ids, logprobs = list[int](), list[float]()
        while len(ids) < min(24, sampling_params["max_tokens"]):
            row = self.model.logprobs([*prompt_ids, *ids], sampling_params["temperature"])
            ids.append(int(self.random.choice(len(row), p=np.exp(row))))
            logprobs.append(float(row[ids[-1]]))
            if ids[-1] in sampling_params["stop_token_ids"]:
                break
        steps = {"global_steps": STEP, "min_global_steps": STEP, "max_global_steps": STEP}
        return SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=steps)


def real_output() -> Any:
    """verl's own class: INSITU_VERL_SRC names an unpacked wheel."""
    source = os.environ.get("INSITU_VERL_SRC")
    if not source:
        pytest.skip("INSITU_VERL_SRC names no unpacked wheel of verl")
    from typing import Optional

    import pydantic

    names = {"AgentLoopMetrics", "AgentLoopOutput"}
    tree = ast.parse(Path(source, "verl/experimental/agent_loop/agent_loop.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") in names]
    space: dict[str, Any] = {"BaseModel": pydantic.BaseModel, "Any": Any, "Optional": Optional}
    exec(compile(tree, "agent_loop.py", "exec", dont_inherit=True), space)
    return space["AgentLoopOutput"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Config]:
    monkeypatch.delenv(verl.KEY, raising=False)
    config = toy_config(
        tmp_path / "run",
        engine={"kind": "external", "key_env": verl.KEY},
        harness={"agent": "script", "workers": 2, "mode": "warm"},
        limits={"max_calls": 2, "max_call_tokens": 24},
    )
    (tmp_path / "insitu.toml").write_text(dump_toml(config))
    monkeypatch.setenv("INSITU_CONFIG", str(tmp_path / "insitu.toml"))
    verl._starting.cache_clear()
    yield config
    verl._starting.cache_clear()
    monkeypatch.delenv(verl.KEY, raising=False)


@pytest.mark.full
@pytest.mark.slow
async def test_rollouts_are_sampled_by_verls_servers(
    started: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check(started, SimpleNamespace, monkeypatch)


@pytest.mark.bridge
async def test_the_outputs_are_verls_own(started: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    await check(started, real_output(), monkeypatch)


async def check(started: Config, output: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(MODULE)
    module.AgentLoopOutput = output  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    servers = Servers()
    loop = verl.AgentLoop(server_manager=servers, tokenizer=None, processor=None)
    [task] = task_ids(started, 1)
    try:
        first = await loop.run({"temperature": 1.0}, raw_prompt=[{"role": "user", "content": task}])
        second = await loop.run({"temperature": 1.0}, extra_info={"task_id": task})
    finally:
        source, _, answering = await verl._starting(servers)
        source.close()
        answering.cancel()
    own = f"{started.run.dir}-{socket.gethostname()}-{os.getpid()}"
    assert Path(own).is_dir(), "another process of verl has another folder"  # noqa: ASYNC240
    for outputs in (first, second):
        assert outputs
        for one in outputs:
            assert len(one.response_ids) == len(one.response_mask) == len(one.response_logprobs)
            assert any(one.response_mask)
            assert one.extra_fields["min_global_steps"] == one.extra_fields["max_global_steps"] == STEP
        assert outputs[-1].reward_score is not None
    assert {asked["top_p"] for _, asked in servers.asked} == {1.0}
    assert len({name for name, _ in servers.asked}) >= 2


async def test_what_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    verl._starting.cache_clear()
    with monkeypatch.context() as other:
        (tmp_path / "old" / "verl-0.8.1.dist-info").mkdir(parents=True)
        metadata = "Metadata-Version: 2.1\nName: verl\nVersion: 0.8.1\n"
        (tmp_path / "old" / "verl-0.8.1.dist-info" / "METADATA").write_text(metadata)
        other.syspath_prepend(tmp_path / "old")
        files = ("verl", "verl/experimental", "verl/experimental/agent_loop")
        for folder in files:
            (tmp_path / "old" / folder).mkdir()
            (tmp_path / "old" / folder / "__init__.py").touch()
        with pytest.raises(ConfigError, match=r"verl 0\.8\.1: there is no AgentLoopOutput in verl\.exp"):
            await verl.AgentLoop(Servers()).run({})
    verl._starting.cache_clear()
    monkeypatch.delenv("INSITU_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="INSITU_CONFIG must name"):
        await verl.AgentLoop(Servers()).run({})
    (tmp_path / "a.toml").write_text(dump_toml(toy_config(tmp_path / "run")))
    monkeypatch.setenv("INSITU_CONFIG", str(tmp_path / "a.toml"))
    with pytest.raises(ConfigError, match="engine.kind must be external"):
        await verl.AgentLoop(Servers()).run({})
    servers, config = Servers(), toy_config(tmp_path / "run")
    algorithm = SimpleNamespace(algorithm=SimpleNamespace(adv_estimator="rloo"))

    async def opened(given: Any) -> Any:
        return None, config

    with monkeypatch.context() as other:
        other.setattr(verl, "_shared", opened)
        loop = verl.AgentLoop(servers, trainer_config=SimpleNamespace(config=algorithm))
        with pytest.raises(ConfigError, match="verl's rloo counts a rollout once for each of its rows"):
            await loop.run({})
        config = toy_config(tmp_path / "run", train={"rows": "final"})
        with pytest.raises(ConfigError, match="needs the id of a task"):
            await loop.run({})
    with pytest.raises(ConfigError, match="needs the id of a task"):
        verl._task({"raw_prompt": None})
    verl._starting.cache_clear()
