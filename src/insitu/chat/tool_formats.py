"""Tool-call formats: one strict parser per format, chosen by name.

Each takes ids and returns a ParsedReply. Unquoted values are strings where the tool's schema says so, else
the JSON they spell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from insitu.chat.codec import Codec
from insitu.chat.parse import (
    THINK_CLOSE,
    Blocks,
    find,
    is_json,
    is_name,
    is_object,
    is_open_reasoning,
    parse_blocks,
    read_call,
    without_stop,
)
from insitu.chat.renderer import ParsedCall, ParsedReply
from insitu.types import IntArray, ToolSpec

__all__ = ["FORMATS", "ParseFormat", "is_open_reasoning", "reasoning_close"]

ParseFormat = Callable[[Codec, IntArray, frozenset[int], bool, Sequence[ToolSpec]], ParsedReply]
"""(codec, sampled ids, stop ids, whether the prompt opened <think>, tools on offer) -> reply."""

_FUNCTION = re.compile(r"\s*<function=([^<>=\s]+)>\s*(.*?)\s*</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_FENCED = re.compile(r"([^\n`]+)\n```json\n(.*)\n```\s*", re.DOTALL)
_KIMI_ID = re.compile(r"\s*(functions\.([^\s:]+):\d+|([^\s:.]+):\d+)\s*")


def reasoning_close(codec: Codec) -> list[int]:
    """Return the ids that end reasoning cut off by a limit."""
    return [codec.control[THINK_CLOSE]]


def parse_hermes(
    codec: Codec,
    ids: IntArray,
    stop_ids: frozenset[int],
    in_reasoning: bool,
    tools: Sequence[ToolSpec] = (),
) -> ParsedReply:
    """Parse one JSON object with exactly `name` and `arguments` between <tool_call> and </tool_call>."""

    def read(inside: IntArray) -> ParsedCall | None:
        return None if codec.control_positions(inside) else read_call(codec.decode(inside))

    return parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, Blocks(), read)


def _parse_xml(
    codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool, tools: Sequence[ToolSpec]
) -> ParsedReply:
    """Parse Qwen3-Coder, Qwen3.5: <function=name> and <parameter=name> elements between the call markers."""

    def read(inside: IntArray) -> ParsedCall | None:
        function = _FUNCTION.fullmatch(codec.decode(inside))
        if function is None or codec.control_positions(inside) or not is_name(function[1]):
            return None
        found: dict[str, str] = {}
        at, body = 0, function[2]
        while at < len(body):
            parameter = _PARAMETER.match(body, at)
            if parameter is None or parameter[1] in found:
                return None
            found[parameter[1]] = parameter[2]
            at = parameter.end()
        return _typed(function[1], found, tools)

    return parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, Blocks(), read)


def _parse_glm(
    codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool, tools: Sequence[ToolSpec]
) -> ParsedReply:
    """Parse GLM: a name, then pairs of <arg_key> and <arg_value> elements, all of them control tokens."""
    element = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(inside: IntArray) -> ParsedCall | None:
        marks = codec.control_positions(inside)
        if len(marks) % 4:
            return None
        bounds = [0, *marks, len(inside)]
        name = codec.decode(inside[: bounds[1]]).strip()
        found: dict[str, str] = {}
        for i in range(0, len(marks), 4):
            if tuple(codec.names[int(inside[m])] for m in marks[i : i + 4]) != element:
                return None
            k0, k1, v0, v1 = marks[i : i + 4]
            key, value = codec.decode(inside[k0 + 1 : k1]).strip(), codec.decode(inside[v0 + 1 : v1])
            around = codec.decode(inside[k1 + 1 : v0]) + codec.decode(inside[v1 + 1 : bounds[i + 5]])
            if not key or key in found or around.strip():
                return None
            found[key] = value
        return _typed(name, found, tools) if is_name(name) and not re.search(r"\s", name) else None

    return parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, Blocks(), read)


def _parse_deepseek(
    codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool, tools: Sequence[ToolSpec]
) -> ParsedReply:
    """Parse DeepSeek V3, R1: `function`, a separator, the name and fenced JSON, in a section of calls."""
    bar = "\uff5c"
    names = {w: f"<{bar}tool\u2581{w}{bar}>" for w in ("call\u2581begin", "call\u2581end", "sep")}
    sections = [f"<{bar}tool\u2581calls\u2581{w}{bar}>" for w in ("begin", "end")]
    blocks = Blocks(names["call\u2581begin"], names["call\u2581end"], *sections)

    def read(inside: IntArray) -> ParsedCall | None:
        middle = find(codec, inside, 0, names["sep"])
        marks = codec.control_positions(inside)
        if marks != [middle] or codec.decode(inside[:middle]).strip() != "function":
            return None
        fenced = _FENCED.fullmatch(codec.decode(inside[middle + 1 :]))
        if fenced is None or not is_name(fenced[1].strip()) or not is_object(fenced[2]):
            return None
        return ParsedCall(name=fenced[1].strip(), arguments=fenced[2].strip())

    return parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, blocks, read)


def _parse_kimi(
    codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool, tools: Sequence[ToolSpec]
) -> ParsedReply:
    """Parse Kimi K2: the call's own id, which contains the name, and a JSON object, in a section of calls."""
    blocks = Blocks(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    )

    def read(inside: IntArray) -> ParsedCall | None:
        middle = find(codec, inside, 0, "<|tool_call_argument_begin|>")
        named = _KIMI_ID.fullmatch(codec.decode(inside[: max(middle, 0)]))
        raw = codec.decode(inside[middle + 1 :])
        if named is None or codec.control_positions(inside) != [middle] or not is_object(raw):
            return None
        name = named[2] or named[3]
        return ParsedCall(name=name, arguments=raw.strip(), id=named[1]) if is_name(name) else None

    return parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, blocks, read)


