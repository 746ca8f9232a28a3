"""Which agents can say their first word to a served model: the length of each one's first prompt.

Caller: run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.config.load import WARM_START


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCall:
    """An agent's first prompt with its tools, for a question of one line."""

    characters: int
    shipped_tokens: int
    """Of the shipped model's vocabulary, which spells what it does not know byte by byte."""


FIRST_CALLS: Mapping[str, FirstCall] = {
    "pi": FirstCall(characters=5_800, shipped_tokens=476),
    "claude_code": FirstCall(characters=48_600, shipped_tokens=46_300),
    "codex": FirstCall(characters=37_800, shipped_tokens=35_800),
    "opencode": FirstCall(characters=31_000, shipped_tokens=29_200),
    "qwen_code": FirstCall(characters=71_100, shipped_tokens=68_400),
    "gemini_cli": FirstCall(characters=48_700, shipped_tokens=46_400),
    "mini_swe": FirstCall(characters=3_400, shipped_tokens=2_777),
}
"""Measured with the versions that are pinned here: the first request with tools of each agent's recording
(tests/wire/recordings), rendered by the shipped model's family; a test measures them again. Recordings hold
made-up words, as long as the agents' own. Pi's constant lines are tokens of that vocabulary: its tokens
and those of mini_swe are of a run of the agent itself under `insitu serve`."""
CHARACTERS_PER_TOKEN = 4
"""Of ordinary vocabularies on such prompts, about."""


class PromptFit:
    """What of a model's context the agents' first prompts take."""

    def __init__(self, model: Path, context_tokens: int) -> None:
        """`model`: its folder. `context_tokens`: of one call, as they are served."""
        self._shipped = _vocabulary(model) == _vocabulary(WARM_START)
        self._context = context_tokens

    def tokens(self, agent: str) -> int:
        """Of the agent's first prompt, about."""
        call = FIRST_CALLS[agent]
        return call.shipped_tokens if self._shipped else call.characters // CHARACTERS_PER_TOKEN

    def fits(self, agent: str) -> bool:
        return self.tokens(agent) < self._context

    def note(self, agent: str) -> str:
        """Why this agent will not get an answer; empty when it may get one."""
        if self.fits(agent):
            return ""
        return f"its first prompt, about {self.tokens(agent):,} tokens, exceeds the {self._context:,} served"

    def summary(self, agents: Sequence[str]) -> str:
        """One line for the operator; empty when all of these agents may get an answer."""
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


def _vocabulary(model: Path) -> bytes:
    return (model / "tokenizer.json").read_bytes()
