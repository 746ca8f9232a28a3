"""What a provider's answer says it cost, in tokens: read from the reply or the events of any wire format.

Pure. What came after the last usage that an answer names (a stream that nobody asked for it, one that was
cut: its beginning may name the prompt's) is estimated from the bytes, so that a limit on cost cannot be
slipped past. Caller: black_sandbox_call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

BYTES_PER_TOKEN = 3
"""Fewer than any tokenizer needs for English or code: an estimate errs towards more tokens. Of a stream each
event is rounded up, since most hold one token."""

_PROMPT = ("prompt_tokens", "input_tokens", "promptTokenCount")
_SAMPLED = ("completion_tokens", "output_tokens", "candidatesTokenCount", "thoughtsTokenCount")
_SAID = ("choices", "delta", "content_block", "candidates")
"""Where the four formats put what an event adds."""
_NO_TEXT = frozenset(
    {"type", "role", "id", "index", "status", "finish_reason", "finishReason", "stop_reason", "logprobs"}
    | {"logprobsResult", "safetyRatings", "citationMetadata", "groundingMetadata"}
)
"""Names within them of what was not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call."""

    prompt_tokens: int
    """All of the prompt, cached ones included."""
    cached_tokens: int
    """Of the prompt, read from the provider's cache."""
    written_tokens: int = 0
    """Of the prompt, written to the provider's cache."""
    sampled_tokens: int
    estimated: bool = False
    """The provider did not say all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Per million tokens, in any one unit."""

    input: float = 0.0
    cached: float = 0.0
    """0 = as `input`."""
    written: float = 0.0
    """Of what is written to the provider's cache; 0 = as `input`."""
    output: float = 0.0

    def cost(self, usage: Usage) -> float:
        fresh = max(0, usage.prompt_tokens - usage.cached_tokens - usage.written_tokens)
        prompt = fresh * self.input + usage.cached_tokens * (self.cached or self.input)
        prompt += usage.written_tokens * (self.written or self.input)
        return (prompt + usage.sampled_tokens * self.output) / 1e6


@dataclass(slots=True, kw_only=True)
class Spent:
    """Sums over calls; they only grow."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    estimated_calls: int = 0
    """Calls whose tokens the provider did not report."""
    cost: float = 0.0

    def add(self, usage: Usage, cost: float) -> None:
        self.calls += 1
        self.prompt_tokens += usage.prompt_tokens
        self.sampled_tokens += usage.sampled_tokens
        self.estimated_calls += usage.estimated
        self.cost += cost


def usage_of(request: bytes, reply: bytes, *, dropped: int = 0) -> Usage:
    """Usage as the provider says it; what it did not say is estimated.

    `dropped`: bytes of the reply that were not kept.
    """
    told = _UsageEvents()
    for part in _parts(reply):
        told.hear(part)
    if not told.read:
        told.unsaid = _estimate(len(reply))
    prompt = told.prompt or len(request) // BYTES_PER_TOKEN
    if told.complete and not told.unsaid:
        # The last event says it all, also of what was not kept.
        dropped = 0
    sampled = max(told.least, told.sampled + told.unsaid + _estimate(dropped))
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=min(told.cached, prompt),
        written_tokens=min(told.written, prompt),
        sampled_tokens=sampled,
        estimated=not (told.prompt and told.complete) or bool(told.unsaid or dropped),
    )


def unanswered(request: bytes) -> Usage:
    """Of a request for whose answer nobody waited: what the provider read is known, what it said is not."""
    prompt = len(request) // BYTES_PER_TOKEN
    return Usage(prompt_tokens=prompt, cached_tokens=0, sampled_tokens=0, estimated=True)


class _UsageEvents:
    """What the objects of one answer say, in their order."""

    def __init__(self) -> None:
        self.read = False
        """There was an object that says something."""
        self.prompt = self.cached = self.written = self.sampled = 0
        self.least = 0
        """Sampled tokens that a beginning names: it cannot know how many more there will be."""
        self.complete = False
        """The provider named its sampled tokens."""
        self.unsaid = 0
        """Estimate of what came after the provider last named them."""

    def hear(self, part: _Part) -> None:
        if part.value is None:
            self.unsaid += _estimate(part.size)
            return
        usage = _usage(part.value)
        said = _said(part.value) if part.streamed else 0
        self.read = self.read or usage is not None or said > 0
        self.unsaid += _estimate(said)
        if usage is None:
            return
        # Streams repeat and complete it: the largest numbers are the last ones.
        prompt, cached, written = _prompt(usage)
        self.prompt, self.cached = max(self.prompt, prompt), max(self.cached, cached)
        self.written = max(self.written, written)
        sampled = sum(_count(usage, key) for key in _SAMPLED)
        if part.value.get("type") == "message_start":
            self.least = max(self.least, sampled)
        elif not part.streamed or any(key in usage for key in _SAMPLED):
            self.sampled, self.complete, self.unsaid = max(self.sampled, sampled), True, 0


def _estimate(size: int) -> int:
    """Tokens of so many bytes, upwards."""
    return -(-size // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A whole answer, or one event or chunk of it."""

    value: Mapping[str, object] | None
    """None for an event that cannot be read, as where a stream was cut."""
    size: int
    """Bytes of such an event."""
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


def _said(value: Mapping[str, object]) -> int:
    """Bytes of what a part of a stream adds to the answer: every string there that is no name of ours."""
    held = [value.get(key) for key in _SAID]
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
    """The usage that one object names, None when it names none."""
    for holder in (value, value.get("message"), value.get("response")):
        if not isinstance(holder, dict):
            continue
        for key in ("usage", "usageMetadata"):
            usage = holder.get(key)
            if isinstance(usage, dict) and any(_count(usage, name) for name in (*_PROMPT, *_SAMPLED)):
                return usage
    return None


def _prompt(usage: Mapping[str, object]) -> tuple[int, int, int]:
    """(all of the prompt, what of it was read from a cache, what of it was written to one)."""
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