def _parse_llama(
    codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool, tools: Sequence[ToolSpec]
) -> ParsedReply:
    """Parse Llama 3: the whole reply is one JSON object with exactly the keys `name` and `parameters`."""
    text = codec.decode(without_stop(ids, stop_ids))
    call = read_call(text, "parameters")
    if call is not None:
        return ParsedReply(text="", calls=(call,))
    return ParsedReply(text=text, malformed=bool(re.match(r"\s*\{\s*\"(name|parameters)\"", text)))


def _typed(name: str, found: Mapping[str, str], tools: Sequence[ToolSpec]) -> ParsedCall | None:
    """Return a call from unquoted values; None if a value does not match its declared type."""
    schemas = _schemas(name, tools)
    members = []
    for key, text in found.items():
        schema = schemas.get(key, {})
        raw = _to_json(text, schema if isinstance(schema, dict) else {})
        if raw is None:
            return None
        members.append(f"{json.dumps(key, ensure_ascii=False)}: {raw}")
    return ParsedCall(name=name, arguments="{" + ", ".join(members) + "}")


def _schemas(name: str, tools: Sequence[ToolSpec]) -> Mapping[str, object]:
    for tool in tools:
        if tool.name == name:
            schema = json.loads(tool.parameters)
            found = schema.get("properties") if isinstance(schema, dict) else None
            return found if isinstance(found, dict) else {}
    return {}


def _to_json(text: str, schema: Mapping[str, object]) -> str | None:
    """Return the JSON text of an unquoted value."""
    declared = schema.get("type")
    kinds = (
        set(declared) if isinstance(declared, list) else {declared} if isinstance(declared, str) else set()
    )
    for union in (schema.get("anyOf"), schema.get("oneOf")):
        kinds |= {b.get("type") for b in union if isinstance(b, dict)} if isinstance(union, list) else set()
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    if is_json(text):
        return text.strip()
    return json.dumps(text, ensure_ascii=False) if not kinds or "string" in kinds else None


FORMATS: Mapping[str, ParseFormat] = {
    "hermes": parse_hermes,
    "xml": _parse_xml,
    "glm": _parse_glm,
    "deepseek": _parse_deepseek,
    "kimi": _parse_kimi,
    "llama": _parse_llama,
}
"""Formats by the name that insitu_renderer.json's `tool_format` takes."""
