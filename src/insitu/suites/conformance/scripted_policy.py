"""The scripted policy: reads, edits, runs, asks in parallel, spawns, fills the context, stops.

It sees prompts as ids and answers with ids, part of them in splits that no tokenizer would choose, with odd
spacing and escapes in the arguments, and with reasoning now and then. What a prompt is (the main line, a
sub-agent, a request for a summary, anything else) it tells by marks of its own that travel through the
agent. One Director plays one session.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from insitu.chat.template import TemplateRenderer
from insitu.suites.conformance.agent_tools import OWN_AGENT, AgentTools, Call, tools_from_schemas
from insitu.suites.conformance.prompt_reader import PromptBlock, PromptTranscript, read_prompt
from insitu.suites.open_renderer import Splitter
from insitu.types import FileEntry, IntArray, RequestKey, Tree

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
"""Replies of a sub-agent that waits for the others to begin."""
MOST_GROWTH = 14
"""Commands with much output after which an agent should have compacted."""
LOOK = "I look first."
"""What the policy says in its first reply."""
_PART = re.compile(r"\[\[part (\d+)\]\]")
_SUMMARY = re.compile(r"\[\[summary (\d+)\]\]")

Kind = Literal["main", "part", "summary", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """What the policy says."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """One reply as it left the policy."""

    kind: Kind
    ids: IntArray = field(repr=False)
    split: bool
    """Said with tokens that no tokenizer would choose."""


class ScriptedPolicy:
    """Implements `insitu.engines.scripted.Policy`."""

    def __init__(self, renderer: TemplateRenderer, splitter: Splitter, play: AgentTools) -> None:
        self.spoken: dict[int, SampledReply] = {}
        """By turn."""
        self.finished_parts: set[str] = set()
        """Sub-agents that gave their answer."""
        self.overlapped = False
        """All sub-agents had begun when the first of them gave its answer."""
        self.compactions = 0
        """Summaries that the agent asked for and went on from."""
        self.crowded = False
        """A summary was asked for before the opening was said."""
        self._renderer = renderer
        self._splitter = splitter
        self.play = play
        self._summaries = 0
        self._done = 0
        """Steps of the main line that are behind."""
        self._grown = 0
        self._repeated = 0
        self._looks: dict[str, int] = {}
        """By sub-agent that has begun: its replies that looked at something."""

    def __call__(self, ids: IntArray, key: RequestKey) -> IntArray:
        seen = read_prompt(self._renderer.codec, ids)
        kind, reply = self._react(seen)
        canonical = self._say(reply, seen)
        split = key.turn % 2 == 0
        said = self._splitter.split(canonical) if split else canonical
        split = split and not np.array_equal(said, canonical)
        self.spoken[key.turn] = SampledReply(kind=kind, ids=said, split=split)
        return said

    def _react(self, seen: PromptTranscript) -> tuple[Kind, ScriptedReply]:
        asked = seen.messages[-1] if seen.messages else PromptBlock(role="user", text="")
        play = self.play
        if self._wants_summary(asked, seen):
            self.crowded = self.crowded or self._done < len(self._opening())
            self._summaries += not (play.review and re.search(play.review, asked.text))
            said = f"[[summary {self._summaries}]] {PROMPT} Most of it is done."
            return "summary", ScriptedReply(text=play.summary.format(said))
        # Some agents tell a summary in the user's place, some in the model's.
        told = seen.texts("user", "system", "assistant")
        if MAIN not in told:
            part = _PART.search(told)
            return ("part", self._part(part[1], seen)) if part else ("other", ScriptedReply(text="A task"))
        if self.play is OWN_AGENT:
            self.play = tools_from_schemas(seen.tools)
        shown = [int(number) for number in _SUMMARY.findall(told)]
        self.compactions = max([self.compactions, *(n for n in shown if n <= self._summaries)])
        return "main", self._next(seen)

    def _wants_summary(self, asked: PromptBlock, seen: PromptTranscript) -> bool:
        """Without tools only words can be wanted, and words about what was done are a summary, however
        a version puts it. Agents that offer their tools all the same are known by their words."""
        if asked.role not in ("user", "system"):
            return False
        if re.search(self.play.summarise, asked.text):
            return True
        whole = seen.texts("user", "system", "assistant")
        done = LOOK in whole or _SUMMARY.search(whole) is not None
        return self.play.compacts and not seen.tools and MAIN in whole and done

    def _next(self, seen: PromptTranscript) -> ScriptedReply:
        """The main line goes on by what was said, not by what is still to be seen: compaction forgets."""
        opening, step = self._opening(), self._done
        self._done += 1
        if step < len(opening):
            return opening[step]
        if step == len(opening) and self.play.wait is not None:
            return ScriptedReply(calls=[self.play.wait(_latest_answers(seen))])
        return self._grow()

    def _opening(self) -> list[ScriptedReply]:
        play = self.play
        both = [play.read("notes.txt"), play.run("echo caf\u00e9; ls")]
        replies = [
            ScriptedReply(text=f"  {LOOK}\n\n", calls=[play.read("app.py")]),
            ScriptedReply(reasoning="Two at once.", calls=both),
            ScriptedReply(text="Now the edit.", calls=[play.edit("app.py", WRONG, RIGHT)]),
            ScriptedReply(reasoning="Is it right?", calls=[play.run(CHECK)]),
        ]
        if play.muses:
            replies.append(ScriptedReply(text="That looks right."))
        if play.spawn is not None:
            asked = (f"[[part {n}]] Read notes.txt and say what it says." for n in range(1, PARTS + 1))
            replies.append(ScriptedReply(text="Two helpers.", calls=[play.spawn(prompt) for prompt in asked]))
        # An agent without tools gets its final text at once.
        return [reply for reply in replies if all(name for name, _ in reply.calls)]

    def _grow(self) -> ScriptedReply:
        """Much to read until the agent has compacted; then the end."""
        play = self.play
        if self._repeated < play.repeats:
            self._repeated += 1
            return ScriptedReply(calls=[play.run("echo again")])
        if play.compacts and not self.compactions and self._grown < MOST_GROWTH:
            self._grown += 1
            code = f"for n in range({play.grow_bytes // 20}): print(n, {self._grown}, 'line of output')"
            return ScriptedReply(reasoning="More to read.", calls=[play.run(f'python3 -c "{code}"')])
        text = "The task is done: app.py is mended and checked.\n"
        return ScriptedReply(text=text, calls=[play.finish] if play.finish else ())

    def _say(self, reply: ScriptedReply, seen: PromptTranscript) -> IntArray:
        """Ids of the reply as a tokenizer would choose them, stop id included."""
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
        """Looks, and then answers: once the others have begun, or when waiting for them leads to nothing."""
        looks = self._looks.setdefault(number, 0)
        together = len(self._looks) >= PARTS
        if any(said.role == "tool" for said in seen.messages) and (together or looks >= MOST_LOOKS):
            self.overlapped = self.overlapped or (together and not self.finished_parts)
            self.finished_parts.add(number)
            text = f"[[part {number}]] is done: a rectangle is width times height."
            return (
                ScriptedReply(calls=[self.play.answer(text)])
                if self.play.answer
                else ScriptedReply(text=text)
            )
        self._looks[number] += 1
        path = ("notes.txt", "app.py")[looks % 2]  # agents take a call that is repeated for a loop
        return ScriptedReply(reasoning=f"Part {number} needs a look.", calls=[self.play.read(path)])


def _offered(name: str, tools: Collection[str]) -> str:
    """`name` as the prompt offers it: as it is, or behind the namespace it came in."""
    behind = sorted(tool for tool in tools if tool.endswith(name))
    return name if name in tools or not behind else behind[0]


def _latest_answers(seen: PromptTranscript) -> str:
    """What the tools said since the model spoke last."""
    texts: list[str] = []
    for said in reversed(seen.messages):
        if said.role == "assistant":
            break
        texts.append(said.text)
    return "\n".join(reversed(texts))
