"""A chat-completions endpoint that is asked for verdicts: cache on disk, pace, retries, account of tokens.

An answer is cached by the SHA-256 of URL, model, options and messages, once it is a verdict; equal questions
at the same time are asked once. Raises GradeError, an infrastructure failure, and NoVerdict for what the text
in a question can cause.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import aiohttp
import orjson

from insitu.backoff import backoff_s, retry_after_s
from insitu.errors import GradeError, boundary
from insitu.storage.files import write_text

BUSY = frozenset({408, 409, 425, 429})
"""Besides 5xx: answers after which the question is asked again."""
REFUSED = frozenset({400, 413, 422})
"""Answers to a text that is too long or that a filter refuses; also to options that the endpoint has not."""
CONTROL = [{"role": "user", "content": 'Answer with the JSON object {"ok": true}.'}]
"""Asked when the first question is refused: an endpoint that refuses this too does not work."""
FIRST_S, MAX_S = 1.0, 60.0
_ERROR_CHARS = 200
_AGAIN = "That is not the JSON object asked for. Answer with that object and nothing else."
Chat = Sequence[Mapping[str, str]]
Verdict = TypeVar("Verdict")


class NoVerdict(Exception):
    """A reply is not the verdict asked for; `str(error)` says why, `scores` what of it can be used."""

    def __init__(self, why: str, scores: Mapping[str, float] = MappingProxyType({})) -> None:
        super().__init__(why)
        self.scores = scores


class _Busy(Exception):
    """The endpoint may answer later; `after_s`: the pause that it asks for."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


