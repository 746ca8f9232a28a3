"""Which rules a model folder gets: the package's where they write what the folder's template writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from qwen_vocabulary import qwen_folder
from render_families import HERMES, QWEN3_REASONING, qwen3_template, write_renderer

from insitu.chat.load import load_renderer
from insitu.errors import RenderError

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Path:
    return request.config.cache.mkdir("insitu")


def test_auto_takes_the_packages_rules_where_the_template_agrees(tmp_path: Path, cache: Path) -> None:
    folder = qwen_folder(tmp_path, cache)
    (folder / "chat_template.jinja").write_text(qwen3_template(), encoding="utf-8")
    renderer = load_renderer(folder)
    assert renderer.caps.source == "qwen3"
    assert renderer.caps.reasoning
    assert renderer.fingerprint != load_renderer(folder, "template").fingerprint


def test_auto_keeps_a_template_that_says_other_things(tmp_path: Path, cache: Path) -> None:
    folder = qwen_folder(tmp_path, cache)
    changed = qwen3_template().replace("For each function call", "For every function call")
    (folder / "chat_template.jinja").write_text(changed, encoding="utf-8")
    assert load_renderer(folder).caps.source == "template"
    (folder / "chat_template.jinja").write_text(HERMES, encoding="utf-8")
    assert load_renderer(folder).caps.source == "template"


def test_named_rules_are_taken_or_refused_with_the_reason(tmp_path: Path, cache: Path) -> None:
    folder = qwen_folder(tmp_path, cache)
    assert load_renderer(folder, "qwen3").caps.source == "qwen3"
    with pytest.raises(RenderError, match="no chat template"):
        load_renderer(folder, "template")
    with pytest.raises(RenderError, match="known: "):
        load_renderer(folder, "qwen")


def test_arguments_of_the_rules_come_from_the_folder(tmp_path: Path, cache: Path) -> None:
    folder = qwen_folder(tmp_path, cache)
    (folder / "insitu_renderer.json").write_text(
        json.dumps({"template_arguments": {"enable_thinking": False}})
    )
    renderer = load_renderer(folder, "qwen3")
    assert renderer.decode(renderer.generation_prompt()).endswith("<think>\n\n</think>\n\n")
    (folder / "insitu_renderer.json").write_text(json.dumps({"template_arguments": {"thinking": False}}))
    with pytest.raises(RenderError, match="thinking"):
        load_renderer(folder, "qwen3")


def test_arguments_of_the_template_stand_behind_the_rules(tmp_path: Path, cache: Path) -> None:
    folder = qwen_folder(tmp_path, cache)
    closing = "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    closing += "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    (folder / "chat_template.jinja").write_text(qwen3_template() + closing, encoding="utf-8")
    for rules in ("template", "qwen3"):
        plain, closed = load_renderer(folder, rules), load_renderer(folder, f"{rules}?enable_thinking=false")
        ends = [one.decode(one.generation_prompt()) for one in (plain, closed)]
        assert ends[1] == f"{ends[0]}<think>\n\n</think>\n\n"
    for renderer, message in (
        ("auto?enable_thought=true", "the chat template has no argument 'enable_thought'"),
        ("auto?enable_thinking=no", "'enable_thinking=no' is not NAME=JSON"),
        ("auto?enable_think=false", "the chat template has no argument 'enable_think'"),
    ):
        with pytest.raises(RenderError, match=message):
            load_renderer(folder, renderer)


def test_a_small_folder_still_loads_by_its_template(tmp_path: Path) -> None:
    assert load_renderer(write_renderer(tmp_path / "a")).caps.tool_format == "hermes"
    assert load_renderer(write_renderer(tmp_path / "b", QWEN3_REASONING)).caps.reasoning


def test_without_the_package_auto_goes_by_the_template_and_a_name_says_what_to_install(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = qwen_folder(tmp_path, cache)
    (folder / "chat_template.jinja").write_text(qwen3_template(), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "renderers", None)
    assert load_renderer(folder).caps.source == "template"
    with pytest.raises(RenderError, match=r"\[renderers\]'"):
        load_renderer(folder, "qwen3")


def test_added_tokens_that_are_text_stay_text(tmp_path: Path) -> None:
    """Gemma's tokenizer keeps runs of line ends and HTML tags whole, GPT-NeoX's runs of spaces."""
    folder = write_renderer(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    last = spec["added_tokens"][-1]
    plain = {"special": False, "lstrip": False, "rstrip": False, "normalized": False}
    texts = ("\n\n\n", "    ", "\u2581\u2581", "<table>", "</h1>", "unused word")
    markers = ("<|own|>", "<tool_calls>")
    for number, name in enumerate((*texts, *markers), 1):
        spec["added_tokens"].append({**last, **plain, "content": name, "id": last["id"] + number})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    codec = load_renderer(folder, "template").codec
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    assert not {*texts} & {*codec.control}
    assert {*markers, "<think>", "<|im_start|>"} <= {*codec.control}
    for text in texts:
        assert codec.encode_content(text).tolist() == [ids[text]]
    assert codec.decode(codec.encode_content("a\n\n\n<table>    b")) == "a\n\n\n<table>    b"
    for marker in markers:
        assert ids[marker] not in codec.encode_content(f"a {marker} b").tolist()
    spec["added_tokens"][-1]["content"] = "user<|im_end|>"
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(RenderError, match="begins with an ordinary character 'u'; name control_tokens"):
        load_renderer(folder, "template")
