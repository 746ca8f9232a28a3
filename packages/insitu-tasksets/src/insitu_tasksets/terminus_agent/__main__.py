"""Agent loop of the terminus harness; runs in the sandbox and uses only the standard library.

    screen -> model -> {"analysis", "plan", "commands", "task_complete"} -> keys -> screen

No tools: plain text both ways over chat completions. When the context is nearly full, the work is handed over
in three calls: the old conversation writes a summary, a new one asks questions, the old one answers them, and
the new one continues with the answers. Conversations are append-only, so that sampled prefixes stay valid.
"""

import http.client
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TypedDict
from urllib.parse import urlsplit

from .terminal import FIRST_S, Terminal

LONGEST_S = 60.0
CALL_TIMEOUT_S = 3600.0
MAX_ATTEMPTS = 3
UNREADABLE = 6
"""Replies in a row without a usable command before the loop gives up."""

PROTOCOL = """You work at a Linux terminal to get a task done: you see what it shows, and you type into it.

Answer with one JSON object and nothing else:
{"analysis": "what you see and what is left to do", "plan": "what the keys below are for",
 "commands": [{"keystrokes": "ls -la\\n", "duration": 0.1}], "task_complete": false}

- "keystrokes" are typed exactly as they are: end a command with \\n or it is not run. C-c, C-d and other
  control keys, Escape, Up, Down, Left, Right, Tab and Enter are written as that name alone.
- "duration" is how many seconds to wait for it, at most 60: 0.1 for what is instant, more for what computes.
  Empty "keystrokes" only wait.
- "commands" may be empty. Set "task_complete" to true when all is done; you will be asked once more.

The task:
"""
SURE = """
You said that the task is complete. Nothing can be changed after that. If you are sure, answer with
"task_complete": true again; else go on."""
SUMMARISE = """Your room for this conversation is nearly used up, so a successor takes over. Write down
for them what the task asks, what was done and found, with names and exact values, what state everything is
in and what is left. Plain text, no JSON."""
PICK_UP = """

A predecessor worked on this task and left this account:

{summary}

The terminal shows now:
{screen}

Before you go on, ask your predecessor up to five questions whose answers you need. Plain text, no JSON."""
ANSWER = """Your successor asks:

{questions}

Answer each from what happened here. Plain text, no JSON."""
GO_ON = """Your predecessor answers:

{answers}

Go on with the task from here, in the JSON form described at the start. The terminal shows:
{screen}"""


class _ModelReply(TypedDict):
    role: str
    content: str


class _RequestRejected(Exception):
    """The model's server rejected the request; `overflow`: the conversation is too long."""

    def __init__(self, text: str, *, overflow: bool) -> None:
        super().__init__(text)
        self.overflow = overflow


class Model:
    """The chat completions route of one model."""

    def __init__(self) -> None:
        base = urlsplit(os.environ["OPENAI_BASE_URL"])
        self._host, self._port, self._path = base.hostname or "", base.port or 80, base.path
        self._key, self._name = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_MODEL"]
        self.used = 0
        """Prompt plus reply tokens of the last call, counted by the model's server."""

    def complete(self, messages: list[_ModelReply]) -> str:
        """Return the model's reply to a conversation.

        Raises _RequestRejected.
        """
        body = json.dumps({"model": self._name, "messages": messages}).encode()
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        for retries_left in reversed(range(MAX_ATTEMPTS)):
            link = http.client.HTTPConnection(self._host, self._port, timeout=CALL_TIMEOUT_S)
            try:
                link.request("POST", f"{self._path}/chat/completions", body, head)
                answer = link.getresponse()
                status, text = answer.status, answer.read().decode("utf-8", "replace")
            except (OSError, http.client.HTTPException) as error:
                status, text = 0, repr(error)
            finally:
                link.close()
            if status == 200:
                reply = json.loads(text)
                self.used = int((reply.get("usage") or {}).get("total_tokens") or 0)
                return str(reply["choices"][0]["message"].get("content") or "")
            if 400 <= status < 500 or not retries_left:
                break
            time.sleep(1.0)
        raise _RequestRejected(
            f"the model answered {status}: {text[:300]}", overflow="context_length_exceeded" in text
        )


