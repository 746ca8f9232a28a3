"""Rollouts as OpenTelemetry traces: a span per rollout, one per model call, with the `gen_ai` attributes.

The form is OTLP's JSON: one `ExportTraceServiceRequest` per line, for files and for `POST /v1/traces`. A
reward None is no attribute. Ids of traces and spans are functions of run, rollout and turn.
"""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from insitu.config import Config
from insitu.errors import SetupError
from insitu.types import Rollout, Turn
from insitu_bridges.records import StoredRollout
from insitu_train.words import Words

SEND_S = 10.0
_WHOLE = 1 << 40
_CLIENT, _INTERNAL = 3, 1


def to_otlp(stored: StoredRollout, run: str, model: str, words: Words | None = None) -> dict[str, Any]:
    """Return one export request with the spans of a rollout. words: decoder for texts of messages."""
    rollout, item = stored.item.rollout, stored.item
    trace = _id(run, rollout.id, size=16)
    root = _id(run, rollout.id, size=8)
    began = rollout.began_s or 0.0
    facts = {
        "insitu.rollout": rollout.id,
        "insitu.task": rollout.task_id,
        "insitu.group": item.group_id,
        "insitu.status": rollout.status.value,
        "insitu.used": item.reason,
        "insitu.reward": rollout.reward,
        "insitu.advantage": item.advantage,
    }
    whole = _span(
        trace, root, "", f"rollout {rollout.task_id}", began, began + rollout.timings.total_s, facts
    )
    spans = [whole | {"kind": _INTERNAL, "status": _status(rollout)}]
    for turn in rollout.turns:
        name = _id(run, rollout.id, str(turn.index), size=8)
        start = turn.times.began_s or began
        found = _span(
            trace, name, root, "chat", start, turn.times.ended_s or start, _call(turn, model, words)
        )
        spans.append(found | {"kind": _CLIENT})
    resource = {"attributes": _attributes({"service.name": "insitu", "insitu.run": run})}
    scope = [{"scope": {"name": "insitu"}, "spans": spans}]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scope}]}


def _id(*parts: str, size: int) -> str:
    return hashlib.sha256("\0".join((*parts, str(size))).encode()).hexdigest()[: 2 * size]


def _status(rollout: Rollout) -> dict[str, Any]:
    return {"code": 2, "message": rollout.error} if rollout.error else {"code": 1}


def _span(
    trace: str, name: str, parent: str, title: str, start: float, end: float, facts: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "traceId": trace,
        "spanId": name,
        "parentSpanId": parent,
        "name": title,
        "startTimeUnixNano": str(round(start * 1e9)),
        "endTimeUnixNano": str(round(max(start, end) * 1e9)),
        "attributes": _attributes(facts),
    }


def _call(turn: Turn, model: str, words: Words | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "insitu",
        "gen_ai.request.model": model,
        "gen_ai.usage.output_tokens": len(turn.ids),
        "gen_ai.response.finish_reasons": [turn.finish],
        "insitu.turn": turn.index,
        "insitu.parent_turn": turn.parent,
        "insitu.new_prompt_tokens": len(turn.context_ids),
        "insitu.excluded": turn.excluded,
    }
    if words is not None:
        asked = words.messages(turn.context_ids, _WHOLE, turn.spans)
        new = [_message(one["role"], one["text"]) for one in asked]
        facts["gen_ai.input.messages"] = orjson.dumps(new).decode()
        reply = [_message("assistant", words.bare_text(turn.ids))]
        facts["gen_ai.output.messages"] = orjson.dumps(reply).decode()
    return facts


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


class OtlpWriter:
    """Writes requests to data/spans.jsonl, and to a receiver where a URL is given."""

    def __init__(self, folder: Path, config: Config, words: Words | None, url: str) -> None:
        self._file, self._url, self._words = folder / "data" / "spans.jsonl", url, words
        self._run = Path(config.run.dir).name
        self._model = Path(config.model.path).name or "demo"

    def add(self, stored: StoredRollout) -> None:
        """Write one rollout. Raises SetupError when the receiver does not take it."""
        body = orjson.dumps(to_otlp(stored, self._run, self._model, self._words))
        with self._file.open("ab") as file:
            file.write(body + b"\n")
        if self._url:
            send(self._url, body)


def send(url: str, body: bytes) -> None:
    """Post one request to an OTLP receiver (`http://host:4318/v1/traces`). Raises SetupError."""
    if not url.startswith(("http://", "https://")):
        raise SetupError(f"{url} is not an http URL of an OTLP receiver, as http://127.0.0.1:4318/v1/traces")
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SEND_S):
            pass
    except (urllib.error.URLError, OSError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise SetupError(f"the OTLP receiver at {url} did not take the spans: {error}") from error
