"""What makes two messages the same: keys by meaning, never by raw text.

Agents re-order argument keys, re-dump JSON and drop reasoning, so a key is made of digests of the meaning.
Text is compared exactly: no agent measured trims it. A key holds no text, so a forest in memory holds none.
Pure; used by `forest` for every message of every request, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from whet.types import Message, ToolSpec


class MessageKey(NamedTuple):
    """Meaning of one message as digests, part by part, so that a difference can be named."""

    role: str
    text: bytes
    names: tuple[str, ...]
    """Tool names in call order."""
    arguments: tuple[bytes, ...]
    """Digest of each call's canonical arguments."""
    answers: str
    """For role tool: which call it answers, by position, so that regenerated ids do not matter."""
    reasoning: bytes
    """Empty when the message carries none."""


def digest(*parts: str | bytes) -> bytes:
    """16 bytes over length-prefixed parts: no two different lists of parts run together."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        h.update(len(raw).to_bytes(8, "big"))
        h.update(raw)
    return h.digest()


def root_key(fingerprint: str, system: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
    """Hex SHA-256 over family, leading system messages and tools (order counts: it is rendered)."""
    h = hashlib.sha256(digest(fingerprint))
    h.update(digest(*(message.text for message in system)))
    for tool in tools:
        h.update(digest(tool.name, tool.description, tool.parameters))
    return h.hexdigest()


def leading_system(messages: Sequence[Message]) -> int:
    """How many system messages stand before anything else: they belong to the root."""
    for index, message in enumerate(messages):
        if message.role != "system":
            return index
    return len(messages)


def _number(text: str) -> int | float:
    """JavaScript agents write 1.0 as 1, so whole floats are the same as ints."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_READ = json.JSONDecoder(parse_float=_number, parse_constant=_refuse)
_WRITE = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def canonical_arguments(text: str) -> str:
    """One spelling for all JSON texts of the same value; text that is not JSON stands for itself.

    Duplicate keys: the last wins, as every parser of an agent has it. Empty and null mean no arguments.
    """
    if not text.strip():
        return "json:{}"
    try:
        value = _READ.decode(text)
        plain = _WRITE.encode(value)
    except (ValueError, RecursionError):  # malformed, over-long numbers, absurd depth
        return "text:" + text
    return "json:{}" if value is None else "json:" + plain


_NOTHING = digest("")


def message_key(message: Message, answers: str = "") -> MessageKey:
    """Key of one message; `answers` is what `message_keys` resolved for a tool message."""
    return MessageKey(
        role=message.role,
        text=digest(message.text) if message.text else _NOTHING,
        names=tuple(call.name for call in message.tool_calls),
        arguments=tuple(digest(canonical_arguments(call.arguments)) for call in message.tool_calls),
        answers=answers,
        reasoning=digest(message.reasoning) if message.reasoning else b"",
    )


def message_keys(messages: Sequence[Message]) -> list[MessageKey]:
    """Keys of a conversation. A tool message is tied to its call by position (assistant turns back, ordinal),
    so an agent that invents new ids consistently still matches."""
    keys: list[MessageKey] = []
    owner: dict[str, tuple[int, int]] = {}
    said = 0
    for message in messages:
        answers = ""
        if message.role == "assistant":
            said += 1
            owner.update((call.id, (said, ordinal)) for ordinal, call in enumerate(message.tool_calls))
        elif message.role == "tool" and message.tool_call_id in owner:
            turn, ordinal = owner[message.tool_call_id]
            answers = f"{said - turn}.{ordinal}"
        keys.append(message_key(message, answers))
    return keys


def same(held: MessageKey, got: MessageKey) -> bool:
    """True when `got` (from a request) means what `held` means. Reasoning that is not echoed equals any."""
    return held == got or (not got.reasoning and held[:-1] == got[:-1])


def same_run(held: Sequence[MessageKey], got: Sequence[MessageKey], start: int) -> bool:
    """True when `held` stands in `got` at `start`, message by message."""
    if start + len(held) > len(got):
        return False
    return all(same(key, got[start + offset]) for offset, key in enumerate(held))


def wire_digest(messages: Sequence[Message]) -> bytes:
    """Digest of everything a family may render of `messages`, spelling and ids included."""
    parts: list[str] = []
    for message in messages:
        parts += [message.role, message.text, message.reasoning, message.tool_call_id]
        parts.append(str(len(message.tool_calls)))
        for call in message.tool_calls:
            parts += [call.id, call.name, call.arguments]
    return digest(*parts)
