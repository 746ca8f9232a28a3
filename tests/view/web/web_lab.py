"""Viewers that listen on a free port, and clients with the token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from insitu_view.web.serve import Viewer, serving


@dataclass
class Client:
    """Requests with the token."""

    viewer: Viewer
    session: aiohttp.ClientSession

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.viewer.port}"

    async def get(self, path: str, /, **query: object) -> tuple[int, bytes, aiohttp.ClientResponse]:
        values = {name: str(value) for name, value in query.items()}
        headers = {"Authorization": f"Bearer {self.viewer.token}"}
        async with self.session.get(self.origin + path, params=values, headers=headers) as answer:
            return answer.status, await answer.read(), answer

    async def json(self, path: str, code: int = 200, /, **query: object) -> Any:
        got, body, _ = await self.get(path, **query)
        assert got == code, body[:500]
        return orjson.loads(body)


@asynccontextmanager
async def viewing(*paths: Path) -> AsyncIterator[Client]:
    async with serving(paths, port=0) as viewer, aiohttp.ClientSession() as session:
        yield Client(viewer, session)
