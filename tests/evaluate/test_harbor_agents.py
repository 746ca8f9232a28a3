"""Agents in sandboxes of Harbor's interface, which call the gateway at its public URL."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from insitu.agents.install import find
from insitu.agents.pi import RECIPE as PI
from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, load_config
from insitu.errors import ConfigError, PolicyUnsupported, SetupError
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.progress.plain import PlainView
from insitu.runtime.engine import Sampler
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend
from insitu.tasks.toy import ToyProblem, ToySource
from insitu.types import IntArray, Limits, Message, RequestKey
from insitu_fleet import public_url
from insitu_fleet.harbor import HarborBackend
from insitu_train.demo.demonstrator import call, edit
from insitu_train.demo.scripted import ScriptedEngine
from tests.fakes.harbor import FakeEnvironment

pytestmark = pytest.mark.slow

CLOUD = ["sandbox.backend=harbor", "sandbox.environment=tests.fakes.harbor:local_environment",
         "sandbox.image=any", "harness.workers=2", "harness.mode=fresh", "rollout.count=2",
         "limits.wall_s=60", "limits.max_call_tokens=512", "model.max_context_tokens=8192"]  # fmt: skip
DONE = Message(role="assistant", text="done")


@asynccontextmanager
async def solver(config: Config, renderer: ChatRenderer, log: Path, say: object) -> AsyncIterator[Sampler]:
    """Solve the first task and give up on the second."""
    source = ToySource(Limits())
    problems = [source.problem(task) for task in source.tasks("eval", 0, 2)]

    def policy(ids: IntArray, key: RequestKey) -> Message:
        p: ToyProblem = problems[int(key.rollout_id.split("/")[2])]
        solving = [call("read", path=p.path), edit(p, p.fault.old, p.fault.new), DONE]
        return solving[key.turn] if p is problems[0] else DONE

    async def check() -> None:
        return None

    yield Sampler(engine=ScriptedEngine(renderer, policy, sampled=True), check=check)


def run(tmp_path: Path, *overrides: str, shown: StringIO | None = None) -> dict[str, Any]:
    config = load_config(None, [*CLOUD, f"run.dir={tmp_path / 'run'}", *overrides])
    return dict(
        asyncio.run(collect_rollouts(config, PlainView(shown or StringIO()), RolloutOptions(sampler=solver)))
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reached() -> list[str]:
    port = free_port()
    return [f"gateway.listen={port}", f"gateway.public_url=http://127.0.0.1:{port}"]


@pytest.mark.full
@pytest.mark.parametrize("agent", ["script", "pi"])
def test_an_agent_works_in_a_cloud_and_is_graded_there(agent: str, tmp_path: Path) -> None:
    if agent == "pi" and find(PI) is None:
        pytest.skip("pi is not installed: insitu install pi")
    summary = run(tmp_path, *reached(), f"harness.agent={agent}")
    assert (summary["graded"], summary["verdict"]["resolved"]) == (2, 1), summary
    assert summary["calls"] == 3 + 1


def test_no_secret_is_in_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    plain = FakeEnvironment.exec

    async def exec_(self: FakeEnvironment, command: str, **more: Any) -> Any:
        seen.append(command)
        return await plain(self, command, **more)

    keys: list[str] = []
    from insitu.gateway.server import Gateway

    opened = Gateway.open_session

    def open_session(self: Gateway, *args: Any, **more: Any) -> Any:
        session = opened(self, *args, **more)
        keys.append(session.secret)
        return session

    monkeypatch.setattr(FakeEnvironment, "exec", exec_)
    monkeypatch.setattr(Gateway, "open_session", open_session)
    run(tmp_path, *reached(), "harness.agent=script")
    assert len(set(keys)) == 2
    assert seen
    assert not any(key in command for key in keys for command in seen)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], r"^agents in cloud sandboxes need the gateway's public URL: set gateway.listen and gat"),
        (["gateway.listen=1"], r"^agents in cloud sandboxes need the gateway's public URL"),
        (
            ["gateway.listen=1", "gateway.public_url=ftp://a"],
            r"^gateway.public_url: 'ftp://a' is not an http",
        ),
        (["gateway.public_url=https://a.example"], "gateway: public_url has no effect with listen = ''"),
    ],
)
def test_without_a_url_nothing_starts(settings: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        run(tmp_path, "harness.agent=script", *(each.replace("=1", f"={free_port()}") for each in settings))
    assert "\n" not in str(caught.value)


def test_a_url_that_leads_elsewhere_stops_the_run_before_the_first_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_url, "PUBLIC_S", 1.0)
    settings = [f"gateway.listen={free_port()}", f"gateway.public_url=http://127.0.0.1:{free_port()}"]
    with pytest.raises(SetupError, match=r"^the public URL http://\S+ does not lead to this run's gateway: "):
        run(tmp_path, "harness.agent=script", *settings)


def test_a_cloud_without_a_network_policy_is_refused_or_opened_by_the_user(tmp_path: Path) -> None:
    there = [*reached(), "harness.agent=script", "sandbox.environment=tests.fakes.harbor:open_environment"]
    with pytest.raises(
        SetupError, match=r"^no agent runs in sandboxes of harbor:\S+: they cannot be kept fr"
    ):
        run(tmp_path, *there)
    shown = StringIO()
    summary = run(tmp_path, *there, "sandbox.egress=open", shown=shown)
    assert summary["verdict"]["resolved"] == 1
    assert "can reach the Internet" in shown.getvalue()


def test_what_a_cloud_cannot_cut_from_the_network_is_graded_in_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, str]] = []
    for backend in (HarborBackend, LocalBackend):
        plain = backend.create

        async def create(self: Any, spec: SandboxSpec, plain: Any = plain) -> Any:
            sandbox = await plain(self, spec)
            if spec.label or self.name != "local":  # not the sandbox behind the stand-in
                started.append((self.name, spec.network))
            return sandbox

        monkeypatch.setattr(backend, "create", create)
    there = [*reached(), "harness.agent=script", "sandbox.environment=tests.fakes.harbor:shared_environment"]
    with pytest.raises(PolicyUnsupported, match=r"network_none; harbor:\S+ has not \(sandbox.fallback may"):
        run(tmp_path, *there, "sandbox.egress=open")
    summary = run(tmp_path, *there, "sandbox.egress=open", "sandbox.fallback=local")
    assert (summary["graded"], summary["verdict"]["resolved"]) == (2, 1), summary
    assert {(name.partition(":")[0], network) for name, network in started} == {
        ("harbor", "public"),
        ("local", "none"),
    }
