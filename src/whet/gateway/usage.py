"""What a provider's answer says it cost, in tokens: read from the reply or the events of any wire format.

Pure. Where an answer names no usage (a stream that nobody asked for it, a broken one) tokens are estimated
from the bytes, so that a limit on cost cannot be slipped past. Caller: passthrough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

BYTES_PER_TOKEN = 3
"""Fewer than any tokenizer needs for English or code: an estimate errs towards more tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call."""

    prompt_tokens: int
    """All of the prompt, cached ones included."""
    cached_tokens: int
    sampled_tokens: int
    estimated: bool = False
    """The provider did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Per million tokens, in any one unit."""

    input: float = 0.0
    cached: float = 0.0
    """0 = as `input`."""
    output: float = 0.0

    def cost(self, usage: Usage) -> float:
        fresh = usage.prompt_tokens - usage.cached_tokens
        cached = usage.cached_tokens * (self.cached or self.input)
        return (fresh * self.input + cached + usage.sampled_tokens * self.output) / 1e6


def usage_of(request: bytes, reply: bytes) -> Usage:
    """Usage as the provider says it, else estimated."""
    prompt = cached = sampled = 0
    found = False
    for value in _objects(reply):
        told = _told(value)
        if told is not None:
            found = True
            # Streams repeat and complete it: the largest numbers are the last ones.
            prompt, cached, sampled = max(prompt, told[0]), max(cached, told[1]), max(sampled, told[2])
    if found:
        return Usage(prompt_tokens=prompt, cached_tokens=min(cached, prompt), sampled_tokens=sampled)
    return Usage(
        prompt_tokens=len(request) // BYTES_PER_TOKEN,
        cached_tokens=0,
        sampled_tokens=len(reply) // BYTES_PER_TOKEN,
        estimated=True,
    )


def _objects(reply: bytes) -> Iterator[Mapping[str, object]]:
    """JSON objects of a whole answer, of its events, or of a JSON array of chunks."""
    whole = _loads(reply)
    for value in whole if isinstance(whole, list) else [whole]:
        if isinstance(value, dict):
            yield value
    if whole is None:
        for line in reply.replace(b"\r\n", b"\n").split(b"\n"):
            value = _loads(line[5:]) if line.startswith(b"data:") else None
            if isinstance(value, dict):
                yield value


def _loads(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _told(value: Mapping[str, object]) -> tuple[int, int, int] | None:
    """(prompt, cached, sampled) of one object, None when it names no usage."""
    for holder in (value, value.get("message"), value.get("response")):
        if not isinstance(holder, dict):
            continue
        for key in ("usage", "usageMetadata"):
            usage = holder.get(key)
            if isinstance(usage, dict):
                return _numbers(usage)
    return None


def _numbers(usage: Mapping[str, object]) -> tuple[int, int, int]:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    inside = _count(details, "cached_tokens") + _count(usage, "cachedContentTokenCount")
    # Anthropic counts what it cached beside the prompt, the others within it.
    beside = _count(usage, "cache_read_input_tokens")
    written = _count(usage, "cache_creation_input_tokens")
    prompt = sum(_count(usage, key) for key in ("prompt_tokens", "input_tokens", "promptTokenCount"))
    sampled = ("completion_tokens", "output_tokens", "candidatesTokenCount", "thoughtsTokenCount")
    return prompt + beside + written, inside + beside, sum(_count(usage, key) for key in sampled)


def _count(holder: object, key: str) -> int:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if type(value) is int and value > 0 else 0
