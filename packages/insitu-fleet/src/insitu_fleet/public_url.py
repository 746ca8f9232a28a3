"""The gateway's public URL, for agents in sandboxes that reach no socket of this machine.

    gateway.public_url (or its tunnel), SPACE_HOST or SPACE_ID -> URL -> probed -> specs of sandboxes

A request through the URL must be answered by this gateway before the first rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import secrets
import shlex
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from insitu.config import Config
from insitu.engines.http import checked_url
from insitu.errors import ConfigError, SetupError, boundary
from insitu.gateway.server import Gateway
from insitu_train.channel.child import python_path

POLL_S, CALL_S, END_S = 0.5, 10.0, 10.0
PUBLIC_S = 60.0
"""Until the public URL answers, start of a tunnel included: new names take up to half a minute."""
# An origin: the texts around it have links with a path, to a provider's terms for example.
_URL = re.compile(rb"(https://[a-zA-Z0-9][a-zA-Z0-9.-]*(?::\d+)?)/?[\s|\"'>)]")
MISSING = (
    "agents in cloud sandboxes need the gateway's public URL: set gateway.listen and gateway.public_url"
    " (in a Space, SPACE_HOST or SPACE_ID gives it)"
)


def configured_url(config: Config, environment: Mapping[str, str]) -> str:
    """Return the URL of the configuration, else of the Space that this process runs in, else "".

    Raises ConfigError for what is not a URL.
    """
    if config.gateway.tunnel:
        return ""
    if config.gateway.public_url:
        return checked_url(config.gateway.public_url, "gateway.public_url")
    if host := environment.get("SPACE_HOST"):
        return checked_url(f"https://{host}", "SPACE_HOST")
    if name := environment.get("SPACE_ID"):
        return checked_url(f"https://{re.sub('[^a-z0-9]+', '-', name.lower())}.hf.space", "SPACE_ID")
    return ""


def check_public_url(config: Config, *, needed: bool) -> None:
    """Raise ConfigError if the URL is `needed` and no setting gives one, or if it is not a URL."""
    table = config.gateway
    found = table.tunnel or configured_url(config, os.environ)
    if needed and not (table.listen and found):
        raise ConfigError(MISSING)


@asynccontextmanager
async def open_public_url(
    config: Config, gateway: Gateway, origin: str, say: Callable[[str], None]
) -> AsyncIterator[str]:
    """Yield the public URL of a gateway at `origin`, once it was probed; "" if none is configured.

    A tunnel runs inside the context. Raises SetupError if the URL does not lead to this gateway.
    """
    ends = time.monotonic() + PUBLIC_S
    url = configured_url(config, os.environ)
    if url:
        await _probe(gateway, url, ends)
        yield url
    elif config.gateway.tunnel:
        async with _tunnel(config.gateway.tunnel, origin, ends) as url:
            await _probe(gateway, url, ends)
            say(f"the gateway's public URL is {url}")
            yield url
    else:
        yield ""


async def _probe(gateway: Gateway, url: str, ends: float) -> None:
    """Ask the URL for this gateway's answer to a nonce until it comes. Raises SetupError."""
    nonce, reason = secrets.token_urlsafe(24), "no answer in time"
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context())
    options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=CALL_S), "trust_env": True}
    async with aiohttp.ClientSession(connector=connector, **options) as http:
        while (rest := ends - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(rest):
                    reason = await _ask(http, url, nonce, gateway.proof(nonce))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                # A last try that is cut short says less than an answer before it.
                reason = str(error).strip().partition("\n")[0] or reason
            if not reason:
                return
            await asyncio.sleep(min(POLL_S, max(0.0, ends - time.monotonic())))
    raise SetupError(f"the public URL {url} does not lead to this run's gateway: {reason}")


async def _ask(http: aiohttp.ClientSession, url: str, nonce: str, proof: str) -> str:
    """Return why the answer is not this gateway's; empty if it is."""
    # a private Space or a proxy's login page redirects
    async with http.get(f"{url}/health", params={"nonce": nonce}, allow_redirects=False) as reply:
        body = await reply.content.read(4096)
    if reply.status != 200:
        return f"HTTP {reply.status}"
    with contextlib.suppress(orjson.JSONDecodeError):
        answer = orjson.loads(body)
        if isinstance(answer, dict) and hmac.compare_digest(
            str(answer.get("proof", "")).encode(), proof.encode()
        ):
            return ""
    return "another server answers"


@asynccontextmanager
async def _tunnel(command: str, origin: str, ends: float) -> AsyncIterator[str]:
    """Run the command; yield the first https URL that it prints."""
    words = [word.replace("{origin}", origin) for word in shlex.split(command)]
    with boundary(SetupError, "start the tunnel of gateway.public_url"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "insitu.engines.keeper", *words),
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    reading: asyncio.Task[None] | None = None
    try:
        url = await _url_of(process, words[0], ends)
        reading = asyncio.create_task(_drain(process))
        yield url
    finally:
        if reading is not None:
            reading.cancel()
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _url_of(process: asyncio.subprocess.Process, name: str, ends: float) -> str:
    tail = b""
    while process.stdout is not None:
        try:
            async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                piece = await process.stdout.read(4096)
        except TimeoutError:
            break
        tail = (tail + piece)[-65536:]
        if found := _URL.search(tail):
            return found[1].decode()
        if not piece:
            break
    lines = tail.decode("utf-8", "replace").strip().splitlines() or ["no output"]
    raise SetupError(f"gateway.public_url: {name} printed no https URL; its last line: {lines[-1][:200]}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Read what a tunnel prints, so that its pipe is never full."""
    while process.stdout is not None and await process.stdout.read(65536):
        pass
