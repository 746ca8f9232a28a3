"""Every example of docs/extend.md is taken as it stands."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

import insitu
from insitu import registry
from insitu.config.training import LossConfig
from insitu.engines.base import Engine
from insitu.grading.runners.find import runner_for
from insitu.runtime.gateway import gateway_config
from insitu.runtime.sandboxes import make_backend
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.tasks.factory import open_source
from insitu.tasks.mix import TaskMix, TaskSet
from insitu_lab.testing import EngineContract, SandboxContract
from insitu_train.loss.losses import LossInputs, token_loss
from insitu_train.plan.advantage import advantages
from insitu_train.samplers import TaskDraws
from tests.grading.test_reward import make, score
from tests.storage.helpers_record import make_rollout

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TABLES = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
NAMED = {
    "tasks.source": "TASKS",
    "reward.function": "judge",
    "gateway.tools": "guard",
    "train.loss": "reinforce",
    "train.advantage": "best_of_group",
    "tasks.sampler": "easy_first",
    "sandbox.backend": "backend",
    "engine.kind": "opened",
}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in CODE:
        exec(compile(text, "extend.md", "exec"), found)
    return found


def config(names: dict[str, Any], **more: object) -> insitu.Config:
    values = {key: names[name] for key, name in NAMED.items() if key != "engine.kind"}
    return insitu.load_config(None, {**values, **more})


def test_each_table_names_an_object_of_the_page(names: dict[str, Any]) -> None:
    seen = {
        f"{table}.{key}": value.rpartition(":")[2]
        for tables in TABLES
        for table, keys in tables.items()
        if table not in ("project", "tool")
        for key, value in keys.items()
        if isinstance(value, str) and ":" in value
    }
    assert seen == NAMED
    points = TABLES[0]["project"]["entry-points"]
    paths = [path for point in points.values() for path in point.values()]
    assert paths == ["my_rewards:judge", "my_engines:opened", "my_verbs:COMMANDS"]
    assert {path.rpartition(":")[2] for path in paths} <= names.keys()
    assert TABLES[0]["tool"]["setuptools"]["py-modules"] == [path.partition(":")[0] for path in paths]
    assert {kind.removeprefix("insitu.") for kind in points} <= {*registry.KINDS}


def test_the_page_names_every_kind() -> None:
    assert not [kind for kind in registry.KINDS if f"`insitu.{kind}`" not in PAGE]


def test_the_tasks_and_the_sampler(names: dict[str, Any]) -> None:
    resolved = config(names, **{"tasks.eval_share": 0.0})
    source = open_source(resolved, insitu.Limits(), runner_for)
    assert source.size("train") == 2
    draw = TaskDraws(TaskMix([TaskSet(arm=resolved.arms[""], source=source)]))
    assert draw(20) == draw(0)


async def test_the_reward(names: dict[str, Any]) -> None:
    scored = await score(names["judge"], make())
    assert scored.reward_components == {"solved": 1.0, "small": pytest.approx(-0.06), "calls": -0.02}


def test_the_hook(names: dict[str, Any]) -> None:
    hook = gateway_config(config(names)).hook
    assert hook is not None
    push = insitu.ToolEvent(rollout_id="r", call_id="c", name="Bash", arguments={"command": "git push -f"})
    long = insitu.ToolEvent(kind="result", rollout_id="r", call_id="c", name="Bash", text=20_001 * "x")
    assert names["guard"](push) == {"block": "Nothing may be pushed from here."}
    assert names["guard"](long) == {"remind": "Read files in parts."}
    assert names["guard"](replace(long, text="x")) is None


def test_the_loss_and_the_advantage(names: dict[str, Any]) -> None:
    resolved = config(names)
    inputs = LossInputs(mu=torch.tensor([-1.0]), advantage=torch.tensor([1.0]))
    loss = token_loss(torch.tensor([-1.0]), inputs, LossConfig(loss=resolved.train.loss)).loss
    assert loss.tolist() == [1.0]
    assert np.allclose(advantages([0.0, 1.0], resolved.train.advantage), [-0.5, 1.0])  # type: ignore[arg-type]


def test_the_sandbox_and_its_contract(names: dict[str, Any]) -> None:
    assert make_backend(config(names)).name == "named"
    assert issubclass(names["TestMine"], SandboxContract)


def test_the_engine_is_opened_by_its_name(names: dict[str, Any]) -> None:
    async def opened() -> Engine:
        resolved = insitu.load_config(None, {"engine.kind": names["opened"]})
        async with registry.find("engines", resolved.engine.kind)(resolved) as engine:
            return engine

    engine = asyncio.run(opened())
    assert engine.info.max_context_tokens == insitu.Config().model.max_context_tokens
    assert isinstance(engine, Engine)
    assert issubclass(names["TestBigrams"], EngineContract)


class TestTheEngine(EngineContract):
    vocab_size = 454

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, names: dict[str, Any]) -> Engine:
        return names["Bigrams"](2048)  # type: ignore[no-any-return]


def test_the_verb(
    names: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = ModuleType("my_verbs")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "my_verbs", module)
    (command,) = names["COMMANDS"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    rollout = make_rollout("train/00001/000/00")
    resolved = insitu.load_config(None, {"run.dir": str(tmp_path / "run")})
    with RunDir.create(resolved) as run, Store(run.path / "run.sqlite") as store:
        store.put_rollout("train", 1, 0, 0, rollout)
    assert command(parser.parse_args([str(tmp_path / "run")])) == 0
    assert int(capsys.readouterr().out) == sum(len(turn.ids) for turn in rollout.trajectory.turns) > 0
