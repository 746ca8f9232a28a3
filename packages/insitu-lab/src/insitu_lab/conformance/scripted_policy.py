"""Scripted policy: reads, edits, runs, calls in parallel, spawns sub-agents, fills the context, stops.

It gets prompts as ids and returns ids: half of the replies in splits that no tokenizer would choose, with odd
spacing and escapes in the arguments, some with reasoning. It recognises a prompt (main agent, sub-agent,
request for a summary, other) by its own marks, which travel through the agent. One object per session.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from insitu.chat.codec import Codec
from insitu.chat.template import TemplateRenderer
from insitu.types import FileEntry, IntArray, RequestKey, Tree
from insitu_lab.conformance.agent_tools import OWN_AGENT, AgentTools, Call, tools_from_schemas
from insitu_lab.open_renderer import Splitter

MAIN = "[[main task]]"
PROMPT = f"{MAIN} The function area in app.py is wrong: check.py says how. Mend it, then run check.py."
WRONG, RIGHT = "return w + h", "return w * h"
FILES: Tree = {
    "app.py": FileEntry(content=f"def area(w, h):\n    {WRONG}\n".encode()),
    "check.py": FileEntry(content=b"import app\nassert app.area(3, 4) == 12\nprint('checked')\n"),
    "notes.txt": FileEntry(content=b"The area of a rectangle is its width times its height.\n"),
}
CHECK = "python3 check.py > ran.txt; cat ran.txt"
PARTS = 2
MOST_LOOKS = 12
"""Replies of a sub-agent until it stops waiting for the others."""
MOST_GROWTH = 14
"""Most commands with long output; by then an agent should have compacted."""
LOOK = "I look first."
"""Text of the first reply."""
DONE = "The task is done: app.py is mended and checked.\n"
"""Text of the last reply."""
_PART = re.compile(r"\[\[part (\d+)\]\]")
_SUMMARY = re.compile(r"\[\[summary (\d+)\]\]")


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


Kind = Literal["main", "part", "summary", "bare", "other"]
"""`bare`: a prompt with the task and without tools: a title, or all there is of an agent without tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """Reply before rendering."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """Reply as token ids."""

    kind: Kind
    ids: IntArray = field(repr=False)
    split: bool
    """Contains tokens that no tokenizer would choose."""


class ScriptedPolicy:
    """Implements `insitu_train.demo.scripted.Policy`."""

    def __init__(self, renderer: TemplateRenderer, splitter: Splitter, tools: AgentTools) -> None:
        self.replies: dict[int, SampledReply] = {}
        """By turn."""
        self.finished_parts: set[str] = set()
        """Sub-agents that have finished."""
        self.overlapped = False
        """All sub-agents had started when the first of them finished."""
        self.compactions = 0
        """Summaries that the agent requested and then used."""
        self.tools_offered = False
        """The agent has tools."""
        self.window_too_small = False
        """A summary was requested before the opening was over."""
        self._renderer = renderer
        self._splitter = splitter
        self.tools = tools
        self._summaries = 0
        self._done = 0
        """Steps of the main agent that are done."""
        self._grown = 0
        self._repeated = 0
        self._looks: dict[str, int] = {}
        """Number of file reads by sub-agent."""

    def __call__(self, ids: IntArray, key: RequestKey) -> IntArray:
        seen = read_prompt(self._renderer.codec, ids)
        kind, reply = self._react(seen)
        canonical = self._say(reply, seen)
        split = key.turn % 2 == 0
        said = self._splitter.split(canonical) if split else canonical
        split = split and not np.array_equal(said, canonical)
        self.replies[key.turn] = SampledReply(kind=kind, ids=said, split=split)
        return said

    def _react(self, seen: PromptTranscript) -> tuple[Kind, ScriptedReply]:
        asked = seen.messages[-1] if seen.messages else PromptBlock(role="user", text="")
        tools = self.tools
        self.tools_offered = self.tools_offered or bool(seen.tools)
        if self._wants_summary(asked, seen):
            self.window_too_small = self.window_too_small or self._done < len(self._opening())
            self._summaries += not (tools.review and re.search(tools.review, asked.text))
            said = f"[[summary {self._summaries}]] {PROMPT} Most of it is done."
            return "summary", ScriptedReply(text=tools.summary.format(said))
        # Some agents insert a summary as a user message, some as an assistant message.
        text = seen.texts("user", "system", "assistant")
        if MAIN not in text:
            part = _PART.search(text)
            return ("part", self._part(part[1], seen)) if part else ("other", ScriptedReply(text="A task"))
        if not seen.tools:
            return "bare", ScriptedReply(text=DONE)
        if self.tools is OWN_AGENT:
            self.tools = tools_from_schemas(seen.tools)
        elif self.tools.spawn and not any(tool.endswith(self.tools.spawn("")[0]) for tool in seen.tools):
            self.tools = replace(self.tools, spawn=None)
        shown = [int(number) for number in _SUMMARY.findall(text)]
        self.compactions = max([self.compactions, *(n for n in shown if n <= self._summaries)])
        return "main", self._next(seen)

    def _wants_summary(self, asked: PromptBlock, seen: PromptTranscript) -> bool:
        """Return whether the prompt requests a summary."""
        # A request without tools about work that has begun is one, whatever its words in this version.
        if asked.role not in ("user", "system"):
            return False
        if re.search(self.tools.summarise, asked.text):
            return True
        whole = seen.texts("user", "system", "assistant")
        done = LOOK in whole or _SUMMARY.search(whole) is not None
        return self.tools.compacts and not seen.tools and MAIN in whole and done

    def _next(self, seen: PromptTranscript) -> ScriptedReply:
        """Return the next reply to the main agent."""
        # Progress is counted here, not read from the prompt: compaction removes earlier replies.
        opening, step = self._opening(), self._done
        self._done += 1
        if step < len(opening):
            return opening[step]
        if step == len(opening) and self.tools.wait is not None:
            return ScriptedReply(calls=[self.tools.wait(_latest_answers(seen))])
        return self._grow()

    def _opening(self) -> list[ScriptedReply]:
        tools = self.tools
        both = [tools.read("notes.txt"), tools.run("echo caf\u00e9; ls")]
        replies = [
            ScriptedReply(text=f"  {LOOK}\n\n", calls=[tools.read("app.py")]),
            ScriptedReply(reasoning="Two at once.", calls=both),
            ScriptedReply(text="Now the edit.", calls=[tools.edit("app.py", WRONG, RIGHT)]),
            ScriptedReply(reasoning="Is it right?", calls=[tools.run(CHECK)]),
        ]
        if tools.continues_after_text:
            replies.append(ScriptedReply(text="That looks right."))
        if tools.spawn is not None:
            asked = (f"[[part {n}]] Read notes.txt and say what it says." for n in range(1, PARTS + 1))
            replies.append(
                ScriptedReply(text="Two helpers.", calls=[tools.spawn(prompt) for prompt in asked])
            )
        return [reply for reply in replies if all(name for name, _ in reply.calls)]

    def _grow(self) -> ScriptedReply:
        """Return commands with long output until the agent has compacted, then the final text."""
        tools = self.tools
        if self._repeated < tools.repeats:
            self._repeated += 1
            return ScriptedReply(calls=[tools.run("echo again")])
        if tools.compacts and not self.compactions and self._grown < MOST_GROWTH:
            self._grown += 1
            code = f"for n in range({tools.grow_bytes // 20}): print(n, {self._grown}, 'line of output')"
            return ScriptedReply(reasoning="More to read.", calls=[tools.run(f'python3 -c "{code}"')])
        return ScriptedReply(text=DONE, calls=[tools.finish] if tools.finish else ())

    def _say(self, reply: ScriptedReply, seen: PromptTranscript) -> IntArray:
        """Return the ids of a reply as a tokenizer would choose them, with the stop id."""
        text = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
        text += reply.text
        for at, (name, arguments) in enumerate(reply.calls):
            raw = json.dumps(arguments, ensure_ascii=True, separators=(" , ", ":  "))
            between = "\n" if at or reply.text else ""
            named = json.dumps(_offered(name, seen.tools))
            text += f'{between}<tool_call>\n{{"name": {named}, "arguments": {raw}}}\n</tool_call>'
        end = np.array([self._renderer.end_ids[0]], dtype=np.int32)
        return np.concatenate([self._renderer.codec.encode(text), end]).astype(np.int32)

    def _part(self, number: str, seen: PromptTranscript) -> ScriptedReply:
        """Return a file read, or the answer once all sub-agents have started or MOST_LOOKS is reached."""
        looks = self._looks.setdefault(number, 0)
        together = len(self._looks) >= PARTS
        if any(said.role == "tool" for said in seen.messages) and (together or looks >= MOST_LOOKS):
            self.overlapped = self.overlapped or (together and not self.finished_parts)
            self.finished_parts.add(number)
            text = f"[[part {number}]] is done: a rectangle is width times height."
            return (
                ScriptedReply(calls=[self.tools.answer(text)])
                if self.tools.answer
                else ScriptedReply(text=text)
            )
        self._looks[number] += 1
        path = ("notes.txt", "app.py")[looks % 2]  # agents take a repeated call for a loop
        return ScriptedReply(reasoning=f"Part {number} needs a look.", calls=[self.tools.read(path)])


def _offered(name: str, tools: Collection[str]) -> str:
    """Return the tool's name as offered in the prompt: unchanged or with a namespace."""
    behind = sorted(tool for tool in tools if tool.endswith(name))
    return name if name in tools or not behind else behind[0]


def _latest_answers(seen: PromptTranscript) -> str:
    """Return the tool results since the last assistant message."""
    texts: list[str] = []
    for said in reversed(seen.messages):
        if said.role == "assistant":
            break
        texts.append(said.text)
    return "\n".join(reversed(texts))
