"""transformers' own template runner and tokenizer as oracle; skipped where they are not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from render_families import HERMES, QWEN3_REASONING, write_renderer

from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.types import Message, ToolCall, ToolSpec

transformers = pytest.importorskip("transformers")

ARGUMENTS = {"path": "é.py", "n": [1, None, True]}
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules é"},
    {"role": "user", "content": "  Fix f.\n\n"},
    {"role": "assistant", "content": "look", "tool_calls": [CALL]},
    {"role": "tool", "content": "x = 1\n", "tool_call_id": "c"},
    {"role": "user", "content": "more"},
]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "read", "description": "<b>é", "parameters": PARAMETERS}}


def ours(raw: dict[str, Any]) -> Message:
    calls = [
        ToolCall(id=c["id"], name=c["function"]["name"], arguments=json.dumps(c["function"]["arguments"]))
        for c in raw.get("tool_calls", ())
    ]
    answers = raw.get("tool_call_id", "")
    return Message(role=raw["role"], text=raw["content"], tool_calls=tuple(calls), tool_call_id=answers)


@pytest.mark.parametrize(("template", "tools"), [(HERMES, [TOOL]), (HERMES, []), (QWEN3_REASONING, [])])
def test_same_ids_as_apply_chat_template(tmp_path: Path, template: str, tools: list[dict[str, Any]]) -> None:
    folder = write_renderer(tmp_path, template)
    renderer = template_renderer(read_folder(folder))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=template, eos_token="<|im_end|>"
    )
    want = tokenizer.apply_chat_template(
        MESSAGES, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    messages = [ours(m) for m in MESSAGES]
    specs = [ToolSpec(name="read", description="<b>é", parameters=json.dumps(PARAMETERS)) for _ in tools]
    got = [*renderer.open(messages[:1], specs), *renderer.append(messages[1:]), *renderer.generation_prompt()]
    assert [int(i) for i in got] == list(want)
