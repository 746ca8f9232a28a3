"""A renderer for any text: a byte-level BPE trained on the core's source, and a plain chat template.

The demo's vocabulary has no merges, so no text has two tokenizations in it; in this one `Splitter` encodes a
text with tokens that no tokenizer would choose, as a sampler may. Every block of a prompt is
`<|im_start|>ROLE`, text, `<|im_end|>`, so that a scripted policy can parse a rendered prompt.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import insitu
from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.types import IntArray

CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
)
TEMPLATE = r"""
{%- if tools %}{{- '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
VOCABULARY = 2000
SOURCES = 24
"""Source files of the core that the vocabulary is trained on."""


@functools.cache
def tokenizer_json() -> str:
    """Return a byte-level BPE of VOCABULARY tokens and the control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    sources = sorted(Path(insitu.__file__).parent.rglob("*.py"))[:SOURCES]
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in sources), trainer)
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in CONTROL])
    return tokenizer.to_str()


def open_renderer(folder: Path) -> TemplateRenderer:
    """Write the model folder and load it like any other."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    return template_renderer(read_folder(folder))


class Splitter:
    """Cuts tokens of a text into smaller ones of the same vocabulary, at random."""

    def __init__(self, tokenizer_file: Path, seed: int) -> None:
        spec = json.loads(tokenizer_file.read_text(encoding="utf-8"))
        self._ids: dict[str, int] = spec["model"]["vocab"]
        self._texts = {number: text for text, number in self._ids.items()}
        self._random = random.Random(seed)

    def split(self, ids: IntArray, share: float = 0.5) -> IntArray:
        """Return `ids` with about `share` of the divisible tokens cut in two, and at least one."""
        cuttable = [at for at, number in enumerate(ids.tolist()) if self._halves(number)]
        chosen = set(self._random.sample(cuttable, -(-int(len(cuttable) * share * 100) // 100)))
        if cuttable and not chosen:
            chosen = {cuttable[0]}
        cut: list[int] = []
        for at, number in enumerate(ids.tolist()):
            cut += self._random.choice(self._halves(number)) if at in chosen else [number]
        return np.array(cut, dtype=np.int32)

    def _halves(self, number: int) -> list[tuple[int, int]]:
        """Return all pairs of tokens equal to this one; none for a control token or a single byte."""
        text = self._texts.get(number, "")
        pairs = ((text[:at], text[at:]) for at in range(1, len(text)))
        return [(self._ids[a], self._ids[b]) for a, b in pairs if a in self._ids and b in self._ids]