@dataclass(kw_only=True)
class ChatEndpoint:
    """Where judges ask. Values that are empty come from the environment when the first question is asked."""

    url: str = ""
    """Up to /v1; empty = JUDGE_URL."""
    model: str = ""
    """Empty = JUDGE_MODEL."""
    key_env: str = "JUDGE_KEY"
    """Variable with the key; none is sent without it."""
    cache: Path | None = None
    """Folder of answers and of `calls.jsonl`; None = JUDGE_CACHE, else ./judge-cache."""
    options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """More of the body, e.g. {"response_format": {"type": "json_object"}}."""
    per_minute: float = 120.0
    """Most requests in a minute, evenly spaced."""
    attempts: int = 6
    """Of one question, at an endpoint that is busy or away."""
    asks: int = 2
    """Of one question, for a verdict."""
    timeout_s: float = 120.0
    prices: tuple[float, float] = (0.0, 0.0)
    """Of a million prompt and completion tokens, in any unit."""
    max_cost: float = 0.0
    """No question is asked once all calls of the cache's folder cost this much; 0 = no limit."""

    def __post_init__(self) -> None:
        self._next_at = 0.0
        self._running: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[str]] = {}
        """By event loop and key: a task cannot be awaited from another loop."""
        self._works = False
        """It answered a question of this process."""
        self._cost: float | None = None

    async def ask(self, messages: Chat, read: Callable[[str], Verdict], about: str = "") -> Verdict:
        """Return what `read` makes of the reply; `read` raises NoVerdict. `about` is written to the record.

        Raises GradeError when the endpoint does not answer, and NoVerdict when no reply is one or when the
        endpoint refuses the text.
        """
        body = {"model": self._model, **self.options, "messages": list(messages)}
        named = orjson.dumps([self._url.rstrip("/"), body], option=orjson.OPT_SORT_KEYS)
        key = hashlib.sha256(named).hexdigest()
        file = self._folder / f"{key}.json"
        if file.exists():
            with boundary(GradeError, f"cannot read {file}"):
                return read(orjson.loads(file.read_bytes())["reply"])
        here = (asyncio.get_running_loop(), key)
        if here not in self._running:
            self._running[here] = asyncio.create_task(self._verdict(body, read, key, about))
            self._running[here].add_done_callback(lambda _: self._running.pop(here, None))
        # Shielded: who else waits for this question still wants its answer.
        return read(await asyncio.shield(self._running[here]))

    async def _verdict(
        self, body: Mapping[str, Any], read: Callable[[str], object], key: str, about: str
    ) -> str:
        messages = body["messages"]
        for asked in itertools.count(1):
            reply = await self._reply({**body, "messages": messages}, key, about)
            try:
                read(reply)
            except NoVerdict:
                if asked >= self.asks:
                    raise
                messages = [
                    *messages, {"role": "assistant", "content": reply}, {"role": "user", "content": _AGAIN},
                ]  # fmt: skip
                continue
            with boundary(GradeError, "cannot write the judge's cache"):
                write_text(self._folder / f"{key}.json", json.dumps({"reply": reply}))
            break
        return reply

    async def _reply(self, body: Mapping[str, Any], key: str, about: str) -> str:
        """Return the text of one answer, and record what it took."""
        if 0.0 < self.max_cost <= self._spent():
            raise GradeError(f"the judge has cost {self._spent():g}, its max_cost is {self.max_cost:g}")
        for failures in itertools.count(1):
            await self._pace()
            try:
                text, usage = await self._post(body)
                self._works = True
            except NoVerdict as refused:
                if body["messages"] is CONTROL:
                    raise GradeError(str(refused)) from refused
                if not self._works:
                    await self._reply({**body, "messages": CONTROL}, key, "control")
                raise
            except _Busy as error:
                if failures >= self.attempts:
                    raise GradeError(f"the judge did not answer {failures} times: {error}") from error
                pause = error.after_s if error.after_s is not None else backoff_s(failures, FIRST_S, MAX_S)
                await asyncio.sleep(min(pause, MAX_S))
                continue
            self._record(usage, key, about, failures)
            break
        return text

    async def _post(self, body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        key = os.environ.get(self.key_env, "")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http:
                # The key goes nowhere else.
                target = f"{self._url.rstrip('/')}/chat/completions"
                async with http.post(
                    target, data=orjson.dumps(body), headers=headers, allow_redirects=False
                ) as answer:
                    return _said(answer.status, answer.headers, await answer.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Busy(f"{type(error).__name__}: {error}") from error

    async def _pace(self) -> None:
        now = time.monotonic()
        start = max(now, self._next_at)
        self._next_at = start + 60.0 / self.per_minute
        await asyncio.sleep(start - now)

    def _record(self, usage: Mapping[str, Any], key: str, about: str, tries: int) -> None:
        """Append one line to `calls.jsonl`."""
        tokens = [_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
        cost = sum(n * price / 1e6 for n, price in zip(tokens, self.prices, strict=True))
        self._cost = self._spent() + cost
        line = {
            **{"at": time.time(), "about": about, "key": key[:16], "model": self._model, "tries": tries},
            **{"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "cost": cost},
        }
        with boundary(GradeError, "cannot write the judge's record"):
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "calls.jsonl").open("ab") as file:
                file.write(orjson.dumps(line) + b"\n")

    def _spent(self) -> float:
        """Return the cost of all calls that the folder has a record of."""
        if self._cost is None:
            file = self._folder / "calls.jsonl"
            with boundary(GradeError, f"cannot read {file}"):
                lines = file.read_bytes().splitlines() if file.exists() else []
                self._cost = sum(map(_cost, lines))
        return self._cost

    @property
    def _url(self) -> str:
        url = self.url or os.environ.get("JUDGE_URL", "")
        if not url:
            raise GradeError("no judge: set url of its ChatEndpoint, or JUDGE_URL")
        return url

    @property
    def _model(self) -> str:
        model = self.model or os.environ.get("JUDGE_MODEL", "")
        if not model:
            raise GradeError("no judge: set model of its ChatEndpoint, or JUDGE_MODEL")
        return model

    @property
    def _folder(self) -> Path:
        folder = self.cache or Path(os.environ.get("JUDGE_CACHE", "judge-cache"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _said(status: int, headers: Mapping[str, str], raw: bytes) -> tuple[str, Mapping[str, Any]]:
    """Return text and usage of an answer.

    Raises _Busy, and for an answer that no retry changes NoVerdict or GradeError.
    """
    if status in BUSY or status >= 500:
        raise _Busy(f"HTTP {status}", retry_after_s(headers))
    if status != 200:
        text = raw[:_ERROR_CHARS].decode(errors="replace")
        kind = NoVerdict if status in REFUSED else GradeError
        raise kind(f"the judge refused the question: HTTP {status} {text!a}")
    try:
        answer = orjson.loads(raw)
        # A filter may leave the choices or the content out.
        text = answer["choices"][0]["message"].get("content") if answer["choices"] != [] else ""
        usage = answer.get("usage")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise _Busy("the answer is no chat completion") from error
    return text if isinstance(text, str) else "", usage if isinstance(usage, dict) else {}


def _cost(line: bytes) -> float:
    """Return the cost in a line of the record; 0 for one that was not written to its end."""
    try:
        return float(orjson.loads(line)["cost"])
    except (ValueError, LookupError, TypeError):
        return 0.0


def _count(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0
