"""Tokenizes a provider's recorded session as rows to imitate, kind `demonstrated`.

The recorded calls go through a forest in order, as live ones do, with the teacher's text in place of sampled
tokens, so prompts are spliced, branches found and every reply masked in once by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from insitu.capture.forest import Forest
from insitu.chat.renderer import ChatRenderer, dropping_roles
from insitu.errors import RecordError, RenderError, boundary
from insitu.gateway.dialects.base import WireError
from insitu.gateway.prompt_ids import explain, new_ids
from insitu.types import Generation, Message, Segment
from insitu_train.sft.recorded_call import RecordedCall, parse_recorded_call


def distill_session(
    record: Path, renderer: ChatRenderer, rollout_id: str, *, drop_reasoning: bool = False
) -> tuple[Segment, ...]:
    """Return the rows of one session.

    drop_reasoning: as sessions with model.keep_reasoning `template`. Raises RenderError for a call that
    cannot be rendered, RecordError for an unreadable file.
    """
    forest = Forest(rollout_id, reset_roles=dropping_roles(renderer) if drop_reasoning else frozenset())
    ids: set[str] = set()
    for turn, call in enumerate(_answered(record)):
        try:
            _append_call(forest, renderer, call, turn, ids)
        except RenderError as error:
            raise RenderError(f"{record.name} call {turn}: {error}") from error
    segments = forest.trajectory().segments
    return tuple(s for s in segments if s.kind == "demonstrated" and s.mask.any())


def _append_call(
    forest: Forest, renderer: ChatRenderer, call: RecordedCall, turn: int, ids: set[str]
) -> None:
    plan = forest.plan(call.request, renderer.fingerprint)
    delta, spans = new_ids(renderer, forest, plan, call.request)
    node = forest.extend(plan, delta, explain(renderer, forest, plan), spans)
    reply = Generation(
        ids=renderer.render_reply(call.reply), logprobs=None, finish="stop", version_runs=((0, 0),)
    )
    sampled = forest.commit(node, reply, _named(call.reply, ids), turn=turn)
    forest.mark_delivered(sampled)
    if call.cut:
        forest.exclude(sampled, "truncated")


def _named(reply: Message, known: set[str]) -> Message:
    """Clear the call ids of a reply when the provider reused one; the turn is then matched by content."""
    ids = [call.id for call in reply.tool_calls]
    if len(set(ids)) < len(ids) or known & set(ids):
        return replace(reply, tool_calls=tuple(replace(call, id="") for call in reply.tool_calls))
    known.update(ids)
    return reply


def _answered(record: Path) -> Iterator[RecordedCall]:
    """Yield calls with a complete reply, in the order in which they began."""
    lines = [line for line in _lines(record) if line["complete"] and 200 <= line["status"] < 300]
    for line in sorted(lines, key=lambda line: line["turn"]):
        if line["truncated"]:
            raise RenderError(f"{record.name} turn {line['turn']}: the recorded reply is truncated")
        if not isinstance(line["request"], dict):
            continue  # no body, e.g. a list of models
        try:
            call = parse_recorded_call(line["path"], line["request"], line["reply"])
        except WireError as error:
            raise RenderError(f"{record.name} turn {line['turn']}: {error}") from error
        if call is not None:
            yield call


def _lines(record: Path) -> Iterator[Mapping[str, Any]]:
    with boundary(RecordError, f"read {record}"), record.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # a kill can cut the last one
                yield orjson.loads(line)
