"""Stop strings: a wish that may only shorten a reply, kept on sampled ids.

Engines sample on neutral terms, so a stop string takes effect after them: the ids end with the first one
that completes the string in the visible text, never within reasoning or a call, and the agent gets the text
before the string. What was sampled behind it never becomes part of the session; the ledger counts it
(`after_stop`). So ids, logprobs and the text echoed later stay one thing. Caller: turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from insitu.chat.renderer import ChatRenderer, ParsedReply
from insitu.types import Generation, IntArray, ToolSpec


def cut_at_stop(
    renderer: ChatRenderer, generation: Generation, stops: Sequence[str], tools: Sequence[ToolSpec] = ()
) -> tuple[Generation, ParsedReply, str]:
    """What is kept of the generation, its meaning, and the stop string that ended it, not part of it."""
    parsed = renderer.parse(generation.ids, tools)
    ends = [parsed.text.find(stop) + len(stop) for stop in stops if stop in parsed.text]
    if not ends:
        return generation, parsed, ""
    count = _completing(renderer, generation.ids, parsed, parsed.text[: min(ends)], tools)
    generation = replace(
        generation,
        ids=generation.ids[:count],
        logprobs=None if generation.logprobs is None else generation.logprobs[:count],
        finish="stop",
        version_runs=tuple(run for run in generation.version_runs if run[0] < count),
    )
    parsed = renderer.parse(generation.ids, tools)
    found = min((parsed.text.find(stop), stop) for stop in stops if stop in parsed.text)
    return generation, replace(parsed, text=parsed.text[: found[0]]), found[1]


def _completing(
    renderer: ChatRenderer, ids: IntArray, whole: ParsedReply, visible: str, tools: Sequence[ToolSpec]
) -> int:
    """How many ids say the text `visible`, with which the text of the whole reply begins.

    An open call reads as text until it closes, so that a prefix of the ids may hold text that the whole reply
    does not. But once its text begins as the whole one does, so does that of every longer prefix, with a call
    open behind it or not: that can be bisected.
    """
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if renderer.parse(ids[:middle], tools).text.startswith(visible):
            high = middle
        else:
            low = middle + 1
    while low < len(ids):
        part = renderer.parse(ids[:low], tools)
        # An open call may spell the very text that follows it; then only the prefix is malformed.
        if part.text.startswith(visible) and part.malformed <= whole.malformed:
            break
        low += 1
    return low
