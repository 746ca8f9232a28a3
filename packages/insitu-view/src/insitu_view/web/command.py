"""The verb `insitu view`."""

from __future__ import annotations

import asyncio
import os
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

import orjson

from insitu.errors import ConfigError
from insitu_view.web.guard import is_loopback
from insitu_view.web.serve import serving

DEFAULT_FOLDER = Path("runs")
_IN_ADDRESS = "/?&=%,:;@!$'()*+~"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """Options of one invocation."""

    paths: Sequence[Path]
    """Run directories or folders of them; empty = DEFAULT_FOLDER."""
    host: str
    port: int | None
    allow_network: bool
    opens: bool
    """Open a browser where there is a desktop."""
    json: bool
    at: str = ""
    """Address of the first page, as it follows `#/` in the browser."""


async def view(options: ViewOptions, out: TextIO) -> None:
    """Serve until cancelled; the address is printed first. Raises InsituError."""
    if options.port is not None and not 0 <= options.port <= 65535:
        raise ConfigError("--port takes 0 to 65535")
    paths = options.paths or [DEFAULT_FOLDER]
    async with serving(
        paths, host=options.host, port=options.port, allow_network=options.allow_network
    ) as viewer:
        url = viewer.url
        if options.at:
            url += "#/" + quote(options.at.removeprefix("#").removeprefix("/"), safe=_IN_ADDRESS)
        if options.json:
            line = orjson.dumps({"url": url, "token": viewer.token, "port": viewer.port}).decode()
        else:
            line = f"{url}\nCtrl-C ends it"
            if not is_loopback(options.host):
                line += "; traffic is not encrypted: `ssh -L` is safer"
        print(line, file=out, flush=True)
        if options.opens and not options.json and _has_desktop():
            await asyncio.to_thread(webbrowser.open, url)
        await asyncio.Event().wait()


def _has_desktop() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
