"""The chat templates that real models ship, as the package `trl` keeps them: which rules each one gets."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from known_lab import CONTROL
from qwen_vocabulary import qwen_tokenizer_json
from render_families import tokenizer_json

from insitu.chat.load import load_renderer
from insitu.chat.validation import CodecRenderer, check_renderer
from insitu.errors import RenderError
from insitu.types import Message, ToolCall

pytestmark = pytest.mark.slow

SPECIAL = {
    "qwen": {"eos_token": "<|im_end|>"},
    "glm": {"eos_token": "<|endoftext|>"},
    "deepseek": {
        "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    },
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
}


def real(name: str) -> str:
    found = importlib.util.find_spec("trl")
    assert found is not None, "scripts/setup test installs it"
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def folder_of(folder: Path, cache: Path, name: str, kind: str, *, small: bool = True) -> Path:
    tokenizer = qwen_tokenizer_json(cache, small=small) if kind == "qwen" else tokenizer_json(CONTROL[kind])
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL[kind]), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(real(name), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "source", "tool_format"),
    [
        ("qwen3", "qwen", "qwen3", "hermes"),
        ("qwen3_instruct_2507", "qwen", "qwen3", "hermes"),
        ("qwen3_training", "qwen", "template", "hermes"),
        ("qwen2_5", "qwen", "template", "hermes"),
        ("qwen3_5_think", "qwen", "qwen3.5", "xml"),
        ("qwen3_5_nothink", "qwen", "template", "xml"),
        ("qwen3_8", "qwen", "qwen3.8", "xml"),
        ("glm4moe", "glm", "glm-4.5", "glm"),
        ("llama3_1", "llama", "llama-3", "llama"),
        ("llama3_2", "llama", "llama-3", "llama"),
    ],
)
@pytest.mark.case(12)
def test_auto(
    name: str, kind: str, source: str, tool_format: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cache = request.config.cache.mkdir("insitu")
    # one with the whole vocabulary is enough
    renderer = load_renderer(folder_of(tmp_path, cache, name, kind, small=name != "qwen3"))
    assert (renderer.caps.source, renderer.caps.tool_format) == (source, tool_format)
    assert renderer.caps.tools
    check_renderer(renderer)
    render_late_system(renderer)


def render_late_system(renderer: CodecRenderer) -> None:
    """Cases 11: natively or as a user message, the text arrives and nothing before it changes."""
    system, user = Message(role="system", text="Be brief."), Message(role="user", text="Go on.")
    shown = renderer.decode(renderer.append([system, system, user]))
    assert shown.count("Be brief.") == 2
    assert ("<system>" in shown) != renderer.caps.native_system


@pytest.mark.case(11)
def test_qwen_3_5_refuses_a_late_system_so_a_user_message_tells_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cache = request.config.cache.mkdir("insitu")
    renderer = load_renderer(folder_of(tmp_path, cache, "qwen3_5_think", "qwen"))
    shown = renderer.decode(renderer.append([Message(role="system", text="Note.")]))
    assert shown == "<|im_start|>user\n<system>\nNote.\n</system><|im_end|>\n"


@pytest.mark.case(9, 10)
def test_qwen3_strips_older_reasoning_and_pieces_do_not_notice(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its template writes an answer with reasoning while it is the last, without it behind a new question."""
    renderer = load_renderer(
        folder_of(tmp_path, request.config.cache.mkdir("insitu"), "qwen3", "qwen"), "template"
    )
    said = Message(role="assistant", text="So.", reasoning="Hm.")
    user, tool = Message(role="user", text="q"), Message(role="tool", text="r", tool_call_id="c")
    assert "Hm." in renderer.decode(renderer.append([user, said]))
    assert "Hm." not in renderer.decode(renderer.append([user, said, user]))
    ids = renderer.render_reply(said)
    assert "Hm." in renderer.decode(ids)
    for run in ([user], [tool], [tool, user]):
        after = renderer.join(ids, "stop", run)
        assert after.tolist() == [198, *renderer.append(run).tolist()]


def test_templates_without_the_rule_say_why(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    cache = request.config.cache.mkdir("insitu")
    with pytest.raises(
        RenderError, match=r"template: the generation prompt depends on the tool message.*deepseek"
    ):
        load_renderer(folder_of(tmp_path, cache, "deepseekv3", "deepseek"))
    assert load_renderer(tmp_path, "deepseek-r1").caps.source == "deepseek-r1"


@pytest.mark.case(13)
def test_arguments_of_foreign_calls_keep_their_values(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    renderer = load_renderer(folder_of(tmp_path, request.config.cache.mkdir("insitu"), "qwen3", "qwen"))
    for raw in ('{"n": 1.50, "b": false, "i": 9007199254740993}', '{"n": 1e400}', '{"n": False}', "[1]"):
        call = ToolCall(id="c", name="f", arguments=raw)
        shown = renderer.decode(renderer.append([Message(role="assistant", tool_calls=(call,))]))
        expected = raw.replace("1.50", "1.5")
        assert expected in shown
