"""Stop strings, applied to sampled ids.

Engines sample without stop strings: the ids are cut after the first one that completes the string in the
visible text, never within reasoning or a call, and the agent gets the text before the string. The rest never
becomes part of the session; the ledger counts it (`after_stop`). So ids, logprobs and the text sent back
later agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from insitu.chat.renderer import ChatRenderer, ParsedReply
from insitu.types import Generation, IntArray, ToolSpec


def cut_at_stop(
    renderer: ChatRenderer, generation: Generation, stops: Sequence[str], tools: Sequence[ToolSpec] = ()
) -> tuple[Generation, ParsedReply, str]:
    """Return the kept generation, its parsed reply, and the stop string, which is not part of the text."""
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
    """Return how many ids produce the text `visible`, a prefix of the whole text.

    An open call parses as text until it closes, so a prefix of the ids may have text that the whole reply
    does not have. But once the text of a prefix begins like the whole text, so does that of every longer
    prefix, which allows bisection.
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
