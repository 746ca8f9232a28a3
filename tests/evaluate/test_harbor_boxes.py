"""Verbs over sandboxes of Harbor's interface: what needs sandboxes for grading alone works, the rest is
refused."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from insitu.chat.renderer import ChatRenderer
from insitu.cli import main
from insitu.config import Config, load_config
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.grading.grader import Grader
from insitu.install_hints import install_extra
from insitu.progress.plain import PlainView
from insitu.runtime.engine import Sampler
from insitu.types import WORKDIR, HiddenTests, IntArray, Message, RequestKey
from insitu_fleet.harbor import HarborBackend
from insitu_lab.attacks.target import target_for, text
from insitu_train.demo.scripted import ScriptedEngine
from tests.fakes.harbor import local_environment

pytestmark = pytest.mark.slow

FAKE = ["sandbox.backend=harbor", "sandbox.environment=tests.fakes.harbor:local_environment",
        "sandbox.image=any"]  # fmt: skip
RIGHT, WRONG = "def f(n):\n    return n + 1\n", "def f(n):\n    return n\n"


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    cases = [{"function": "f", "args": [n], "expected": n + 1} for n in (1, 5)]
    row = {"id": "t", "prompt": "Write f.", "files": {"a.py": WRONG}, "entry": "a.py", "cases": cases}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"gold": {"a.py": RIGHT}}) + "\n")
    return ["tasks.source=jsonl", f"tasks.path={tmp_path / 'rows.jsonl'}", "tasks.eval_share=1"]


@asynccontextmanager
async def sampler(config: Config, renderer: ChatRenderer, log: Path, say: object) -> AsyncIterator[Sampler]:
    def policy(ids: IntArray, key: RequestKey) -> Message:
        solved = key.rollout_id.endswith("/00")
        return Message(role="assistant", text=f"```python\n{RIGHT if solved else WRONG + '# so'}\n```")

    async def check() -> None:
        return None

    yield Sampler(engine=ScriptedEngine(renderer, policy, sampled=True), check=check)


def test_rollouts_without_an_agent_are_graded_there_and_graded_again(
    tasks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(
        None,
        [*tasks, *FAKE, "harness.agent=single_turn", "rollout.samples=2", f"run.dir={tmp_path / 'run'}",
         "limits.max_call_tokens=512", "model.max_context_tokens=8192"],
    )  # fmt: skip
    summary = asyncio.run(collect_rollouts(config, PlainView(StringIO()), RolloutOptions(sampler=sampler)))
    assert (summary["graded"], summary["verdict"]["resolved"], summary["trust"]) == (2, 1, {"strong": 2})
    assert main(["grade", str(tmp_path / "run"), "--json"]) == 0
    compared, said = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    assert (said["resolved"], said["unresolved"], compared["compared"]["differences"]) == (1, 1, [])


def test_a_data_set_is_validated_there(
    tasks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = ["--repeats", "1", "--out", str(tmp_path / "gate"), "--json"]
    assert main(["tasks", "validate", *tasks, *FAKE, *gate]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passed"] == 1


def test_what_cannot_be_is_one_line(
    tasks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "any.toml").write_text("")
    assert (
        main(["rollout", str(tmp_path / "any.toml"), "--plain", *tasks, *FAKE, f"run.dir={tmp_path / 'run'}"])
        == 2
    )
    assert "insitu: agents in cloud sandboxes need the gateway's public URL: set" in capsys.readouterr().err
    if "harbor" not in sys.modules:
        there = ["sandbox.backend=harbor", "sandbox.environment=e2b", "sandbox.image=any"]
        assert main(["tasks", "validate", *tasks, *there, "--out", str(tmp_path / "gate")]) == 1
        assert f"install Harbor with `{install_extra('harbor')}` on Python 3.12" in capsys.readouterr().err


SCRIPT = f"""cd {WORKDIR} && python3 -c 'from app import total; assert total([1, 2]) == 3'
echo $((1 - $?)) > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize(
    "runner",
    [
        "json_io",
        pytest.param("command", marks=pytest.mark.full),
        pytest.param("swebench_log", marks=pytest.mark.full),
        "harbor",
    ],
)
async def test_every_runner_that_shows_no_folder_judges_there(runner: str) -> None:
    judged = target_for(runner)
    oracle = judged.oracle
    if runner == "harbor":  # the subject's own brings a whole pytest, file by file
        oracle = replace(oracle, tests=HiddenTests(files={"tests/test.sh": text(SCRIPT)}))
    backend = HarborBackend("fake", image="any", make=local_environment)
    await Grader(backend).validate(judged.task, oracle, repeats=1)
