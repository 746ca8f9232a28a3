"""A black box session told again in the tokens of a family: rows to imitate, kind `demonstrated`.

The record's calls go through a forest in their order, as live ones do, with the teacher's words where a
policy would have sampled. So prompts are spliced, branches found and every reply masked in once by the same
code. Caller: train.choose, for `insitu sft`.
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
from insitu.gateway.edit_diagnosis import explain
from insitu.gateway.prompt_ids import new_ids
from insitu.gateway.recorded_call import RecordedCall, parse_recorded_call
from insitu.types import Generation, Message, Segment


def distill_session(
    record: Path, renderer: ChatRenderer, rollout_id: str, *, drop_reasoning: bool = False
) -> tuple[Segment, ...]:
    """The rows of one session; `drop_reasoning`: as sessions with retention `template` do. Raises RenderError
    for a call that cannot be told, RecordError for a file that cannot be read."""
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
    delta = new_ids(renderer, forest, plan, call.request)
    node = forest.extend(plan, delta, explain(renderer, forest, plan))
    said = Generation(
        ids=renderer.render_reply(call.reply), logprobs=None, finish="stop", version_runs=((0, 0),)
    )
    sampled = forest.commit(node, said, _named(call.reply, ids), turn=turn)
    forest.mark_delivered(sampled)
    if call.cut:
        forest.exclude(sampled, "truncated")


def _named(reply: Message, known: set[str]) -> Message:
    """A provider may use a call id twice; then the turn is matched by what it says."""
    ids = [call.id for call in reply.tool_calls]
    if len(set(ids)) < len(ids) or known & set(ids):
        return replace(reply, tool_calls=tuple(replace(call, id="") for call in reply.tool_calls))
    known.update(ids)
    return reply


def _answered(record: Path) -> Iterator[RecordedCall]:
    """Calls that the agent got a whole answer to, in the order in which they began."""
    lines = [line for line in _lines(record) if line["complete"] and 200 <= line["status"] < 300]
    for line in sorted(lines, key=lambda line: line["turn"]):
        if line["truncated"]:
            raise RenderError(f"{record.name} turn {line['turn']}: the middle of the reply was not kept")
        if not isinstance(line["request"], dict):
            continue  # a list of models, for instance, has no body
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
