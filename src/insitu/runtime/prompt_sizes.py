"""Sizes of the agents' first prompts, to check which agents fit into a served model's context."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from insitu.config.load import WARM_START
from insitu.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstCall:
    """Size of an agent's first prompt with its tools, for a task of one line."""

    characters: int
    shipped_tokens: int
    """Tokens in the shipped model's vocabulary, which falls back to bytes."""
    tools: bool = True
    """Whether the agent offers tools in its requests."""


FIRST_CALLS: Mapping[str, _FirstCall] = {
    "pi": _FirstCall(characters=5_800, shipped_tokens=476),
    "claude_code": _FirstCall(characters=48_600, shipped_tokens=46_300),
    "codex": _FirstCall(characters=38_700, shipped_tokens=36_700),
    "opencode": _FirstCall(characters=31_000, shipped_tokens=29_200),
    "qwen_code": _FirstCall(characters=71_100, shipped_tokens=68_400),
    "gemini_cli": _FirstCall(characters=48_700, shipped_tokens=46_400),
    "mini_swe": _FirstCall(characters=3_400, shipped_tokens=2_777),
}
"""Measured with the pinned versions: the first request with tools of each agent's recording
(tests/wire/recordings), rendered by the shipped model's renderer. Recordings contain made-up words of the
same lengths as the originals. Pi's constant lines are tokens of the shipped vocabulary, so the tokens of pi
and mini_swe are from real runs under `insitu serve`."""
OWN_FIRST_CALLS: Mapping[str, _FirstCall] = {
    "script": _FirstCall(characters=1_076, shipped_tokens=44),
    "terminus": _FirstCall(characters=902, shipped_tokens=729, tools=False),
}
"""Those of the agents that insitu brings along, which `insitu serve` does not set up."""
CHARACTERS_PER_TOKEN = 4
"""Approximate value of ordinary vocabularies on such prompts."""
KNOWN = 0.9
"""Share of known words from which the demo's model may be asked."""
MAX_PROMPT = 10_000
"""Characters of a task's prompt that are looked at."""


class PromptFit:
    """Check whether the agents' first prompts fit into a model's context."""

    def __init__(self, model: Path, context_tokens: int) -> None:
        """Take the model's folder and the served context size of one call."""
        self._shipped = _vocabulary(model) == _vocabulary(WARM_START)
        self._context = context_tokens

    def tokens(self, agent: str) -> int:
        """Return the approximate size of the agent's first prompt in tokens."""
        call = FIRST_CALLS.get(agent) or OWN_FIRST_CALLS[agent]
        return call.shipped_tokens if self._shipped else call.characters // CHARACTERS_PER_TOKEN

    def fits(self, agent: str) -> bool:
        return self.tokens(agent) < self._context

    def note(self, agent: str) -> str:
        """Return why this agent will not work; empty when its first prompt fits."""
        if self.fits(agent):
            return ""
        return f"its first prompt, about {self.tokens(agent):,} tokens, exceeds the {self._context:,} served"

    def summary(self, agents: Sequence[str]) -> str:
        """Return one line for the operator; empty when the first prompts of all these agents fit."""
        if all(self.fits(agent) for agent in agents):
            return ""
        served = ", ".join(agent for agent in FIRST_CALLS if self.fits(agent)) or "none"
        if self._shipped:
            return (
                f"The shipped toy model, with {self._context:,} tokens of context, can serve {served}; the "
                "first prompts of the other agents need a model with more (model.path, engine.kind)."
            )
        return (
            f"With {self._context:,} tokens of context (model.max_context_tokens) the first prompts of these "
            f"agents fit: {served}."
        )


def foreign_words(model: Path, tasks: Iterable[Task]) -> str:
    """Return a note where the model is the demo's and does not know the words of these tasks, else ""."""
    if _vocabulary(model) != _vocabulary(WARM_START):
        return ""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = known = 0
    for task in tasks:
        tokens = {token for token in tokenizer.encode(task.prompt[:MAX_PROMPT]).tokens if len(token) > 1}
        for word in re.findall(r"[A-Za-z_]{2,}", task.prompt[:MAX_PROMPT]):
            words += 1
            known += any(word in token for token in tokens)
    if known >= KNOWN * words:
        return ""
    return (
        f"the model is the demo's, which knows {known:,} of the {words:,} words of these tasks: set"
        " model.path to the folder of a model that can solve them"
    )


def _vocabulary(model: Path) -> bytes:
    return (model / "tokenizer.json").read_bytes()
