"""Reports to the operator of calls that failed or were refused: each once, as what it was, and no flood."""

from __future__ import annotations

import asyncio
import io

import pytest
from gateway_rig import ASK, Rig, said

from insitu.chat.template import TemplateRenderer
from insitu.errors import EngineError
from insitu.gateway.backend import CallReport
from insitu.gateway.request import GatewayConfig
from insitu.serving.console import Console
from insitu.types import Limits


def line_of(report: CallReport) -> str:
    stream = io.StringIO()
    Console(stream, json=False).call(report)
    return stream.getvalue()


async def test_a_failure_that_was_told_in_the_stream_is_no_stop(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(hold_headers_s=0.02, keep_alive_s=0.02)
    gone = EngineError("out of memory\nat layer 3")
    async with Rig(renderer, [said("x")], config=config, fail=lambda key: gone, delay_s=0.2) as rig:
        assert b"engine_failed" in await rig.stream({"messages": ASK, "stream": True})
        assert (await rig.post({"messages": ASK}))[0] == 403
        failed, refused = rig.reports
    assert (failed.turn, failed.outcome, failed.sampled_tokens) == (0, "engine_failed", 0)
    assert (refused.turn, refused.outcome, refused.count) == (-1, "session_failed", 1)
    assert failed.dead == refused.dead == "out of memory\nat layer 3"
    assert "| engine_failed |" in line_of(failed)
    assert line_of(failed).endswith("| session failed: out of memory at layer 3\n")
    assert line_of(refused).startswith("r/0 chat      refused: session_failed | session failed: ")


async def test_an_overflow_that_codex_hears_in_its_stream_is_no_stop(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")], limits=Limits(max_context_tokens=16, max_call_tokens=4)) as rig:
        body = {"model": "x", "stream": True, "input": "Fix this. " * 20}
        async with rig.http.post(f"{rig.base}/responses", json=body, headers=rig.auth) as answer:
            assert answer.status == 200
            assert b"context_length_exceeded" in await answer.read()
        assert [report.outcome for report in rig.reports] == ["context_length_exceeded"]
        assert rig.reports[0].dead == ""


async def test_refused_calls_are_told_with_their_cause(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        assert (await rig.post({"messages": ASK, "n": 2}))[0] == 400
        assert (await rig.post({"messages": ASK}, Authorization="Bearer wrong"))[0] == 401
        rig.session.leave()
        assert (await rig.post({"messages": ASK}))[0] == 409
        reported = [(report.rollout_id, report.outcome, report.turn) for report in rig.reports]
    assert reported == [
        ("r/0", "invalid_request", -1),
        ("", "unauthorized", -1),
        ("r/0", "session_closed", -1),
    ]


async def test_a_storm_of_refusals_is_counted_and_not_told_one_by_one(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.gateway.backend.INTERVAL_S", 0.3)
    async with Rig(renderer, [said("x")]) as rig:
        bad = {"messages": ASK, "n": 2}
        for _ in range(5):
            assert {status for status, _ in await asyncio.gather(*(rig.post(bad) for _ in range(40)))} == {
                400
            }
        async with asyncio.timeout(10):
            while rig.gateway.reports._pending:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert rig.reports[0].count == 1
        assert sum(report.count for report in rig.reports) == 200
        assert len(rig.reports) < 40
        assert "refused: invalid_request, " in line_of(rig.reports[1])
        await rig.post(bad)
        await rig.post(bad)
    assert [report.count for report in rig.reports[-2:]] == [1, 1], "what is held is reported at the end"