class _TerminusConversation:
    """One append-only conversation with the model."""

    def __init__(self, model: Model, first: str) -> None:
        self._model = model
        self.messages: list[_ModelReply] = [{"role": "user", "content": first}]

    def ask(self, text: str = "") -> str:
        """Append `text` and the model's reply to it; return the reply.

        Raises _RequestRejected and then appends nothing.
        """
        messages = [*self.messages, *([_ModelReply(role="user", content=text)] if text else [])]
        reply = self._model.complete(messages)
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return reply

    def ask_truncating(self, text: str) -> str:
        """Call `ask`, dropping the newest exchanges until the conversation fits.

        Raises _RequestRejected.
        """
        while True:
            try:
                return self.ask(text)
            except _RequestRejected as error:
                if not error.overflow or len(self.messages) < 4:
                    raise
                del self.messages[-2:]


class _Unreadable(Exception):
    """The reply violates the protocol."""


def _read_reply(text: str) -> tuple[list[tuple[str, float]], bool]:
    """Return ((keystrokes, seconds to wait) of each command, whether the task is reported complete).

    Raises _Unreadable.
    """
    start = text.find("{")
    if start < 0:
        raise _Unreadable("there is no JSON object in it")
    try:
        found, _ = json.JSONDecoder(strict=False).raw_decode(text, start)
    except ValueError as error:
        raise _Unreadable(f"the JSON cannot be read: {error}") from error
    commands = found.get("commands", [])
    if not isinstance(commands, list):
        raise _Unreadable('"commands" is not a list')
    return list(_commands(commands)), found.get("task_complete") is True


def _commands(commands: list[object]) -> Iterator[tuple[str, float]]:
    for number, command in enumerate(commands, 1):
        keys = command.get("keystrokes") if isinstance(command, dict) else None
        if not isinstance(command, dict) or not isinstance(keys, str):
            raise _Unreadable(f'command {number} has no text in "keystrokes"')
        wait = command.get("duration", FIRST_S)
        if not isinstance(wait, int | float) or not 0 <= wait < float("inf"):
            raise _Unreadable(f'"duration" of command {number} is not a number of seconds')
        yield keys, min(float(wait), LONGEST_S)


class _TerminusLoop:
    """Agent loop: send the screen to the model and type its keystrokes until it is done."""

    def __init__(self, task: str, model: Model, terminal: Terminal, full_tokens: int) -> None:
        self._model, self._terminal, self._full = model, terminal, full_tokens
        self._opening = f"{PROTOCOL}{task}"
        first = f"{self._opening}\n\nThe terminal shows:\n{terminal.screen.news()}"
        self._conversation = _TerminusConversation(model, first)

    def run(self) -> None:
        """Run until the model has confirmed completion.

        Raises _RequestRejected and _Unreadable.
        """
        observed, claimed, unreadable = "", False, 0
        while True:
            reply = self._reply(observed)
            try:
                commands, done = _read_reply(reply)
            except _Unreadable as error:
                unreadable += 1
                if unreadable == UNREADABLE:
                    raise
                observed = f"This reply cannot be used: {error}. Answer with one JSON object as described."
                continue
            unreadable = 0
            for keys, wait_s in commands:
                self._terminal.type(keys, wait_s)
            if done and claimed:
                return
            claimed = done
            observed = (
                f"New terminal output:\n{self._terminal.screen.news()}\n{SURE if done else ''}".rstrip()
            )

    def _reply(self, observed: str) -> str:
        """Return the model's next reply, after a hand-over if the context is full.

        Raises _RequestRejected.
        """
        if observed and self._model.used + len(observed) // 3 >= self._full:
            return self._hand_over()
        try:
            return self._conversation.ask(observed)
        except _RequestRejected as error:
            if not error.overflow or not observed:
                raise
            return self._hand_over()

    def _hand_over(self) -> str:
        old, screen = self._conversation, self._terminal.screen.shown()
        summary = old.ask_truncating(SUMMARISE)
        new = _TerminusConversation(
            self._model, self._opening + PICK_UP.format(summary=summary, screen=screen)
        )
        questions = new.ask()
        answers = old.ask_truncating(ANSWER.format(questions=questions))
        self._conversation = new
        return new.ask(GO_ON.format(answers=answers, screen=screen))


def _hand_over_at() -> int:
    """Return the conversation length in tokens at which to hand over."""
    # Room for four replies: two of the old conversation, the questions between them and the pending reply.
    context, reply = int(os.environ["CONTEXT_TOKENS"]), int(os.environ["CALL_TOKENS"])
    return max(context // 2, context - 4 * reply)


def main() -> int:
    terminal = Terminal()
    try:
        _TerminusLoop(sys.stdin.read(), Model(), terminal, _hand_over_at()).run()
    except (_RequestRejected, _Unreadable) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        terminal.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
