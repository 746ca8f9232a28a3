"""Tokens that a provider bills, read from the reply or the events of any wire format; pure.

What follows the last reported usage (a stream without usage, one that was cut) is estimated from its bytes,
so that a cost limit cannot be evaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

from insitu.gateway.text_log import Usage

BYTES_PER_TOKEN = 3
"""Fewer than any tokenizer needs for English or code, so estimates are too high rather than too low. Each
event of a stream is rounded up, since most contain one token."""

_PROMPT = ("prompt_tokens", "input_tokens", "promptTokenCount")
_SAMPLED = ("completion_tokens", "output_tokens", "candidatesTokenCount", "thoughtsTokenCount")
_CONTENT = ("choices", "delta", "content_block", "candidates")
"""Fields of the four formats for the content of an event."""
_NO_TEXT = frozenset(
    {"type", "role", "id", "index", "status", "finish_reason", "finishReason", "stop_reason", "logprobs"}
    | {"logprobsResult", "safetyRatings", "citationMetadata", "groundingMetadata"}
)
"""Names within them that are not sampled text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices per million tokens, in any unit."""

    input: float = 0.0
    cached: float = 0.0
    """0 = as `input`."""
    cache_write: float = 0.0
    """Tokens written to the provider's cache; 0 = as `input`."""
    output: float = 0.0

    def cost(self, usage: Usage) -> float:
        fresh = max(0, usage.prompt_tokens - usage.cached_tokens - usage.written_tokens)
        prompt = fresh * self.input + usage.cached_tokens * (self.cached or self.input)
        prompt += usage.written_tokens * (self.cache_write or self.input)
        return (prompt + usage.sampled_tokens * self.output) / 1e6


def usage_of(request: bytes, reply: bytes, *, dropped: int = 0) -> Usage:
    """Return the usage as reported by the provider, estimated where it is not reported.

    `dropped`: bytes of the reply that were not kept.
    """
    events = _UsageEvents()
    for part in _parts(reply):
        events.add(part)
    if not events.read:
        events.unreported = _estimate(len(reply))
    prompt = events.prompt or len(request) // BYTES_PER_TOKEN
    if events.complete and not events.unreported:
        # The last event holds the totals, including events that were dropped.
        dropped = 0
    sampled = max(events.at_start, events.sampled + events.unreported + _estimate(dropped))
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=min(events.cached, prompt),
        written_tokens=min(events.written, prompt),
        sampled_tokens=sampled,
        estimated=not (events.prompt and events.complete) or bool(events.unreported or dropped),
    )


def unanswered(request: bytes) -> Usage:
    """Return the usage of a request without an answer: the prompt is known, the reply is not."""
    prompt = len(request) // BYTES_PER_TOKEN
    return Usage(prompt_tokens=prompt, cached_tokens=0, sampled_tokens=0, estimated=True)


class _UsageEvents:
    """Accumulates the usage of the objects of one answer, in their order."""

    def __init__(self) -> None:
        self.read = False
        """An object had usage or content."""
        self.prompt = self.cached = self.written = self.sampled = 0
        self.at_start = 0
        """Sampled tokens reported at the start of a stream, before the final number is known."""
        self.complete = False
        """The provider reported its sampled tokens."""
        self.unreported = 0
        """Estimated tokens since the provider last reported them."""

    def add(self, part: _Part) -> None:
        if part.value is None:
            self.unreported += _estimate(part.size)
            return
        usage = _usage(part.value)
        content_bytes = _content_bytes(part.value) if part.streamed else 0
        self.read = self.read or usage is not None or content_bytes > 0
        self.unreported += _estimate(content_bytes)
        if usage is None:
            return
        # Streams repeat and complete it: the largest numbers are the last ones.
        prompt, cached, written = _prompt(usage)
        self.prompt, self.cached = max(self.prompt, prompt), max(self.cached, cached)
        self.written = max(self.written, written)
        sampled = sum(_count(usage, key) for key in _SAMPLED)
        if part.value.get("type") == "message_start":
            self.at_start = max(self.at_start, sampled)
        elif not part.streamed or any(key in usage for key in _SAMPLED):
            self.sampled, self.complete, self.unreported = max(self.sampled, sampled), True, 0


def _estimate(size: int) -> int:
    """Return the estimated tokens of so many bytes, rounded up."""
    return -(-size // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A complete answer, or one event or chunk of it."""

    value: Mapping[str, object] | None
    """None for an unreadable event, e.g. where a stream was cut."""
    size: int
    """Bytes of an unreadable event."""
    streamed: bool


def _parts(reply: bytes) -> Iterator[_Part]:
    whole = _loads(reply)
    if whole is None:
        for line in reply.replace(b"\r\n", b"\n").split(b"\n"):
            data = line[5:].strip() if line.startswith(b"data:") else b""
            value = _loads(data)
            if isinstance(value, dict):
                yield _Part(value=value, size=0, streamed=True)
            elif data and data != b"[DONE]":
                yield _Part(value=None, size=len(data), streamed=True)
    for value in whole if isinstance(whole, list) else [whole]:
        if isinstance(value, dict):
            yield _Part(value=value, size=0, streamed=isinstance(whole, list))


def _content_bytes(value: Mapping[str, object]) -> int:
    """Return the bytes of text that a part of a stream adds to the answer."""
    held = [value.get(key) for key in _CONTENT]
    item = value.get("item")
    if isinstance(item, dict):
        # Reasoning that the agent may not read was sampled, too; the rest of an item repeats its parts.
        held.append(item.get("encrypted_content"))
    size = 0
    while held:
        part = held.pop()
        if isinstance(part, str):
            size += len(part.encode("utf-8", "surrogatepass"))
        elif isinstance(part, dict):
            held.extend(inner for key, inner in part.items() if key not in _NO_TEXT)
        elif isinstance(part, list):
            held.extend(part)
    return size


def _loads(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _usage(value: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the usage in one object, None without one."""
    for holder in (value, value.get("message"), value.get("response")):
        if not isinstance(holder, dict):
            continue
        for key in ("usage", "usageMetadata"):
            usage = holder.get(key)
            if isinstance(usage, dict) and any(_count(usage, name) for name in (*_PROMPT, *_SAMPLED)):
                return usage
    return None


def _prompt(usage: Mapping[str, object]) -> tuple[int, int, int]:
    """Return (all prompt tokens, those read from a cache, those written to one)."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    inside = _count(details, "cached_tokens") + _count(usage, "cachedContentTokenCount")
    # Anthropic counts what it cached beside the prompt, the others within it.
    beside = _count(usage, "cache_read_input_tokens")
    written = _count(usage, "cache_creation_input_tokens")
    prompt = sum(_count(usage, key) for key in _PROMPT)
    return prompt + beside + written, inside + beside, written + _count(details, "cache_write_tokens")


def _count(holder: object, key: str) -> int:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if type(value) is int and value > 0 else 0
