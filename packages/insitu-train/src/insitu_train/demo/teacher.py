"""A scripted teacher of the toy tasks: an engine without a model, for `insitu rollout` and then `insitu sft`.

`engine.kind = "insitu_train.demo.teacher:opened"`. It reads what the agent sends, as a model would: first it
reads the file that the task names, then it replaces the faulty expression by what the comment says, in the
tools `read` and `edit` of Pi and of the script agent. Its turns are demonstrated: without log-probabilities.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, model_folder
from insitu.tasks.toy import COMPARISONS, EXTREMES, OPERATORS
from insitu.types import IntArray, Message, RequestKey
from insitu_train.demo.demonstrator import FINAL, call
from insitu_train.demo.scripted import ScriptedEngine

_ISSUE = re.compile(r"Fix (\w+\.py): \w+ must return")
_FAULT = re.compile(r"# returns (?P<meaning>[^\n]+)\n +(?P<line>[^\n]+)")
_SIGNS = {word: sign for sign, word in OPERATORS.items()}
_COMPARED = {word: sign for sign, word in COMPARISONS.items()}
_CHOSEN = {word: name for name, word in EXTREMES.items()}


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[ScriptedEngine]:
    """Yield the teacher for the configured model's tokens."""
    renderer = load_renderer(model_folder(config), config.model.renderer)

    def policy(prompt: IntArray, key: RequestKey) -> Message:
        return next_turn(renderer, prompt)

    yield ScriptedEngine(renderer, policy, max_context_tokens=config.model.max_context_tokens)


def next_turn(renderer: ChatRenderer, prompt: IntArray) -> Message:
    """Return the reply to a prompt; it says that it is done where it finds nothing to do."""
    text = renderer.decode(prompt)
    issues = [*_ISSUE.finditer(text)]
    done = Message(role="assistant", text=FINAL)
    if not issues:
        return done
    path, since = issues[-1][1], text[issues[-1].end() :]
    found = _FAULT.search(since)
    if found is None:
        return done if "<tool_response>" in since else call("read", path=path)
    if "Successfully replaced" in since:
        return done
    old, new = found["line"].removeprefix("return "), expression(found["meaning"])
    if old == new:  # the statement lacks its `return`
        new = f"return {new}"
    return call("edit", path=path, edits=[{"oldText": old, "newText": new}])


def expression(meaning: str) -> str:
    """Return the expression that a comment of a toy task describes."""
    words = meaning.split()
    if words[0] == "the":  # the larger of a and b
        return f"{_CHOSEN[words[1]]}({words[3]}, {words[5]})"
    if words[0] == "whether":  # whether a is at most b
        return f"{words[1]} {_COMPARED[' '.join(words[3:-1])]} {words[-1]}"
    return f"{words[0]} {_SIGNS[' '.join(words[1:-1])]} {words[-1]}"
