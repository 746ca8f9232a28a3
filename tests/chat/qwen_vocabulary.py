"""The real vocabulary of Qwen, from the ranks that the `dashscope` package carries, as a tokenizer.json."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
import os
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *(
        "<|sandbox_start|>",
        "<|sandbox_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
    ),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>"),
    *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>"),
    *("</tool_response>", "<think>", "</think>"),
)
"""Qwen3's added tokens in the order of their ids, from 151643 on."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def ranks_file() -> Path:
    found = importlib.util.find_spec("dashscope")
    if found is None or found.origin is None:
        raise FileNotFoundError("the package dashscope is not installed; scripts/setup test installs it")
    return Path(found.origin).parent / "resources" / "qwen.tiktoken"


SMALL = 4096
"""Tokens of the small one: which rules a template gets does not depend on how many there are, but every load
of the whole takes seconds."""


def qwen_tokenizer_json(cache: Path, *, small: bool = False) -> str:
    """Built once per `cache` folder: finding the merges takes seconds. small: the first tokens only, and the
    added ones behind them."""
    path = cache / f"qwen3-tokenizer{'-small' if small else ''}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(_build(SMALL if small else None), encoding="utf-8")
        part.replace(path)
    return path.read_text(encoding="utf-8")


def _build(first: int | None) -> str:
    lines = (line.split() for line in ranks_file().read_bytes().splitlines() if line.strip())
    # both halves of a token have lower ranks than the token
    ranks = {base64.b64decode(token): int(rank) for token, rank in itertools.islice(lines, first)}
    spell = _byte_letters()
    vocab = {"".join(spell[b] for b in token): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        if len(token) > 1:
            left, right = _halves(ranks, token, rank)
            merges.append(("".join(spell[b] for b in left), "".join(spell[b] for b in right)))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in CONTROL])
    return str(tokenizer.to_str())


def _halves(ranks: dict[bytes, int], token: bytes, rank: int) -> list[bytes]:
    """The two tokens that merge into `token`: byte pair encoding with lower ranks only."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        best, at = min(pairs)
        if best >= rank:
            raise ValueError(f"no merge leads to {token!r}")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _byte_letters() -> dict[int, str]:
    """The letters by which byte-level BPE spells bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in kept}
    others = [b for b in range(256) if b not in letters]
    return letters | {b: chr(256 + i) for i, b in enumerate(others)}


def qwen_folder(folder: Path, cache: Path, **config: object) -> Path:
    """A model folder with Qwen's small vocabulary and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(qwen_tokenizer_json(cache, small=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}), encoding="utf-8")
    return folder
