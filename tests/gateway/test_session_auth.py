"""Identity is the secret; the path only routes."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from gateway_rig import ASK, Rig, said

from insitu.chat.template import TemplateRenderer
from insitu.types import Limits


@pytest.mark.case(52)
@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "x-goog-api-key"])
@pytest.mark.parametrize("secret", ["right", "wrong", "other", "empty"])
@pytest.mark.parametrize("route", ["own", "none", "other", "unknown"])
async def test_matrix(renderer: TemplateRenderer, header: str, secret: str, route: str) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        other = rig.gateway.open_session("r/1", seed=7, limits=Limits())
        key = {"right": rig.session.secret, "other": other.secret, "wrong": "x" * 43, "empty": ""}[secret]
        prefix = {
            "own": f"/s/{rig.session.public_id}",
            "other": f"/s/{other.public_id}",
            "unknown": "/s/0123456789abcdef",
            "none": "",
        }[route]
        allowed = (secret, route) in {
            ("right", "own"),
            ("right", "none"),
            ("other", "other"),
            ("other", "none"),
        }
        value = f"Bearer {key}" if header == "Authorization" else key
        url = f"{rig.origin}{prefix}/v1/chat/completions"
        async with rig.http.post(url, json={"messages": ASK}, headers={header: value}) as response:
            body = await response.json()
            assert response.status == (200 if allowed else 401)
        if not allowed:
            assert body["error"]["code"] == "invalid_api_key"
            assert key not in str(body) or not key
            assert not rig.engine.sent


async def test_a_key_in_the_url_does_not_count(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        url = f"{rig.base}/chat/completions?key={rig.session.secret}"
        async with rig.http.post(url, json={"messages": ASK}) as response:
            assert response.status == 401


async def test_a_bound_session_is_served_through_its_own_socket_and_the_operators_port_only(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with Rig(renderer, [said("x")], unix=tmp_path / "a.sock") as rig:
        body = {"messages": ASK}
        async with rig.gateway.listen_tcp() as tcp, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{tcp.port}/v1/chat/completions"
            async with http.post(url, json=body, headers=rig.auth) as response:
                assert response.status == 200
        async with (
            rig.gateway.listen_unix(tmp_path / "b.sock"),
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "b.sock"))) as http,
            http.post("http://gw/v1/chat/completions", json=body, headers=rig.auth) as response,
        ):
            assert response.status == 401
        assert (await rig.post(body))[0] == 200
    assert not list(tmp_path.glob("*.sock"))  # noqa: ASYNC240


@pytest.mark.case(52)
async def test_the_secret_dies_with_the_session(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        assert (await rig.post({"messages": ASK}))[0] == 200
        await rig.session.seal(1.0)
        status, body = await rig.post({"messages": ASK})
        assert (status, body["error"]["code"]) == (409, "session_closed")
        assert rig.session.public_id not in rig.session.secret
        assert rig.session.secret.encode() not in rig.session.secret_digest
