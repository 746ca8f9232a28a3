"""`model.renderer = "hermes"`: a model whose template has no place for tools takes them all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from render_families import CONTROL, tokenizer_json, write_renderer

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ParsedCall, ParsedReply
from insitu.chat.validation import PROBE_CALL, PROBE_TOOL
from insitu.config import load_config, model_folder
from insitu.engines.safetensors_file import model_assets
from insitu.errors import RenderError
from insitu.types import Message

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))


def folder_of(source: Path) -> Path:
    return model_folder(load_config(None, [f"model.path={source}", "model.renderer=hermes"]))


def test_a_model_without_tools_gets_them(tmp_path: Path) -> None:
    source = write_renderer(tmp_path / "model", PLAIN)
    without = load_renderer(source)
    with pytest.raises(RenderError, match='or model.renderer = "hermes"; see'):
        without.open([], [PROBE_TOOL])
    renderer = load_renderer(folder_of(source), "hermes")
    assert (renderer.caps.tools, renderer.caps.tool_format) == (True, "hermes")
    call = Message(role="assistant", tool_calls=(PROBE_CALL,))
    (read,) = renderer.parse(renderer.render_reply(call)).calls
    assert (read.name, read.arguments) == (PROBE_CALL.name, PROBE_CALL.arguments)
    for system in ([], [Message(role="system", text="Rules.")]):
        offered = renderer.decode(renderer.open(system, [PROBE_TOOL]))
        assert offered.count("<|im_start|>system") == 1
        assert f'"name": "{PROBE_TOOL.name}"' in offered
    assert len(renderer.open([], [])) == 0


def test_its_marks_may_be_ordinary_text(tmp_path: Path) -> None:
    source = write_renderer(tmp_path / "model", PLAIN)
    control = tuple(name for name in CONTROL if "tool" not in name)
    (source / "tokenizer.json").write_text(tokenizer_json(control), encoding="utf-8")
    renderer = load_renderer(folder_of(source), "hermes")
    ids = renderer.codec.encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>')
    assert renderer.parse(ids) == ParsedReply(text="", calls=(ParsedCall(name="f", arguments="{}"),))


def test_the_template_goes_where_the_model_goes_and_the_folder_stays_as_it_is(tmp_path: Path) -> None:
    source = write_renderer(tmp_path / "model", PLAIN)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    made = folder_of(source)
    assert folder_of(source) == made
    kept = {path.name: path.read_text() for path in model_assets(made)}
    assert "tools" in kept["chat_template.jinja"]
    assert kept["tokenizer.json"] == before["tokenizer.json"].decode()
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    (source / "generation_config.json").write_text('{"temperature": 1.0}')
    assert (folder_of(source) / "generation_config.json").is_file()


def test_a_model_with_other_turn_marks_is_refused_in_a_line(tmp_path: Path) -> None:
    source = write_renderer(tmp_path / "model", PLAIN)
    control = tuple(name.replace("im_start", "user") for name in CONTROL)
    (source / "tokenizer.json").write_text(tokenizer_json(control), encoding="utf-8")
    with pytest.raises(RenderError, match="does not begin with a control token in this template"):
        load_renderer(folder_of(source), "hermes")


def test_arguments_leave_the_template_in_place(tmp_path: Path) -> None:
    source = write_renderer(tmp_path / "model", "{# enable_thinking #}" + PLAIN)
    named = "hermes?enable_thinking=false"
    folder = model_folder(load_config(None, [f"model.path={source}", f"model.renderer={named}"]))
    assert folder == folder_of(source)
    with pytest.raises(RenderError, match="the chat template has no argument 'enable_thinking'"):
        load_renderer(folder, named)
