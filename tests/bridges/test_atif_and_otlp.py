"""Exports that people look at: ATIF for Harbor's viewer, OpenTelemetry spans for tracing tools."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import insitu
from insitu.cli import main
from insitu.errors import SetupError


@pytest.fixture(scope="module")
def job(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("atif") / "out"
    insitu.export_run(run, out, to="atif")
    return out / "data" / run.name


def test_a_trial_holds_messages_ids_and_reward(run: Path, job: Path) -> None:
    rollouts = insitu.open_run(run).rollouts()
    assert len(list(job.iterdir())) == len(rollouts)
    for rollout in rollouts:
        trial = job / rollout.id.replace("/", "-")
        made = json.loads((trial / "agent" / "trajectory.json").read_text())
        parts = [made, *made.get("subagent_trajectories", [])]
        assert len({part["trajectory_id"] for part in parts}) == len(parts)
        steps = [step for part in parts for step in part["steps"]]
        assert all(
            [s["step_id"] for s in part["steps"]] == list(range(1, len(part["steps"]) + 1)) for part in parts
        )
        calls = {step["extra"]["turn"]: step for step in steps if step.get("llm_call_count") == 1}
        assert set(calls) == {turn.index for turn in rollout.turns}, "each call once"
        for turn in rollout.turns:
            metrics = calls[turn.index]["metrics"]
            assert metrics["completion_token_ids"] == turn.ids.tolist()
            assert turn.logprobs is None or metrics["logprobs"] == turn.logprobs.tolist()
            datetime.fromisoformat(calls[turn.index]["timestamp"])
        result = json.loads((trial / "result.json").read_text())
        assert made["extra"]["reward"] == rollout.reward
        assert ("verifier_result" in result) == (rollout.reward is not None)


def test_results_of_tools_belong_to_the_reply_that_asked(job: Path) -> None:
    made = [json.loads(path.read_text()) for path in job.glob("*/agent/trajectory.json")]
    parts = [part for one in made for part in (one, *one.get("subagent_trajectories", []))]
    steps = [step for part in parts for step in part["steps"]]
    assert any("tool_calls" in step for step in steps)
    assert all(step["source"] == "agent" for step in steps if "observation" in step or "tool_calls" in step)


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[bytes]]]:
    """An HTTP server that keeps what is posted."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join(5)
    server.server_close()


def decoded(body: bytes) -> list[Any]:
    """Spans of a request, read by OpenTelemetry's own schema; OTLP writes ids as hex, protobuf as base64."""

    def with_ids(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: base64.b64encode(bytes.fromhex(item)).decode()
                if key in ("traceId", "spanId", "parentSpanId")
                else with_ids(item)
                for key, item in value.items()
            }
        return [with_ids(item) for item in value] if isinstance(value, list) else value

    request = json_format.ParseDict(with_ids(json.loads(body)), ExportTraceServiceRequest())
    return [
        span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_spans_arrive_at_a_receiver(run: Path, tmp_path: Path, receiver: tuple[str, list[bytes]]) -> None:
    url, bodies = receiver
    out = tmp_path / "out"
    argv = [
        "export",
        str(run),
        "--to",
        "otlp",
        "--out",
        str(out),
        "--phase",
        "train",
        "--send",
        f"{url}/v1/traces",
    ]
    assert main(argv) == 0
    stored = insitu.open_run(run).rollouts(phase="train")
    assert bodies == (out / "data" / "spans.jsonl").read_bytes().splitlines()
    by_id = {}
    for body in bodies:
        root, *calls = decoded(body)
        assert {call.parent_span_id for call in calls} == {root.span_id}
        assert {span.trace_id for span in calls} == {root.trace_id}
        assert len({span.span_id for span in (root, *calls)}) == len(calls) + 1
        by_id[attributes(root)["insitu.rollout"]] = (root, calls)
    assert set(by_id) == {one.id for one in stored}
    for rollout in stored:
        root, calls = by_id[rollout.id]
        facts = attributes(root)
        assert facts.get("insitu.reward") == rollout.reward
        assert len(calls) == len(rollout.turns)
        for call, turn in zip(calls, rollout.turns, strict=True):
            assert attributes(call)["gen_ai.usage.output_tokens"] == len(turn.ids)
            assert json.loads(attributes(call)["gen_ai.output.messages"])[0]["role"] == "assistant"
            if turn.times.began_s is not None:
                assert call.start_time_unix_nano == round(turn.times.began_s * 1e9)
            assert call.end_time_unix_nano >= call.start_time_unix_nano > 0


def test_spans_have_the_same_ids_each_time(run: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        insitu.export_run(run, tmp_path / name, to="otlp", phase="eval_after")
    assert (tmp_path / "a/data/spans.jsonl").read_bytes() == (tmp_path / "b/data/spans.jsonl").read_bytes()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1/traces", "ftp://x", "127.0.0.1:4318"])
def test_a_receiver_that_is_not_there_is_named(run: Path, tmp_path: Path, url: str) -> None:
    with pytest.raises(SetupError, match="OTLP receiver"):
        insitu.export_run(run, tmp_path / "out", to="otlp", send=url)


def test_send_needs_spans(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--send", "http://x"]) == 2
    assert "--send URL only applies to --to otlp" in capsys.readouterr().err
