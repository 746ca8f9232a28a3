"""The verb `insitu view`."""

from __future__ import annotations

import asyncio
import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

import orjson

from insitu.errors import ConfigError
from insitu_view.web.guard import is_loopback
from insitu_view.web.serve import serving

DEFAULT_FOLDER = Path("runs")
_IN_ADDRESS = "/?&=%,:;@!$'()*+~"


async def view(
    paths: Sequence[Path],
    out: TextIO,
    *,
    host: str,
    port: int | None,
    allow_network: bool,
    opens: bool,
    json: bool,
    at: str,
) -> None:
    """Serve run directories or folders of them until cancelled; the address is printed first.

    opens: open a browser where there is a desktop; at: address of the first page, as it follows `#/` in the
    browser. Raises InsituError.
    """
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError("--port takes 0 to 65535")
    paths = paths or [DEFAULT_FOLDER]
    async with serving(paths, host=host, port=port, allow_network=allow_network) as viewer:
        url = viewer.url
        if at:
            url += "#/" + quote(at.removeprefix("#").removeprefix("/"), safe=_IN_ADDRESS)
        if json:
            line = orjson.dumps({"url": url, "token": viewer.token, "port": viewer.port}).decode()
        else:
            line = f"{url}\nCtrl-C ends it"
            if not is_loopback(host):
                line += "; traffic is not encrypted: `ssh -L` is safer"
        print(line, file=out, flush=True)
        if opens and not json and _has_desktop():
            await asyncio.to_thread(webbrowser.open, url)
        await asyncio.Event().wait()


def _has_desktop() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
