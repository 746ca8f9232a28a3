"""Parse a prompt's ids into a conversation, for a scripted policy.

The policy gets only the ids that the engine gets, so its behaviour shows that they carry everything that the
agent sent. Blocks are found by control ids, never by text. Only for `suites.open_renderer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from insitu.chat.codec import Codec
from insitu.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlock:
    """One block of a prompt."""

    role: str
    text: str = field(repr=False)
    """Includes reasoning and calls of an assistant as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTranscript:
    """One prompt."""

    tools: Mapping[str, Mapping[str, Any]]
    """Schema of the parameters, by name of the tools on offer."""
    messages: tuple[PromptBlock, ...]

    def texts(self, *roles: str) -> str:
        """Return all text of these roles."""
        return "\n".join(said.text for said in self.messages if said.role in roles)


def read_prompt(codec: Codec, ids: IntArray) -> PromptTranscript:
    """Return the conversation that `ids` render, without the generation prompt at their end."""
    opens = codec.control["<|im_start|>"]
    ends = codec.control["<|im_end|>"]
    starts = [at for at in codec.control_positions(ids) if int(ids[at]) == opens]
    tools: dict[str, Mapping[str, Any]] = {}
    messages: list[PromptBlock] = []
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        inside = ids[start + 1 : stop]
        closing = [at for at in codec.control_positions(inside) if int(inside[at]) == ends]
        if not closing:
            continue
        role, _, text = codec.decode(inside[: closing[-1]]).partition("\n")
        if role == "tools":
            functions = [tool["function"] for tool in json.loads(text)]
            tools = {str(tool["name"]): tool.get("parameters") or {} for tool in functions}
        else:
            messages.append(PromptBlock(role=role, text=text))
    return PromptTranscript(tools=tools, messages=tuple(messages))
