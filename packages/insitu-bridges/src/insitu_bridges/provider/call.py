"""One request to a provider: forward it, retry while the provider is busy, stream the answer back."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from insitu.backoff import backoff_s, retry_after_s
from insitu.gateway.backend import CallReport
from insitu.gateway.dialects.base import Dialect, WireError
from insitu.gateway.routes import Route
from insitu.gateway.text_log import TextCall, Usage
from insitu_bridges.provider.limits import AWAY, BUSY
from insitu_bridges.provider.usage import unanswered, usage_of

if TYPE_CHECKING:
    from insitu_bridges.provider.backend import ProviderBackend, ProviderSession

log = logging.getLogger(__name__)

LAST_RETRY_S = 0.25
"""Time of the last retry before the end of `max_wait_s`."""
KEPT_BYTES = 16 << 20
"""Bytes of one reply that are recorded; the agent gets all of it."""
THROTTLED = (429, 529)
"""HTTP statuses of a provider that has too many requests."""
FORBIDDEN = 403
"""Some providers answer so to a text that they do not allow."""
REFUSED_KEY = (401, 402, FORBIDDEN)
"""HTTP statuses of a provider that does not accept the key."""
FORWARDED = (
    "accept",
    "anthropic-beta",
    "anthropic-version",
    "content-type",
    "openai-beta",
    "x-goog-api-client",
)
"""Headers of the agent that the provider needs to understand the body."""
RETURNED = re.compile(
    r"content-type|retry-after|(x-)?request-id|x-should-retry|(anthropic|x)-ratelimit-.*", re.I
)


class _ProviderBusy(Exception):
    """The provider may answer the same request later."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(pause_s)
        self.pause_s = pause_s


