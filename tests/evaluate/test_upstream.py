"""`insitu rollout` before a provider, as a person runs it: a real process, real sandboxes, a fake provider
here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.cli import main
from insitu.shutdown import descendants
from insitu.storage.run_dir import has_rollouts, read_store
from insitu.tasks.toy import ToyProblem, make_problem
from insitu.types import Limits, Status
from insitu_train.run_report import show_run
from tests.fakes.provider import KEY, FakeProvider, serve_provider

pytestmark = pytest.mark.slow

DEADLINE_S = 90
TASKS, PER_TASK = 4, 3
SETTINGS = [
    "engine.kind=upstream", "engine.model=big-model", "engine.key_env=FAKE_KEY",
    "engine.prices={input=1.0, cached=0.1, output=10.0}",
    "harness.agent=script", "harness.workers=3", f"rollout.count={TASKS}", f"rollout.samples={PER_TASK}",
]  # fmt: skip
CALL_COST = (60 * 1.0 + 40 * 0.1 + 20 * 10.0) / 1e6


def problems() -> dict[str, ToyProblem]:
    """Prompt -> problem, of the tasks that these runs take."""
    from insitu.tasks.toy import ToySource

    source = ToySource(Limits())
    held = [source.problem(task) for task in source.tasks("eval", 0, TASKS)]
    return {problem.prompt: problem for problem in held}


class Player:
    """Solves every task but the first, whose attempts it leaves undone; counts by prompt."""

    def __init__(self) -> None:
        self.known = problems()
        self.begun: Counter[str] = Counter()

    def __call__(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        prompt = next(m["content"] for m in asked["messages"] if m["role"] == "user")
        problem = self.known[prompt]
        if any(m["role"] == "tool" for m in asked["messages"]):
            return {"content": "done"}
        self.begun[prompt] += 1
        if prompt == next(iter(self.known)):
            return {"content": "I do not know."}
        edits = [{"oldText": problem.fault.old, "newText": problem.fault.new}]
        arguments = json.dumps({"path": problem.path, "edits": edits})
        call = {"id": "call_1", "type": "function", "function": {"name": "edit", "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}


@asynccontextmanager
async def provider() -> AsyncIterator[FakeProvider]:
    async with serve_provider() as fake:
        fake.replies = Player()
        yield fake


def player(fake: FakeProvider) -> Player:
    assert isinstance(fake.replies, Player)
    return fake.replies


async def start(*arguments: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "insitu", "rollout", "--plain", "--json", *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(insitu.__file__).parents[1]), "FAKE_KEY": KEY},
    )  # fmt: skip


async def run(*arguments: object) -> tuple[int, dict[str, Any], str]:
    """(exit code, summary if there is one, stderr)."""
    process = await start(*arguments)
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out.splitlines()[-1]) if out else {}, err.decode()


def config_file(tmp_path: Path, fake: FakeProvider) -> list[object]:
    file = tmp_path / "rollout.toml"
    file.write_text(f'[engine]\nkind = "upstream"\nmodel = "big-model"\nurls = "{fake.url}"\n')
    return [file, f"run.dir={tmp_path / 'run'}", *SETTINGS]


@pytest.mark.full
async def test_a_provider_is_evaluated_with_an_agent_in_sandboxes(tmp_path: Path) -> None:
    async with provider() as fake:
        fake.busy = [(429, "0.2"), (503, "")]
        code, summary, err = await run(*config_file(tmp_path, fake))
    assert code == 0, err
    assert (summary["rollouts"], summary["graded"]) == (12, 12)
    assert summary["pass_at"]["1"]["value"] == summary["pass_at"]["3"]["value"] == 0.75
    assert summary["status"] == {"ok": 12, "truncated": 0, "agent_failed": 0, "infra_failed": 0}
    assert (summary["verdict"]["resolved"], summary["verdict"]["unresolved"]) == (9, 3)
    # Three say at once that they do not know, nine edit and then say that they are done.
    assert (summary["calls"], summary["sampled_tokens"]) == (21, 21 * 20)
    assert summary["cost"] == pytest.approx(21 * CALL_COST)
    assert summary["tries"] == 12, "what the provider was too busy for was waited for, not failed"
    assert summary["ledger"] == {"captured": 0, "trained": 0, "excluded": {}}
    assert len(fake.received) == 21 + 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert Counter(line["verdict"] for line in lines) == {"resolved": 9, "unresolved": 3}
    texts = "".join(file.read_text() for file in (tmp_path / "run" / "sessions").iterdir())
    assert texts.count("I do not know.") == 3
    assert KEY not in texts
    assert "pass@3" in (tmp_path / "run" / "report.txt").read_text()
    assert "  pass@3    0.750" in show_run(tmp_path / "run")


@pytest.mark.full
async def test_kill_9_loses_and_repeats_nothing_that_was_graded(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with provider() as fake:
        fake.reply_delay_s = 0.3
        process = await start(*config_file(tmp_path, fake))
        await stored(run_dir, 3, process)
        renderer = descendants(process.pid)
        process.kill()
        await process.communicate()
        with read_store(run_dir) as store:
            before = {o.rollout_id: o for o in store.outcomes("rollout", 0)}
        assert 0 < len(before) < TASKS * PER_TASK, "the kill came too late to tell"
        assert f"{len(before)} rollouts so far" in show_run(run_dir)
        assert await gone(renderer, 10.0)
        fake.reply_delay_s = 0.0
        asked = Counter(player(fake).begun)
        code, summary, err = await run("--resume", run_dir)
        assert code == 0, err
        again = player(fake).begun - asked
    with read_store(run_dir) as store:
        after = {o.rollout_id: o for o in store.outcomes("rollout", 0)}
    assert {name: after[name] for name in before} == before
    assert sum(again.values()) == TASKS * PER_TASK - len(before), "exactly the missing ones were run"
    assert (summary["graded"], summary["pass_at"]["3"]["value"]) == (12, 0.75)
    recorded = sum(len(f.read_text().splitlines()) for f in (run_dir / "sessions").iterdir())
    assert summary["calls"] == recorded >= 21, "what a killed try cost is counted"
    # Once more: nothing is left to do, and nothing is done.
    before_calls = len(fake.received)
    code, repeated, err = await run("--resume", run_dir)
    assert code == 0, err
    assert repeated == summary
    assert len(fake.received) == before_calls


async def test_ctrl_c_ends_it_within_five_seconds_without_orphans(tmp_path: Path) -> None:
    async with provider() as fake:
        fake.reply_delay_s = 60
        process = await start(*config_file(tmp_path, fake))
        async with asyncio.timeout(DEADLINE_S):
            while not fake.received:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        renderer = descendants(process.pid)
        assert renderer
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, err = await process.communicate()
        assert time.monotonic() - began <= 5.5
        assert process.returncode == 130
        assert b"Traceback" not in err
        assert await gone(renderer, 2.0)


@pytest.mark.full
async def test_a_refused_key_is_one_line_and_no_zero(tmp_path: Path) -> None:
    async with provider() as fake:
        config = config_file(tmp_path, fake)
        os.environ["OTHER_KEY"] = "not the key"
        try:
            code, summary, err = await run(*config, "engine.key_env=OTHER_KEY", "collect.attempts=1")
        finally:
            del os.environ["OTHER_KEY"]
        assert code == 1
        assert summary["status"]["infra_failed"] == 12
        assert (summary["graded"], summary["reward_mean"]) == (0, None)
        assert summary["pass_at"]["1"] == {
            "value": 0.0,
            "low": 0.0,
            "high": 1.0,
            "tasks": 0,
        }
        assert "HTTP 401" in summary["last_failure"]
        # The right key, and the same run comes to its end.
        code, summary, err = await run("--resume", tmp_path / "run", "engine.key_env=FAKE_KEY")
        assert code == 0, err
        assert summary["graded"] == 12
        with read_store(tmp_path / "run") as store:
            assert {o.status for o in store.outcomes("rollout", 0)} == {Status.OK}


async def test_a_provider_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    async with provider() as fake:
        config = config_file(tmp_path, fake)
    began = time.monotonic()
    code, _, err = await run(*config)
    assert code == 1
    line = err.splitlines()[-1]
    assert line.startswith(f"insitu: engine.urls: the provider at {fake.url} cannot be reached: ")
    assert time.monotonic() - began < 30.0, "no call waits for it"
    assert not (tmp_path / "run").exists()


@pytest.mark.full
async def test_the_cost_limit_stops_the_run_and_more_money_continues_it(tmp_path: Path) -> None:
    async with provider() as fake:
        limit = 10.5 * CALL_COST
        code, _, err = await run(*config_file(tmp_path, fake), f"engine.max_cost={limit}")
        assert code == 1
        line = err.splitlines()[-1]
        assert line.startswith("insitu: the cost limit is reached")
        assert line.endswith(f"continue with: insitu rollout --resume {tmp_path / 'run'}")
        # 11 calls reach it; no more than those under way at that moment may come on top.
        assert 11 <= len(fake.received) <= 13
        code, summary, err = await run("--resume", tmp_path / "run", "engine.max_cost=1")
        assert code == 0, err
        assert (summary["graded"], summary["verdict"]["resolved"]) == (12, 9)
        assert summary["cost"] == pytest.approx(summary["calls"] * CALL_COST)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a configuration file"),
        (["--resume", "/nowhere"], "is not a run directory"),
        (["nowhere.toml"], "cannot read nowhere.toml"),
        (["harness.agent=script", "rollout.count=1", "engine.kind=upstream"], "kind = 'upstream' needs url"),
    ],
)
def test_what_a_person_gets_wrong_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "--plain", "--json", *arguments]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("insitu: ")
    assert said in line


async def test_a_resumed_run_keeps_what_decides_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with provider() as fake:
        code, _, err = await run(*config_file(tmp_path, fake), "rollout.count=1", "rollout.samples=1")
        assert code == 0, err
        for change in ("run.seed=7", "engine.temperature=0.5", "rollout.count=2"):
            assert main(["rollout", "--plain", "--json", "--resume", str(tmp_path / "run"), change]) == 2
            assert f"drop {change}" in capsys.readouterr().err


async def stored(run_dir: Path, count: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while process.returncode is None:
            if has_rollouts(run_dir):
                with read_store(run_dir) as store:
                    if sum(store.phases().values()) >= count:
                        return
            await asyncio.sleep(0.02)
    pytest.fail("the run ended too early")


async def gone(pids: list[int], within_s: float) -> bool:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return not any(map(alive, pids))


def test_the_toy_tasks_of_this_file_are_told_apart() -> None:
    assert len(problems()) == TASKS
    assert make_problem(3).prompt == make_problem(3).prompt
