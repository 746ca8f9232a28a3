"""What the rules of a model write for a call parses back to that call, in every format and template.

Formats without quotes write some values alike; `meant` says which of them a text stands for.
"""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from known_lab import CONTROL, FAMILIES, renderer_of
from qwen_vocabulary import qwen_tokenizer_json
from render_families import HERMES, tokenizer_json

from insitu.chat.argument_types import typed_call
from insitu.chat.load import load_renderer
from insitu.chat.renderer import ParsedReply
from insitu.chat.validation import CodecRenderer
from insitu.types import Message, ToolCall, ToolSpec

pytestmark = pytest.mark.slow

TEMPLATES = {
    "qwen2_5": "qwen",
    "qwen3_training": "qwen",
    "qwen3_5_nothink": "qwen",
    "qwen3_6": "qwen",
    "llama3_2": "llama",
}
"""Chat templates of the package trl that are rendered by themselves, each with its kind of vocabulary."""
TEXTS = (
    *("", " ", "\n", "\n\n", " a ", "\n  x\n\n", "a\r\nb", "é🙂\u2028\u0085", "\x00\x1b[0m", "\ufffd"),
    *("12", "-0", "1.50", "1e400", "NaN", "20240517", "null", "true", "None", "True", '"quoted"', "'"),
    *('{"a": 1}', "[1, 2]", "{", '{"name": "f", "arguments": {}}', "\\n \\u00e9", "```json\n{}\n```"),
    *("</parameter>", "a</parameter>b", "x\n</parameter>\ny", "\n</parameter>", "</parameter>\n</parameter>"),
    *("</function>", "\n</function>\n", "</parameter>\n</function>", "<parameter=x>", "a <parameter=x> b"),
    *("<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n</parameter>\n</function>",),
    *("<tool_call>", "</tool_call>", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    *("<think>", "</think>", "<|im_end|>", "<arg_value>", "</arg_value><arg_key>b</arg_key><arg_value>1"),
    *(
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        "<|tool_call_end|>",
        "<|python_tag|>",
        "<|eot_id|>",
        "[gMASK]",
    ),
)
TEXT = st.one_of(
    st.sampled_from(TEXTS),
    st.lists(st.sampled_from([*TEXTS, "def f():\n    return 1\n"]), max_size=3).map("".join),
    # Qwen's tokenizer changes text into NFC.
    st.text(st.characters(codec="utf-8", exclude_categories=["M"]), max_size=20).map(
        lambda text: unicodedata.normalize("NFC", text)
    ),
)
NUMBER = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBER, TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
LISTED = ["1", "1.0", "true", "a", "[]", "</parameter>"]
TEXT_KINDS: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "nullable list": {"type": ["null", "string"]},
    "nullable anyOf": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    "nullable oneOf": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/Text"}], "default": None},
    "nullable keyword": {"type": "string", "nullable": True},
    "reference": {"$ref": "#/$defs/Text", "description": "d"},
    "reference to a reference": {"$ref": "#/$defs/Alias"},
    "older reference": {"$ref": "#/definitions/a~1b"},
    "allOf": {"allOf": [{"type": "string"}, {"description": "d"}]},
    "allOf around a union": {"allOf": [{"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}]},
    "upper case": {"type": "STRING"},
    "narrowed by a union": {"type": "string", "anyOf": [{"minLength": 1}, {"maxLength": 0}]},
}
LISTED_KINDS: dict[str, dict[str, Any]] = {
    "enum": {"enum": LISTED},
    "nullable enum": {"enum": [*LISTED, None]},
    "typed enum": {"type": "string", "enum": LISTED},
    "reference to an enum": {"anyOf": [{"$ref": "#/$defs/Listed"}, {"type": "null"}]},
    "consts": {"oneOf": [{"const": text} for text in LISTED]},
}
OTHER_KINDS: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "integer": ({"type": "integer"}, st.integers(-(2**70), 2**70)),
    "number": ({"anyOf": [{"type": "number"}, {"type": "null"}]}, NUMBER | st.none()),
    "boolean": ({"type": ["boolean", "null"]}, st.booleans() | st.none()),
    "object": (
        {"type": "object", "properties": {"a": {"type": "string"}}},
        st.dictionaries(TEXT, VALUE, max_size=3),
    ),
    "array": ({"type": "array", "items": {"type": "string"}}, st.lists(VALUE, max_size=3)),
    "null": ({"type": "null"}, st.none()),
    "loop": ({"$ref": "#/$defs/Loop"}, st.lists(VALUE, max_size=2)),
}
DEFINITIONS = {
    "$defs": {
        "Text": {"type": "string"},
        "Alias": {"$ref": "#/$defs/Text"},
        "Listed": {"type": "string", "enum": LISTED},
        "Loop": {"type": "array", "items": {"$ref": "#/$defs/Loop"}},
    },
    "definitions": {"a/b": {"type": "string"}},
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[ToolSpec, dict[str, Any]]:
    """A tool, and arguments that its schema allows."""
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for key in draw(
        st.lists(st.sampled_from(["path", "new text", "b", "ключ", "-n"]), unique=True, max_size=4)
    ):
        group = draw(st.sampled_from(["text", "listed", "other"]))
        if group == "other":
            schema, values = OTHER_KINDS[draw(st.sampled_from(sorted(OTHER_KINDS)))]
        else:
            kinds = TEXT_KINDS if group == "text" else LISTED_KINDS
            schema = kinds[draw(st.sampled_from(sorted(kinds)))]
            values = TEXT if group == "text" else st.sampled_from(LISTED)
            if "null" in json.dumps(schema):
                values = values | st.none()
        properties[key], arguments[key] = schema, draw(values)
    parameters = {"type": "object", "properties": properties, **DEFINITIONS}
    return ToolSpec(name="edit", description="Edit.", parameters=json.dumps(parameters)), arguments


RENDERERS: dict[str, CodecRenderer] = {}


def renderer_named(
    name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CodecRenderer:
    cache = request.config.cache.mkdir("insitu")
    if name in FAMILIES:
        return renderer_of(name, cache)
    if name not in RENDERERS:
        folder, kind = tmp_path_factory.mktemp(name), TEMPLATES.get(name, "qwen")
        spelled = tokenizer_json(("<|im_start|>", "<|im_end|>")) if name == "spelled" else ""
        small = qwen_tokenizer_json(cache, small=True) if kind == "qwen" else tokenizer_json(CONTROL[kind])
        (folder / "tokenizer.json").write_text(spelled or small, encoding="utf-8")
        special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"} if kind == "llama" else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(
            HERMES if name not in TEMPLATES else real(name), encoding="utf-8"
        )
        rules = {"template_arguments": {"tools_in_user_message": False}} if kind == "llama" else {}
        (folder / "insitu_renderer.json").write_text(json.dumps(rules), encoding="utf-8")
        RENDERERS[name] = load_renderer(folder, "template")
    return RENDERERS[name]


def real(name: str) -> str:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(params=[*FAMILIES, *TEMPLATES, "hermes", "spelled"])
def chat_renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CodecRenderer:
    return renderer_named(request.param, request, tmp_path_factory)


def said(renderer: CodecRenderer, tool: ToolSpec, arguments: dict[str, Any], text: str = "") -> ParsedReply:
    call = ToolCall(id="functions.edit:0", name=tool.name, arguments=json.dumps(arguments))
    return renderer.parse(
        renderer.render_reply(Message(role="assistant", text=text, tool_calls=(call,))), (tool,)
    )


def meant(renderer: CodecRenderer, tool: ToolSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a reader of this format takes those to be."""
    if renderer.caps.tool_format not in ("xml", "glm"):
        return arguments
    schemas = json.loads(tool.parameters)["properties"]
    nulls = ("null", "None") if renderer.caps.tool_format == "xml" else ("null",)

    def one(key: str, value: Any) -> Any:
        return None if value in nulls and "null" in json.dumps(schemas[key]) else value

    return {key: one(key, value) for key, value in arguments.items()}


def told_apart(renderer: CodecRenderer, arguments: dict[str, Any]) -> bool:
    """Whether the format has a way to write these: XML texts may look like the edge of two parameters."""
    texts = [v if isinstance(v, str) else json.dumps(v) for v in arguments.values()]
    marks = all(any(mark in text for text in texts) for mark in ("</parameter>", "<parameter="))
    return not marks or renderer.caps.tool_format != "xml"


FUZZED = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZED
@given(calls())
def test_a_call_that_was_written_is_the_call_that_is_read(
    chat_renderer: CodecRenderer, drawn: tuple[ToolSpec, dict[str, Any]]
) -> None:
    tool, arguments = drawn
    parsed = said(chat_renderer, tool, arguments)
    if not told_apart(chat_renderer, arguments) and not parsed.calls:
        assert parsed.malformed
        return
    assert not parsed.malformed
    assert [call.name for call in parsed.calls] == ["edit"]
    if told_apart(chat_renderer, arguments):
        assert same(json.loads(parsed.calls[0].arguments), meant(chat_renderer, tool, arguments))


def same(left: object, right: object) -> bool:
    """Equal as JSON: True is not 1, -0.0 is not 0."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


QUOTED = """<tool_call>
<function=f>
<parameter=a>
1
</parameter>
<parameter=b>
2
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(
    "text", [QUOTED, f"{QUOTED}\n{QUOTED}\n", "a </parameter>b", "</parameter>", "<parameter=a>"]
)
def test_a_text_may_quote_calls_and_lone_marks(chat_renderer: CodecRenderer, text: str) -> None:
    properties = {key: {"type": "string"} for key in ("before", "text", "after")}
    tool = ToolSpec(name="edit", description="Edit.", parameters=json.dumps({"properties": properties}))
    arguments = {"before": "x", "text": text, "after": "y"}
    parsed = said(chat_renderer, tool, arguments)
    assert [json.loads(call.arguments) for call in parsed.calls] == [arguments]


@pytest.mark.parametrize(
    ("schema", "written", "read"),
    [
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7.5", "7.5"),
        ({"type": ["string", "array"]}, '["a"]', ["a"]),
        ({"type": ["string", "array"]}, '{"a": 1}', '{"a": 1}'),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "3", "3"),
        ({"enum": [1, 2]}, "3", 3),
        ({"enum": [True, "1"]}, "1", "1"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "1.5", 1.5),
        ({"type": "integer"}, "2.0", 2.0),
        ({"type": "integer"}, "", ""),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, '"a"', '"a"'),
        ({"type": "null"}, "nothing", "nothing"),
        ({}, "12", 12),
        ({}, '"a"', '"a"'),
        (True, "x", "x"),
        ({"$ref": "https://example.com/schema.json"}, "12", 12),
        ({"$ref": "#/$defs/missing"}, "x", "x"),
        ({"$ref": "#/properties/value"}, "x", "x"),
        ({"type": "string", "pattern": "("}, "12", "12"),
        ({"type": {}}, "12", 12),
        ({"anyOf": []}, "12", 12),
    ],
)
@pytest.mark.parametrize("chat_renderer", ["qwen3.6", "glm-4.5"], indirect=True)
def test_a_value_is_read_as_its_schema_says_and_never_lost(
    chat_renderer: CodecRenderer, schema: object, written: str, read: object
) -> None:
    for parameters in (
        {"properties": {"value": schema}},
        {"$ref": "#/$defs/Whole", "$defs": {"Whole": {"allOf": [{"properties": {"value": schema}}]}}},
        {"additionalProperties": schema, "properties": {"other": {"type": "null"}}},
    ):
        if "properties" not in parameters and "#/properties" in json.dumps(schema):
            continue
        tool = ToolSpec(name="edit", description="Edit.", parameters=json.dumps(parameters))
        parsed = said(chat_renderer, tool, {"value": written})
        assert [json.loads(call.arguments) for call in parsed.calls] == [{"value": read}], parameters
        assert type(json.loads(parsed.calls[0].arguments)["value"]) is type(read)


def test_schemas_that_repeat_themselves_cost_no_more_than_their_size() -> None:
    laughs = {
        str(i): {part: [{"$ref": f"#/$defs/{i + 1}"}] * 9 for part in ("allOf", "anyOf")} for i in range(30)
    }
    root = {"properties": {"v": {"$ref": "#/$defs/0"}}, "$ref": "#/$defs/0", "$defs": {**laughs, "30": {}}}
    tool = ToolSpec(name="f", description="", parameters=json.dumps(root))
    assert typed_call("f", {"v": "1"}, [tool], {}).arguments == '{"v": 1}'
    chain = {str(i): {"$ref": f"#/$defs/{(i + 1) % 5000}"} for i in range(5000)}
    tool = ToolSpec(name="f", description="", parameters=json.dumps({"$ref": "#/$defs/0", "$defs": chain}))
    assert typed_call("f", {"v": "x"}, [tool], {}).arguments == '{"v": "x"}'


@pytest.mark.parametrize(
    "raw", ["not json", "[1]", '"text"', "3", "null", '{"a": 1', '{"a": NaN}', '{"a": 1e400}']
)
@pytest.mark.parametrize("position", ["whole", "in a text"])
def test_arguments_that_are_no_object_are_shown(
    chat_renderer: CodecRenderer, raw: str, position: str
) -> None:
    """A client's history may hold a call that was cut off, or one of another model."""
    if position == "in a text":
        raw = "<|im_end|>" + raw
    user, result = Message(role="user", text="Go."), Message(role="tool", text="no", tool_call_id="call_x")
    call = ToolCall(id="call_x", name="edit", arguments=raw)
    shown = chat_renderer.decode(
        chat_renderer.append([user, Message(role="assistant", tool_calls=(call,)), result])
    )
    assert raw in shown or json.dumps(raw)[1:-1] in shown
    assert "edit" in shown


@pytest.mark.parametrize("raw", ["", " \n", "{}", " {} ", "{\n}"])
def test_no_arguments_are_an_empty_object(chat_renderer: CodecRenderer, raw: str) -> None:
    called = [
        Message(role="assistant", tool_calls=(ToolCall(id="call_x", name="edit", arguments=text),))
        for text in (raw, "{}")
    ]
    ids, empty = (
        chat_renderer.append([Message(role="user", text="Go."), message]).tolist() for message in called
    )
    assert ids == empty


def test_arguments_nested_too_deep_for_a_mapping_are_shown(chat_renderer: CodecRenderer) -> None:
    for depth in (100, 400, 900, 5000):
        raw = '{"a": ' + "[" * depth + "]" * depth + "}"
        call = ToolCall(id="call_x", name="edit", arguments=raw)
        ids = chat_renderer.append(
            [Message(role="user", text="Go."), Message(role="assistant", tool_calls=(call,))]
        )
        assert "[[[[" in chat_renderer.decode(ids)


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What a policy may sample: marks of every format, and whole or damaged calls between them."""
    kinds = st.sampled_from(["mark", "call", "cut", "text"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 99)), max_size=8))


OPENERS = ("<tool_call>", "<|tool_call_begin|>", "<\uff5ctool\u2581call\u2581begin\uff5c>")
BITS = (
    *(
        "Hm.",
        " ",
        "\n",
        '{"name": "edit", "arguments": {}}',
        '{"name": "edit", "parameters": {}}',
        "edit",
        "{}",
    ),
    *(
        "<function=edit>\n</function>",
        "function",
        "functions.edit:0",
        "edit\n```json\n{}\n```",
        "x",
        "</function>",
    ),
)


@FUZZED
@given(pieces())
def test_nothing_between_marks_is_lost_without_being_counted(
    chat_renderer: CodecRenderer, drawn: list[tuple[str, int]]
) -> None:
    codec = chat_renderer.codec
    marks = [[i] for i in sorted(set(codec.names) - chat_renderer.stop_ids)]
    marks = marks or [codec.encode_content(mark).tolist() for mark in ("<tool_call>", "</tool_call>")]
    call = ToolCall(id="functions.edit:0", name="edit", arguments='{"b": "x"}')
    whole = chat_renderer.render_reply(Message(role="assistant", tool_calls=(call,)))[:-1].tolist()
    ids: list[int] = []
    for kind, n in drawn:
        if kind == "mark":
            ids += marks[n % len(marks)]
        elif kind == "text":
            ids += codec.encode_content(BITS[n % len(BITS)]).tolist()
        else:
            ids += whole[: n % len(whole)] if kind == "cut" else whole
    parsed = chat_renderer.parse(np.array(ids, dtype=np.int32))
    names = [codec.names.get(i, "") for i in ids]
    opened = sum(name in OPENERS for name in names)
    if chat_renderer is RENDERERS.get("spelled"):
        opened = codec.decode(np.array(ids, dtype=np.int32)).count("<tool_call>")
    if chat_renderer.caps.tool_format != "llama":
        assert parsed.malformed or len(parsed.calls) == opened
        assert parsed.malformed or not any(mark in parsed.text + parsed.reasoning for mark in OPENERS)
    if not parsed.malformed and not parsed.calls:
        # Nothing but marks and line breaks may be missing.
        kept = parsed.text + parsed.reasoning
        said = "".join(codec.decode(np.array([i], dtype=np.int32)) for i in ids if i not in codec.names)
        assert all(kept.count(letter) >= said.count(letter) for letter in set(said) - {"\n"})
