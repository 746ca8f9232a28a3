"""Known families for the tests: Qwen's real vocabulary, and small ones with the others' control tokens."""

from __future__ import annotations

import functools
from pathlib import Path

from qwen_vocabulary import qwen_tokenizer_json
from render_families import tokenizer_json

from insitu.chat.codec import Codec
from insitu_bridges.renderers_adapter import AdaptedRenderer, adapted_renderer

GLM = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"),
    *("</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
)
_DEEPSEEK_TOOLS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
_DEEPSEEK_OUTPUTS = ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")
DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"),  # noqa: RUF001
    *(f"<｜tool▁{name}｜>" for name in (*_DEEPSEEK_TOOLS, *_DEEPSEEK_OUTPUTS)),  # noqa: RUF001
    *("<think>", "</think>"),
)
KIMI = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|python_tag|>"),
)
CONTROL = {"glm": GLM, "deepseek": DEEPSEEK, "kimi": KIMI, "llama": LLAMA}
"""Control tokens by the first word of a family's name; Qwen's are its real ones."""

FAMILIES = (
    *("qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
    *("deepseek-v3", "deepseek-r1", "kimi-k2", "llama-3"),
)


@functools.cache
def codec_of(name: str, cache: Path) -> Codec:
    return Codec(qwen_tokenizer_json(cache) if "qwen" in name else tokenizer_json(CONTROL[name]))


@functools.cache
def renderer_of(name: str, cache: Path) -> AdaptedRenderer:
    kind = "qwen" if "qwen" in name else name.split("-")[0]
    return adapted_renderer(name, codec_of(kind, cache))
