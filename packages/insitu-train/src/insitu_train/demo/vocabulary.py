"""The demo model's tokenizer: one token per control marker, syntax piece, keyword and pool identifier.

A byte-level BPE without merges (`ignore_merges`): the pre-tokenizer's pieces are looked up whole and fall
back to bytes. No piece that a reply can contain spans more than one key or identifier; only lines of the
agent's constant prompt and of its fixed messages are long.
"""

from __future__ import annotations

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from insitu.tasks import toy

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

SYNTAX = (
    '"}]}}',
    '": [{"',
    '": {"',
    '": "',
    '", "',
    '"}}',
    '{"',
    "):",
    ", ",
    ".py",
    " // ",
    " <= ",
    " >= ",
    " + ",
    " - ",
    " * ",
    " % ",
    " < ",
    " > ",
    "\n\n\n",
    "\n\n",
    "\n    ",
    "\n",
    "# ",
)

WORDS = (
    "system user assistant tool name arguments path edits oldText newText command content offset timeout "
    "read bash edit write python3 check done def return min max True False import inspect from as target "
    "print pass fail getsource Fix must what its comment says returns whether is the of and smaller larger "
    "below above at most least plus minus times divided by modulo NAME LEVEL "
).split()

AGENT_MESSAGES = (
    "Could not find the exact text in ",
    ". The old text must match exactly including all whitespace and newlines.",
    "Successfully replaced 1 block(s) in ",
    "Found ",
    " occurrences of the text in ",
    ". The text must be unique. Please provide more context to make it unique.",
    "No changes made to ",
    ". The replacement produced identical content. "
    "This might indicate an issue with special characters or the text not existing as expected.",
    "Could not edit file: ",
    ". Error code: ENOENT.",
    "Command exited with code ",
    "(no output)",
)

_LONG = re.compile(r"[^\n]{12,}")


def prompt_lines(constant: str) -> list[str]:
    """Return the distinct long lines of an agent's constant prompt in order, without control markers."""
    for marker in CONTROL:
        constant = constant.replace(marker, "\n")
    return list(dict.fromkeys(m.group() for m in _LONG.finditer(constant)))


def _byte_text(piece: str) -> str:
    """`piece` in the printable alphabet of byte-level BPE."""
    return "".join(text for text, _ in _BYTES.pre_tokenize_str(piece)) if piece else ""


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def build_tokenizer(constant: str) -> Tokenizer:
    """Tokenizer whose long pieces are the lines of `constant` (the rendered system block of the agent)."""
    long = sorted([*prompt_lines(constant), *AGENT_MESSAGES], key=len, reverse=True)
    words = list(dict.fromkeys([*toy.VARIABLES, *toy.FUNCTIONS, *toy.MODULES, *WORDS]))
    pieces = [*(_byte_text(p) for p in (*SYNTAX, *words, *long))]
    every = dict.fromkeys([*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces])
    ids = {piece: i for i, piece in enumerate(every)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    pattern = "|".join([*map(re.escape, [*long, *SYNTAX]), r"[A-Za-z_]+[0-9]?", r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), _BYTES]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in CONTROL[:3]])
    tokenizer.add_tokens([AddedToken(c, special=False, normalized=False) for c in CONTROL[3:]])
    return tokenizer
