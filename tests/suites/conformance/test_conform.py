"""A real Pi against the gateway; what the checks find when the books do not balance; the recordings."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from insitu.agents.recipe import Recipe, named_recipe
from insitu.errors import ConfigError, SetupError
from insitu.gateway.request import GatewayCounters
from insitu.sandbox.local import LocalBackend
from insitu.types import Ledger, Trajectory
from insitu_lab.conformance import checks, run
from insitu_lab.conformance.agent_tools import AgentTools
from insitu_lab.conformance.checks import ConformanceResult
from insitu_lab.conformance.table import choose


@pytest.fixture
def backend(needs_pi: None) -> LocalBackend:
    return LocalBackend("auto")


@pytest.mark.slow
async def test_pi_conforms_and_leaves_a_recording(backend: LocalBackend, tmp_path: Path) -> None:
    finding = await run.conform(named_recipe("pi"), backend, tmp_path)
    assert finding.failures == ()
    assert finding.sampled == finding.trained + sum(finding.excluded.values())
    assert finding.unexplained == 0
    assert set(finding.excluded) <= {"auxiliary"}
    assert finding.compactions >= 1
    assert finding.split >= 0.2
    text = lzma.decompress((tmp_path / "pi.jsonl.xz").read_bytes())
    lines = [json.loads(line) for line in text.splitlines()]
    head = lines[0]
    assert (head["agent"], head["version"], head["format"]) == ("pi", finding.version, 1)
    assert len(head["books"]["parents"]) == finding.calls
    assert "final" in head["books"]["labels"]
    assert [line["i"] for line in lines[1:]] == list(range(finding.calls))
    assert {(line["method"], line["path"], line["status"]) for line in lines[1:]} == {
        ("POST", "/v1/chat/completions", 200)
    }
    assert all("data: " in line["reply"] and line["body"]["messages"] for line in lines[1:])


@pytest.mark.slow
async def test_lost_or_changed_tokens_fail_the_checks(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = run.judge
    seen: list[ConformanceResult] = []

    def twisted(version, play, policy, engine, session, result, trajectory: Trajectory) -> ConformanceResult:
        def again(**changes: object) -> ConformanceResult:
            changed = replace(trajectory, **changes)
            return kept(version, play, policy, engine, session, result, changed)

        turns, ledger = trajectory.turns, trajectory.ledger
        odd = replace(turns[0], ids=np.flip(turns[0].ids))
        seen.append(again(turns=(odd, *turns[1:])))
        seen.append(again(turns=turns[:-1]))
        seen.append(again(ledger=replace(ledger, captured=ledger.captured - 1, trained=ledger.trained - 1)))
        seen.append(again(segments=trajectory.segments[:-1]))
        # Every book balances, and nothing is trained.
        side = tuple(replace(turn, excluded="auxiliary") for turn in turns)
        idle = Ledger(captured=ledger.captured, trained=0, excluded={"auxiliary": ledger.captured})
        seen.append(again(turns=side, segments=(), ledger=idle))
        # One turn of the main line, too short for the 99 %.
        count = min(len(turn.ids) for turn in turns)
        short = next(turn.index for turn in turns if len(turn.ids) == count)
        one = tuple(replace(t, excluded="auxiliary" if t.index == short else t.excluded) for t in turns)
        seen.append(again(turns=one))
        return again()

    monkeypatch.setattr(run, "judge", twisted)
    finding = await run.conform(named_recipe("pi"), backend)
    assert finding.ok
    words = [" ".join(found.failures) for found in seen]
    assert "turn 0: the ids kept are not those sampled" in words[0]
    assert "are not in the trajectory" in words[1]
    assert seen[2].unexplained == 1
    assert "are booked as trained" in words[3]
    assert "tokens of main line and sub-agents are not trainable: ['auxiliary']" in words[4]
    assert "are booked as auxiliary and were said on the main line" in words[4]
    assert "are booked as auxiliary and were said on the main line" in words[5]
    assert "tokens stand in turns that are not excluded" in words[5]
    assert not any(found.ok for found in seen)


@pytest.mark.slow
async def test_an_agent_that_cannot_be_installed_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise SetupError("npm could not install it")

    monkeypatch.setattr(run, "make_harness", missing)
    finding = await run.conform(named_recipe("codex"), LocalBackend("auto"))
    assert finding.failures == ("npm could not install it",)
    assert finding.as_json()["ok"] is False


@pytest.mark.slow
async def test_an_agent_whose_own_prompt_fills_the_window_gets_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Qwen Code 0.23, whose prompt has 40,000 tokens: after each compaction it wants to read a file again
    before it edits it."""
    windows = []

    async def conformed(recipe: Recipe, play: AgentTools, *_: object) -> ConformanceResult:
        windows.append(play.window_tokens)
        window_too_small = play.window_tokens < 100_000
        return ConformanceResult(
            window_too_small=window_too_small, failures=("the task is not done",) if window_too_small else ()
        )

    monkeypatch.setattr(run, "_conform", conformed)
    assert (await run.conform(named_recipe("qwen_code"), LocalBackend("auto"))).ok
    assert windows == [48_000, 72_000, 108_000]


def test_agents_are_chosen_by_name() -> None:
    chosen = choose("claude-code, pi@0.86.1,pi@0.86.1", "", None)
    assert [(name, recipe.version) for name, recipe in chosen.items()] == [
        ("claude_code", named_recipe("claude_code").version),
        ("pi@0.86.1", "0.86.1"),
    ]
    assert set(choose("", "", None)) == set(run.AGENT_TOOLS)
    with pytest.raises(ConfigError, match="unknown name 'codx' of kind agents; did you mean codex"):
        choose("codx", "", None)


def test_the_task_is_done_only_when_the_check_was_run() -> None:
    assert not checks.task_done({})


def test_defects_and_requests_without_the_secret_are_failures() -> None:
    assert list(checks.traffic_failures(GatewayCounters(requests=9, refused=2, client_gone=1))) == []
    words = list(checks.traffic_failures(GatewayCounters(defects=2, unauthorized=3)))
    assert words[0].startswith("the gateway itself failed at 2")
    assert words[1].startswith("3 requests came without")
