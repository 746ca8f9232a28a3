"""Tool-call formats: one strict parser per format, chosen by name.

Each takes ids and returns a ParsedReply. What a model's template writes for a call parses back to that call,
where the format has a way to write it; `argument_types` reads unquoted values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from insitu.chat.argument_types import declared_keys, typed_call
from insitu.chat.codec import Codec
from insitu.chat.parse import (
    THINK_CLOSE,
    Blocks,
    call_at,
    find,
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

NO_CALLS = "none"
"""Format of models without tools."""
_DEEPSEEK = [f"<\uff5ctool\u2581{w}\uff5c>" for w in ("call\u2581begin", "call\u2581end", "sep")]
_MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", *_DEEPSEEK),
)
_FUNCTION = re.compile(r"<function=([^<>=\s]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_EDGE = re.compile(r"<parameter=[^<>\n]+>|</parameter>\s*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Qwen3.5's template writes these values as Python does."""
_FENCED = re.compile(r"([^\n`]+)\n```json\n(.*)\n```\s*", re.DOTALL)
_LLAMA_CALL = re.compile(r"\s*\{\s*\"(name|parameters|arguments|type\"\s*:\s*\"function)\"")
_KIMI_ID = re.compile(r"\s*(functions\.([^\s:]+):\d+|([^\s:.]+):\d+)\s*")


def reasoning_close(codec: Codec) -> list[int]:
    """Return the ids that end reasoning cut off by a limit."""
    return [codec.control[THINK_CLOSE]]


def spelled_marks(codec: Codec, template: str) -> list[str]:
    """Return the marks of tool formats in a template that are ordinary text to the tokenizer."""
    return [mark for mark in _MARKS if mark in template and mark not in codec.control]


def _parse_plain(
    codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool, tools: Sequence[ToolSpec]
) -> ParsedReply:
    """Parse replies of models that write no calls."""
    return parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, Blocks("", ""), lambda inside: None)


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

    blocks = Blocks()
    reply = parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, blocks, read)
    return reply if blocks.open in codec.control else _spelled_calls(reply, blocks)


def _spelled_calls(reply: ParsedReply, blocks: Blocks) -> ParsedReply:
    """Read the calls from the text of a reply, for a tokenizer to which the markers are ordinary text.

    JSON says where a call ends, so markers in its texts do no harm. A marker without a call is malformed.
    """
    text, calls, at = "", list[ParsedCall](), 0
    for opener in re.finditer(rf"{blocks.open}\s*", reply.text):
        if opener.start() < at:
            continue
        call, end = call_at(reply.text, opener.end())
        close = re.compile(rf"\s*{blocks.close}").match(reply.text, end)
        if call and close:
            text = (text + reply.text[at : opener.start()]).rstrip("\n")
            calls.append(call)
            at = close.end()
    text += reply.text[at:]
    if calls:
        text = "" if text.isspace() else text.rstrip("\n")
    marked = any(mark in part for mark in (blocks.open, blocks.close) for part in (text, reply.reasoning))
    return replace(reply, text=text, calls=tuple(calls), malformed=reply.malformed or marked)


def _parse_xml(
    codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool, tools: Sequence[ToolSpec]
) -> ParsedReply:
    """Parse Qwen3-Coder, Qwen3.5: <function=name> and <parameter=name> elements between the call markers."""

    def read(inside: IntArray) -> ParsedCall | None:
        text = codec.decode(inside).strip()
        function = _FUNCTION.match(text)
        if function is None or codec.control_positions(inside) or not text.endswith("</function>"):
            return None
        body = text[function.end() :].removesuffix("</function>").rstrip()
        found = _parameters(body, nested=True)
        found = _parameters(body, nested=False) if found is None else found
        return None if found is None else typed_call(function[1], found, tools, _PYTHON)

    return parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, Blocks(), read)


def _parameters(body: str, nested: bool) -> dict[str, str] | None:
    """Split the parameters of a call; None if the text is not a row of them, each name once.

    A parameter ends only where another one or the end follows. `nested`: elements inside a value are skipped
    in pairs, so that a value may quote whole calls. A value with a lone `</parameter>` before an opener looks
    like two parameters, and is read as these.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(body):
        opener = _PARAMETER.match(body, at)
        if opener is None or opener[1] in found:
            return None
        depth = 0
        for edge in _EDGE.finditer(body, opener.end()):
            if not edge[0].startswith("</"):
                depth += nested
            elif depth:
                depth -= 1
            elif edge.end() == len(body) or _PARAMETER.match(body, edge.end()):
                break
        else:
            return None
        found[opener[1]] = body[opener.end() : edge.start()].removesuffix("\n")
        at = edge.end()
    return found


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
        declared = declared_keys(name, tools)
        found: dict[str, str] = {}
        for i in range(0, len(marks), 4):
            if tuple(codec.names[int(inside[m])] for m in marks[i : i + 4]) != element:
                return None
            k0, k1, v0, v1 = marks[i : i + 4]
            key, value = codec.decode(inside[k0 + 1 : k1]), codec.decode(inside[v0 + 1 : v1])
            key = key.strip() if key.strip() in declared else key
            around = codec.decode(inside[k1 + 1 : v0]) + codec.decode(inside[v1 + 1 : bounds[i + 5]])
            if not key.strip() or key in found or around.strip():
                return None
            found[key] = value
        return typed_call(name, found, tools, {}) if is_name(name) and not re.search(r"\s", name) else None

    return parse_blocks(codec, without_stop(ids, stop_ids), in_reasoning, Blocks(), read)


def _parse_deepseek(
    codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool, tools: Sequence[ToolSpec]
) -> ParsedReply:
    """Parse DeepSeek V3, R1: `function`, a separator, the name and fenced JSON, in a section of calls."""
    bar = "\uff5c"
    begin, end, separator = _DEEPSEEK
    sections = [f"<{bar}tool\u2581calls\u2581{w}{bar}>" for w in ("begin", "end")]
    blocks = Blocks(begin, end, *sections)

    def read(inside: IntArray) -> ParsedCall | None:
        middle = find(codec, inside, 0, separator)
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
    """Parse Llama 3: the whole reply is one call in JSON, `parameters` or `arguments` in it.

    <|python_tag|> may announce it; anywhere else it announces a call that cannot be read."""
    ids = without_stop(ids, stop_ids)
    announced = find(codec, ids, 0, "<|python_tag|>")
    text = codec.decode(ids)
    said = text if announced else codec.decode(ids[1:])
    call = read_call(said, "parameters") or read_call(said)
    if call is not None:
        return ParsedReply(text="", calls=(call,))
    return ParsedReply(text=text, malformed=announced >= 0 or _LLAMA_CALL.match(text) is not None)


FORMATS: Mapping[str, ParseFormat] = {
    "hermes": parse_hermes,
    "xml": _parse_xml,
    "glm": _parse_glm,
    "deepseek": _parse_deepseek,
    "kimi": _parse_kimi,
    "llama": _parse_llama,
    NO_CALLS: _parse_plain,
}
"""Formats by the name that insitu_renderer.json's `tool_format` takes."""
