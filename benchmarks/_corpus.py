"""Text, tokenizer and family that every Python installation can make by itself, for the gateway's benchmarks.

The text is the standard library's source, the tokenizer a byte-level BPE trained on a part of it, so that a
token is about three and a half characters, as with real vocabularies on source code. Callers: bench.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
VOCABULARY = 8192
TRAINED_ON = 1_500_000
"""Characters."""


def sources() -> list[str]:
    """The modules of the standard library, by name."""
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in found]


def cycle(texts: list[str], start: int) -> Iterator[str]:
    """Lines of all texts without end; different `start`s begin at different lines."""
    lines = "".join(texts).splitlines(keepends=True)
    at = start * 7919
    while True:
        yield lines[at % len(lines)]
        at += 1


def write_model(folder: Path) -> Path:
    """A model folder without weights: tokenizer and chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    taken, used = [], 0
    for text in sources():
        if used < TRAINED_ON:
            taken.append(text)
            used += len(text)
    tokenizer.train_from_iterator(taken, trainer)
    tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in CONTROL])
    template = files("insitu_train").joinpath("demo", "chat_template.jinja").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    return folder


def load(folder: Path) -> TemplateRenderer:
    return template_renderer(read_folder(folder))
