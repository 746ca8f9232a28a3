"""The agent of the terminus harness: a model at a terminal. Runs alone in a sandbox, standard library only.

    screen -> model -> {"analysis", "plan", "commands", "task_complete"} -> keys -> screen

No tools: plain text both ways over chat completions. When the model's window is nearly full the work is
handed over in three calls: the old line of messages says a summary, a new line asks questions, the old line
answers them, and the new line goes on with the answers. Lines are only ever appended to, so what the model
said stays in the place where it was sampled. Run by agents/terminus.py.
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
TRIES = 3
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


class ModelReply(TypedDict):
    role: str
    content: str


class RequestRejected(Exception):
    """The model's server said no. `overflow`: because the conversation is too long."""

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
        """Tokens of the last call, prompt and reply, as the model's server counts them."""

    def say(self, messages: list[ModelReply]) -> str:
        """Raises Refused."""
        body = json.dumps({"model": self._name, "messages": messages}).encode()
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        for left in reversed(range(TRIES)):
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
            if 400 <= status < 500 or not left:
                break
            time.sleep(1.0)
        raise RequestRejected(
            f"the model answered {status}: {text[:300]}", overflow="context_length_exceeded" in text
        )


class Line:
    """One conversation with the model; only ever appended to."""

    def __init__(self, model: Model, first: str) -> None:
        self._model = model
        self.messages: list[ModelReply] = [{"role": "user", "content": first}]

    def ask(self, text: str = "") -> str:
        """The model's reply to `text`, both kept. Raises Refused, and keeps neither."""
        said = [*self.messages, *([ModelReply(role="user", content=text)] if text else [])]
        reply = self._model.say(said)
        self.messages = [*said, {"role": "assistant", "content": reply}]
        return reply

    def ask_back(self, text: str) -> str:
        """`ask`, with as many of the newest exchanges given up as it takes to fit. Raises Refused."""
        while True:
            try:
                return self.ask(text)
            except RequestRejected as error:
                if not error.overflow or len(self.messages) < 4:
                    raise
                del self.messages[-2:]


class Unreadable(Exception):
    """A reply that is not what the protocol asks for."""


def read_reply(text: str) -> tuple[list[tuple[str, float]], bool]:
    """(keystrokes and seconds to wait, whether the task is said to be complete). Raises Unreadable."""
    start = text.find("{")
    if start < 0:
        raise Unreadable("there is no JSON object in it")
    try:
        found, _ = json.JSONDecoder(strict=False).raw_decode(text, start)
    except ValueError as error:
        raise Unreadable(f"the JSON cannot be read: {error}") from error
    commands = found.get("commands", [])
    if not isinstance(commands, list):
        raise Unreadable('"commands" is not a list')
    return list(_commands(commands)), found.get("task_complete") is True


def _commands(commands: list[object]) -> Iterator[tuple[str, float]]:
    for number, command in enumerate(commands, 1):
        keys = command.get("keystrokes") if isinstance(command, dict) else None
        if not isinstance(command, dict) or not isinstance(keys, str):
            raise Unreadable(f'command {number} has no text in "keystrokes"')
        wait = command.get("duration", FIRST_S)
        if not isinstance(wait, int | float) or not 0 <= wait < float("inf"):
            raise Unreadable(f'"duration" of command {number} is not a number of seconds')
        yield keys, min(float(wait), LONGEST_S)


class TerminusLoop:
    """Screen to model to keys, until the model is done."""

    def __init__(self, task: str, model: Model, terminal: Terminal, full_tokens: int) -> None:
        self._model, self._terminal, self._full = model, terminal, full_tokens
        self._opening = f"{PROTOCOL}{task}"
        self._line = Line(model, f"{self._opening}\n\nThe terminal shows:\n{terminal.screen.news()}")

    def run(self) -> None:
        """Raises Refused and Unreadable when there is no going on."""
        observed, claimed, unreadable = "", False, 0
        while True:
            reply = self._reply(observed)
            try:
                commands, done = read_reply(reply)
            except Unreadable as error:
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
        """What the model says next, over to a new line first where the old one is full. Raises Refused."""
        if observed and self._model.used + len(observed) // 3 >= self._full:
            return self._hand_over()
        try:
            return self._line.ask(observed)
        except RequestRejected as error:
            if not error.overflow or not observed:
                raise
            return self._hand_over()

    def _hand_over(self) -> str:
        old, screen = self._line, self._terminal.screen.shown()
        summary = old.ask_back(SUMMARISE)
        new = Line(self._model, self._opening + PICK_UP.format(summary=summary, screen=screen))
        questions = new.ask()
        answers = old.ask_back(ANSWER.format(questions=questions))
        self._line = new
        return new.ask(GO_ON.format(answers=answers, screen=screen))


def hand_over_at() -> int:
    """Tokens of a conversation from which there is just room for a hand-over: two replies of the old line,
    the questions between them, and the reply that is due."""
    context, reply = int(os.environ["CONTEXT_TOKENS"]), int(os.environ["CALL_TOKENS"])
    return max(context // 2, context - 4 * reply)


def main() -> int:
    terminal = Terminal()
    try:
        TerminusLoop(sys.stdin.read(), Model(), terminal, hand_over_at()).run()
    except (RequestRejected, Unreadable) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        terminal.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
