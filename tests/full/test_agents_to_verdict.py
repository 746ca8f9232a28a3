"""Whole attempts with real agents, task to verdict, in every kind of sandbox; only the policy is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from insitu.agents.base import ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import Installed, cache_folder, find
from insitu.agents.pool import Sockets, WorkerPool
from insitu.agents.recipe import named_recipe, shipped_recipes
from insitu.attempt import AttemptExecutor, AttemptSpec
from insitu.chat.template import TemplateRenderer
from insitu.errors import HarnessError
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.grader import Grader
from insitu.sandbox.base import SandboxBackend, SandboxSpec
from insitu.sandbox.docker import DockerBackend
from insitu.sandbox.local import LocalBackend
from insitu.types import (
    Case,
    GradingPlan,
    Limits,
    Oracle,
    Outcome,
    Rollout,
    Setup,
    Status,
    Task,
    Tree,
    Verdict,
    task_hash,
)
from insitu_lab.conformance.agent_tools import AGENT_TOOLS, AgentTools
from insitu_lab.conformance.run import make_harness
from insitu_lab.conformance.scripted_policy import FILES, PROMPT, RIGHT, ScriptedPolicy
from insitu_lab.open_renderer import Splitter, open_renderer
from insitu_train.demo.scripted import ScriptedEngine
from tests.fakes.agents import command_harness

pytestmark = pytest.mark.full

AGENTS = ("pi", "claude_code", "codex")
LIMITS = Limits(
    wall_s=150.0,
    max_calls=60,
    max_call_tokens=2048,
    max_session_tokens=1 << 20,
    max_context_tokens=AGENT_TOOLS["pi"].window_tokens,
)
CASES = tuple(Case(function="area", args=(w, h), expected=w * h) for w, h in ((3, 4), (2, 9), (0, 5)))
KNOCK = "import socket; socket.socket().connect_ex(('192.0.2.7', 80))"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    open_renderer(folder)
    return folder


@dataclass(frozen=True)
class Lab:
    backend: SandboxBackend
    image: str = ""


@pytest.fixture(params=["local", "docker"])
def lab(request: pytest.FixtureRequest) -> Lab:
    if request.param == "local":
        return Lab(LocalBackend("auto"))
    found: Lab = request.getfixturevalue("docker_lab")
    return found


@pytest.fixture
def docker_lab(docker_image: str) -> Lab:
    return Lab(DockerBackend(docker_image, cache=cache_folder()), docker_image)


class AreaJudge:
    """The grading side of one task."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    async def __call__(self, task: Task, tree: Tree) -> Verdict:
        return await self._grader.grade(task, Oracle(task_id=task.id, cases=CASES), tree)

    async def base(self, task: Task) -> Tree:
        return (await self._grader.bases.of(task)).files

    async def prepare(self, task: Task) -> None:
        await self._grader.prepare(task)

    scores_groups = False

    async def score(self, task: Task, rollout: Rollout) -> Rollout:
        return rollout

    async def score_group(self, task: Task, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        return rollouts


def task_for(setup: Setup) -> Task:
    grading = GradingPlan(runner="json_io", entry="app.py")
    return Task(
        id="area",
        prompt=PROMPT,
        files=FILES,
        setup=setup,
        grading=grading,
        limits=LIMITS,
        content_hash=task_hash(PROMPT, FILES, grading, setup),
    )


@asynccontextmanager
async def attempts(
    lab: Lab, name: str, play: AgentTools, model: Path, tmp_path: Path
) -> AsyncIterator[tuple[AttemptExecutor, ScriptedEngine]]:
    renderer: TemplateRenderer = open_renderer(model)
    policy = ScriptedPolicy(renderer, Splitter(model / "tokenizer.json", seed=5), play)
    engine = ScriptedEngine(renderer, policy, sampled=True)
    reported = ModelAccess(
        public_id="",
        secret="",
        max_call_tokens=LIMITS.max_call_tokens,
        max_context_tokens=LIMITS.max_context_tokens,
    )
    harness = make_harness(named_recipe(name), lab.backend, reported)
    grader = Grader(lab.backend)
    async with (
        Gateway(TokenBackend(engine, renderer)) as gateway,
        gateway.listen_unix(tmp_path / "g"),
        WorkerPool(harness, 1, Sockets([tmp_path / "g"]), strict=True) as workers,
    ):
        yield AttemptExecutor(gateway, workers, AreaJudge(grader)), engine
        await grader.close()


async def attempt(
    lab: Lab, name: str, play: AgentTools, model: Path, tmp_path: Path, setup: Setup
) -> tuple[Rollout, ScriptedEngine]:
    short = replace(play, spawn=None, wait=None, compacts=False, repeats=0)
    async with attempts(lab, name, short, model, tmp_path) as (under_test, engine):
        spec = AttemptSpec(rollout_id="eval/00001/000/00", task=task_for(setup), seed=1)
        return await under_test.run(spec), engine


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_that_mends_it_is_resolved_and_every_token_kept(
    lab: Lab, name: str, model: Path, tmp_path: Path
) -> None:
    setup = Setup(image=lab.image, commands=("echo set up > made.txt",))
    rollout, engine = await attempt(lab, name, AGENT_TOOLS[name], model, tmp_path, setup)
    assert (rollout.status, rollout.error, rollout.reward) == (Status.OK, "", 1.0)
    assert rollout.verdict is not None
    assert (rollout.verdict.outcome, rollout.verdict.trust) == (Outcome.RESOLVED, "strong")
    assert RIGHT in rollout.changed["app.py"].content.decode()
    assert rollout.changed["ran.txt"].content == b"checked\n"
    assert set(rollout.changed) == {"app.py", "ran.txt"}
    assert lab.image in rollout.verdict.image
    ledger = rollout.trajectory.ledger
    assert ledger.balanced
    assert len(engine.sent) >= 4
    assert ledger.trained == ledger.captured - sum(ledger.excluded.values())
    assert set(ledger.excluded) <= {"auxiliary"}
    assert rollout.egress_attempts is not None


async def test_the_sandboxes_have_next_to_nothing(docker_lab: Lab, tmp_path: Path) -> None:
    """What the tests above show, they show without any of this."""
    missing = "git xz node npm curl wget cc /etc/ssl/certs"
    look = f"for n in {missing}; do command -v $n || ls $n; done; id -u; cat /sys/class/net/*/address"
    async with await docker_lab.backend.create(SandboxSpec(image=docker_lab.image)) as sandbox:
        seen = await sandbox.exec(["sh", "-c", f"({look}) 2> /dev/null"], timeout_s=20)
    assert seen.stdout.decode().split() == ["1000", "00:00:00:00:00:00"]


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
async def test_every_agent_starts_in_an_image(docker_lab: Lab, name: str, tmp_path: Path) -> None:
    if find(shipped_recipes()[name]) is None:
        pytest.skip(f"{name} is not installed: insitu install {name}")
    harness = make_harness(named_recipe(name), docker_lab.backend, ModelAccess(public_id="", secret=""))
    async with harness.worker(tmp_path / "g", Setup(image=docker_lab.image)) as worker:
        assert worker.healthy


async def test_what_an_image_lacks_is_not_laid_on_the_agent(docker_lab: Lab, tmp_path: Path) -> None:
    setup = Setup(image=docker_lab.image)
    for harness, said in (
        (command_harness(["node18", "x"], docker_lab.backend), "node18 does not start in this image"),
        (RecipeHarness(BROKEN, docker_lab.backend, installed=installed_nowhere(tmp_path)), "libnone.so.1"),
    ):
        with pytest.raises(HarnessError, match=said) as caught:
            async with harness.worker(tmp_path / "g", setup):
                pass
        assert caught.value.infra


def installed_nowhere(tmp_path: Path) -> Installed:
    """An agent that misses a library of its own."""
    program = tmp_path / "broken-1" / "node_modules" / "run"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'libnone.so.1: cannot open shared object file' >&2; exit 127\n")
    program.chmod(0o755)
    return Installed(folder=tmp_path / "broken-1", program=("{root}/node_modules/run",))


BROKEN = replace(named_recipe("codex"), name="broken")


@pytest.mark.parametrize("name", AGENTS)
async def test_one_that_looks_for_the_answer_outside_earns_nothing(
    lab: Lab, name: str, model: Path, tmp_path: Path
) -> None:
    play = AGENT_TOOLS[name]
    knocks = replace(play, edit=lambda path, old, new: play.run(f'python3 -c "{KNOCK}"'))
    quiet, _ = await attempt(
        lab, name, replace(play, edit=lambda path, old, new: play.run("true")), model, tmp_path, Setup()
    )
    rollout, _ = await attempt(lab, name, knocks, model, tmp_path, Setup())
    for found in (quiet, rollout):
        assert (found.status, found.error, found.reward) == (Status.OK, "", 0.0)
        assert found.verdict is not None
        assert found.verdict.outcome is Outcome.UNRESOLVED
    assert quiet.egress_attempts is not None
    assert rollout.egress_attempts is not None
    assert rollout.egress_attempts > quiet.egress_attempts
