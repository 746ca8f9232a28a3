"""Templates without tools serve agents that need none, and markers may be ordinary text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from known_lab import GLM
from render_families import CONTROL, HERMES, tokenizer_json, write_renderer

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ParsedCall, ParsedReply
from insitu.chat.validation import PROBE_TOOL, CodecRenderer
from insitu.errors import RenderError
from insitu.types import Message, ToolCall

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REFUSES = "{% if m.role == 'tool' %}{{ raise_exception('Only user and assistant roles') }}{% endif %}"
CALL = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
)
OFFER = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
XML = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)


def looped(turn: str, *, before: str = "", after: str = PROMPT) -> str:
    return f"{before}{{% for m in messages %}}{turn}{{% endfor %}}{after}"


WITHOUT = {
    "every message alike": looped(TURN),
    "a word of its own first": looped(
        "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        + TURN
    ),
    "tool results left out": looped("{% if m.role != 'tool' %}" + TURN + "{% endif %}"),
    "refuses the role": looped(REFUSES + TURN),
    "an end behind everything": looped(
        TURN,
        after="{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}",
    ),
}


def load(folder: Path, template: str, control: tuple[str, ...] = (), **renderer: object) -> CodecRenderer:
    write_renderer(folder, template, **renderer)
    (folder / "tokenizer.json").write_text(tokenizer_json(control or CONTROL), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    return load_renderer(folder, "template")


@pytest.mark.parametrize("name", WITHOUT)
def test_a_template_without_tools_serves_agents_without_tools(name: str, tmp_path: Path) -> None:
    renderer = load(tmp_path, WITHOUT[name])
    assert (renderer.caps.tools, renderer.caps.tool_format) == (False, "none")
    run = [
        Message(role="user", text="Go."),
        Message(role="assistant", text="Yes."),
        Message(role="user", text="On."),
    ]
    shown = renderer.decode(renderer.append(run))
    assert shown.count("<|im_start|>") == shown.count("<|im_end|>") == 3
    said = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert renderer.parse(renderer.codec.encode(f"{said}<|im_end|>")) == ParsedReply(text=said)
    with pytest.raises(
        RenderError, match="takes none: its chat template leaves out a call or its result; use"
    ):
        renderer.open([], [PROBE_TOOL])


def test_a_template_that_only_does_not_offer_tools_may_serve_them(tmp_path: Path) -> None:
    """A policy may have learnt its tools in training, as the demo's has."""
    renderer = load(tmp_path, HERMES.replace("{%- if tools %}", "{%- if tools and false %}"))
    assert (renderer.caps.tools, renderer.caps.tool_format) == (False, "hermes")
    renderer.open([], [PROBE_TOOL])


def test_calls_that_no_format_reads_refuse_tools(tmp_path: Path) -> None:
    renderer = load(tmp_path, looped(TURN.replace("<|im_end|>", CALL + "<|im_end|>"), before=OFFER))
    assert (renderer.caps.tools, renderer.caps.tool_format) == (False, "none")
    with pytest.raises(
        RenderError, match="no tool format reads the calls that its chat template writes; use"
    ):
        renderer.open([], [PROBE_TOOL])


def test_marks_that_must_be_tokens_are_named(tmp_path: Path) -> None:
    template = looped(TURN.replace("<|im_end|>", XML + "<|im_end|>"), before=OFFER)
    assert load(tmp_path / "a", template).caps.tool_format == "xml"
    renderer = load(tmp_path / "b", template, ("<|im_start|>", "<|im_end|>"))
    with pytest.raises(
        RenderError, match=r"writes: <tool_call>, </tool_call> must be added tokens of tokenizer.json"
    ):
        renderer.open([], [PROBE_TOOL])
    assert not any(mark in renderer.codec.control for mark in GLM if "tool_call" in mark)


@pytest.mark.parametrize(("template", "name"), [(HERMES, "xml"), (WITHOUT["every message alike"], "hermes")])
def test_a_named_format_that_does_not_fit_is_refused(template: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=f"tool_format {name} does not fit"):
        load(tmp_path, template, tool_format=name)


def test_a_model_may_be_told_to_write_no_calls(tmp_path: Path) -> None:
    renderer = load(tmp_path, HERMES, tool_format="none")
    assert (renderer.caps.tools, renderer.caps.tool_format) == (False, "none")


GOOD = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
READ = ParsedCall(name="read", arguments='{"path": "a"}')


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> CodecRenderer:
    return load(
        tmp_path_factory.mktemp("spelled"), HERMES, ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    )


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (GOOD, ParsedReply(text="", calls=(READ,))),
        (f"Look.\n{GOOD}\n{GOOD}\n", ParsedReply(text="Look.", calls=(READ, READ))),
        (f"<think>\nHm.\n</think>\n\n{GOOD}", ParsedReply(text="", reasoning="Hm.", calls=(READ,))),
        (GOOD.replace("\n", ""), ParsedReply(text="", calls=(READ,))),
        (f"{GOOD} and then", ParsedReply(text=" and then", calls=(READ,))),
        (GOOD[:-5], ParsedReply(text=GOOD[:-5], malformed=True)),
        (f"<tool_call>{GOOD}", ParsedReply(text="<tool_call>", calls=(READ,), malformed=True)),
        ("Use <tool_call> here", ParsedReply(text="Use <tool_call> here", malformed=True)),
        (f"{GOOD}</tool_call>", ParsedReply(text="</tool_call>", calls=(READ,), malformed=True)),
        (f"<think>\n{GOOD}\n", ParsedReply(text="", reasoning=f"{GOOD}", malformed=True)),
        (
            "<tool_call>\nread\n</tool_call>",
            ParsedReply(text="<tool_call>\nread\n</tool_call>", malformed=True),
        ),
        ('{"name": "read", "arguments": {}}', ParsedReply(text='{"name": "read", "arguments": {}}')),
    ],
)
def test_markers_that_are_ordinary_text_are_read(
    spelled: CodecRenderer, said: str, reply: ParsedReply
) -> None:
    assert spelled.caps.tools
    assert spelled.caps.parallel_calls
    assert spelled.parse(spelled.codec.encode(f"{said}<|im_end|>")) == reply


def test_markers_in_the_arguments_end_no_call(spelled: CodecRenderer) -> None:
    text = f'a\n</tool_call>\n{GOOD} "<tool_call>'
    call = ToolCall(id="", name="write", arguments='{"text": ' + json.dumps(text) + "}")
    parsed = spelled.parse(
        spelled.render_reply(Message(role="assistant", text="So.", tool_calls=(call, call)))
    )
    assert [c.arguments for c in parsed.calls] == [call.arguments] * 2
    assert (parsed.text, parsed.malformed) == ("So.", False)