@dataclass(slots=True, kw_only=True)
class ProviderCall:
    """One request and what is kept of its reply."""

    session: ProviderSession
    http: web.BaseRequest
    route: Route
    dialect: Dialect
    body: bytes
    turn: int = -1
    started: float = 0.0
    ends: float = field(init=False)
    """Reading of time.monotonic() until which it may wait."""
    sent: int = 0
    """Number of times that it was sent to the provider."""
    received: bool = False
    """The provider has the request and has not rejected it: it may bill the prompt."""
    status: int = 0
    came: float = field(default_factory=time.monotonic)
    """When the agent sent it."""
    trouble: str = ""
    """Why the provider did not answer."""
    surely: bool = False
    """No request could have caused the trouble."""
    begun: bool = False
    """The agent has a status line."""
    complete: bool = False
    dropped: int = 0
    """Bytes of the reply that are not kept."""
    reply: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        # Agents retry by themselves: with the full wait each time they would wait forever.
        waits_s = 0.0 if self.provider.outage.over else self.provider.options.max_wait_s
        self.ends = time.monotonic() + waits_s

    @property
    def answered(self) -> bool:
        return self.complete and self.status not in BUSY and self.status not in REFUSED_KEY

    @property
    def throttled(self) -> bool:
        """Whether a rate limit kept it from being answered, the provider's or the run's."""
        return self.status in THROTTLED or not self.sent

    @property
    def provider(self) -> ProviderBackend:
        return self.session.backend

    async def enter(self) -> None:
        """Take a place of the rate limiter. Raises WireError when there is none in time."""
        with self.session.faults.waiting():
            await self.provider.rate.enter(self.ends)

    async def run(self) -> web.StreamResponse:
        """Send it, again while the provider is busy and there is time left.

        The place of the rate limiter must be taken before; it is given back.
        """
        self.started = time.monotonic()
        while True:
            try:
                return await self._send()
            except _ProviderBusy as busy:
                self.provider.rate.hold(busy.pause_s)
            finally:
                self.provider.rate.leave()
            await self.enter()

    async def _send(self) -> web.StreamResponse:
        """Raise _ProviderBusy when a retry makes sense and the agent has no part of an answer yet."""
        self.sent += 1
        self.status, self.received = 0, True
        options = self.provider.options
        try:
            async with (
                asyncio.timeout(options.call_deadline_s),
                self.provider.client.request(
                    self.http.method,
                    self._target(),
                    data=self.body or None,
                    headers=self._headers(),
                    allow_redirects=False,
                ) as answer,
            ):
                self.status, self.received = answer.status, False
                self._check_status(answer)
                return await self._stream_back(answer)
        except aiohttp.ClientError as error:  # also a connection that was not made in time
            self._unreachable(error)
            raise WireError("engine_failed", "The provider could not be reached.") from error
        except TimeoutError as error:
            self._trouble("the provider did not answer in time")
            if self.begun:
                raise ConnectionResetError("The provider did not answer in time.") from error
            raise WireError("engine_failed", "The provider did not answer in time.") from error

    def _check_status(self, answer: aiohttp.ClientResponse) -> None:
        outage, status = self.provider.outage, answer.status
        if status in AWAY:
            outage.failed(f"HTTP {status}")
        else:
            outage.answered()
        if status in BUSY:
            self._trouble(f"the provider answered HTTP {status}")
            if status in AWAY:
                self._stop_when_over()
            self._retry(answer.headers)
        elif status in REFUSED_KEY:
            self._trouble(f"the provider refused the key: HTTP {status}", surely=status != FORBIDDEN)

    def _trouble(self, why: str, *, surely: bool = False) -> None:
        self.trouble, self.surely = why, surely
        self.session.faults.met_trouble()

    def _unreachable(self, error: aiohttp.ClientError) -> None:
        log.warning("provider failed path=%s error=%s", self.route.action, type(error).__name__)
        self._trouble(
            "the provider could not be reached", surely=isinstance(error, aiohttp.ClientConnectorError)
        )
        if self.begun:  # the provider was reached before, or the agent has gone
            raise ConnectionResetError("The connection to the provider broke.") from error
        self.status, self.received = 0, False
        self.provider.outage.failed(reason_of(error))
        self._stop_when_over()
        self._retry({})

    def _stop_when_over(self) -> None:
        """Raise a WireError that no agent retries when the outage has exceeded the longest wait."""
        if self.provider.outage.over:
            self.surely = True
            raise WireError("session_failed", "The provider is unavailable. Stop here.")

    def _retry(self, headers: Mapping[str, str]) -> None:
        """Raise _ProviderBusy where there is time left.

        The last retry is right before the end, unless the provider asks for a longer pause.
        """
        left_s = self.ends - time.monotonic() - LAST_RETRY_S
        asked = retry_after_s(headers)
        pause = min(left_s, backoff_s(self.sent, 1.0)) if asked is None else asked
        if 0 <= pause <= left_s:
            raise _ProviderBusy(pause)

    async def _stream_back(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Write every byte as it comes. After the first one an error can only be a broken connection."""
        response = web.StreamResponse(status=answer.status)
        for name, value in answer.headers.items():
            if RETURNED.fullmatch(name):
                response.headers[name] = value
        # An answer with a known length keeps it: the simplest clients cannot read chunks.
        response.content_length = answer.content_length
        self.begun = True
        await self._bounded(response.prepare(self.http))
        async for chunk in answer.content.iter_any():
            self._keep(chunk)
            await self._bounded(response.write(chunk))
        await self._bounded(response.write_eof())
        self.complete = True
        return response

    async def _bounded(self, writing: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self.session.server.config.write_timeout_s):
                await writing
        except TimeoutError as error:
            raise ConnectionResetError("the agent does not read its reply") from error

    def _target(self) -> str:
        http, route = self.http, self.route
        version = "v1beta" if route.dialect == "gemini" or "/v1beta/" in http.path else "v1"
        alt = "?alt=sse" if http.query.get("alt") == "sse" else ""
        return f"{self.provider.base}/{version}/{route.action}{alt}"

    def _headers(self) -> Mapping[str, str]:
        """Return the listed headers of the agent and the operator's key where this provider expects it."""
        http, key = self.http, self.provider.options.key
        sent = {name: http.headers[name] for name in FORWARDED if name in http.headers}
        # The answer is forwarded byte for byte, so it must not be compressed for this hop.
        sent["Accept-Encoding"] = "identity"
        if not key:
            return sent
        name = {"anthropic": "x-api-key", "gemini": "x-goog-api-key"}.get(self.dialect.name)
        return sent | ({name: key} if name else {"Authorization": f"Bearer {key}"})

    # ----------------------------------------------------------------------- the record

    def _keep(self, chunk: bytes) -> None:
        """Keep the beginning, which has the prompt's usage, and the end, which has the reply's."""
        self.reply += chunk
        if len(self.reply) > KEPT_BYTES:
            end = len(self.reply) - KEPT_BYTES // 2
            self.dropped += end - KEPT_BYTES // 2
            del self.reply[KEPT_BYTES // 2 : end]

    def usage(self) -> Usage:
        """Return what the provider bills for it, estimated where it is not reported."""
        if self.route.kind == "call" and 200 <= self.status < 300:
            return usage_of(self.body, bytes(self.reply), dropped=self.dropped)
        if self.route.kind == "call" and self.received:
            return unanswered(self.body)
        return Usage(prompt_tokens=0, cached_tokens=0, sampled_tokens=0)

    def logged(self, usage: Usage, cost: float) -> TextCall:
        return TextCall(
            turn=self.turn,
            path=self.route.action,
            status=self.status,
            complete=self.complete,
            request=self.body,
            reply=bytes(self.reply),
            truncated=self.dropped > 0,
            usage=usage,
            cost=cost,
            ms=(time.monotonic() - self.started) * 1000,
        )

    def report(self, usage: Usage, cost: float) -> CallReport:
        end = "" if self.complete else ", cut off"
        return CallReport(
            rollout_id=self.session.rollout_id,
            turn=self.turn,
            dialect=self.dialect.name,
            outcome=f"HTTP {self.status}{end}",
            prompt_tokens=usage.prompt_tokens,
            fresh_tokens=usage.prompt_tokens - usage.cached_tokens,
            sampled_tokens=usage.sampled_tokens,
            cost=cost,
            ms=(time.monotonic() - self.started) * 1000,
        )


def reason_of(error: Exception) -> str:
    """Return why a connection could not be made."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
