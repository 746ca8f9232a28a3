"""Stop strings: a wish that may only shorten a reply, kept on sampled ids.

Engines sample on neutral terms, so a stop string takes effect after them: the ids end with the first one
that completes the string, what was sampled behind it never becomes part of the session, and the agent gets
the text before the string. So ids, logprobs and the text echoed later stay one thing. Caller: turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whet.render.family import Family, ParsedReply
from whet.types import Generation, ToolSpec


def cut_at_stop(
    family: Family, generation: Generation, stops: Sequence[str], tools: Sequence[ToolSpec] = ()
) -> tuple[Generation, ParsedReply, str]:
    """What is kept of the generation, its meaning, and the stop string that ended it, not part of it."""
    parsed = family.parse(generation.ids, tools)
    if not any(stop in parsed.text for stop in stops):
        return generation, parsed, ""
    low, high = 1, len(generation.ids)  # the shortest prefix with a stop string has a length in [low, high]
    while low < high:
        middle = (low + high) // 2
        text = family.parse(generation.ids[:middle], tools).text
        if any(stop in text for stop in stops):
            high = middle
        else:
            low = middle + 1
    generation = replace(
        generation,
        ids=generation.ids[:low],
        logprobs=None if generation.logprobs is None else generation.logprobs[:low],
        finish="stop",
        version_runs=tuple(run for run in generation.version_runs if run[0] < low),
    )
    parsed = family.parse(generation.ids, tools)
    found = min((parsed.text.find(stop), stop) for stop in stops if stop in parsed.text)
    return generation, replace(parsed, text=parsed.text[: found[0]]), found[1]
