"""Who may ask the viewer, from where and for what."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp
import pytest
from web_lab import viewing

from insitu.errors import ConfigError, RecordError, SetupError
from insitu_view.web.serve import serving


async def test_the_token_of_the_address_becomes_a_cookie(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as browser:
            async with browser.get(f"{client.origin}/api/runs") as answer:
                assert answer.status == 401
            async with browser.get(client.viewer.url, allow_redirects=False) as answer:
                assert answer.status == 303
                assert answer.headers["Location"] == "/"
                cookie = answer.headers["Set-Cookie"]
                assert "HttpOnly" in cookie
                assert "SameSite=Strict" in cookie
            async with browser.get(f"{client.origin}/") as answer:
                assert answer.status == 200
                assert answer.content_type == "text/html"
            async with browser.get(f"{client.origin}/?token=wrong", allow_redirects=False) as answer:
                assert answer.status == 200  # the cookie still holds


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:7430"}, 421),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_other_hosts_and_sites_are_refused(lab_run: Path, headers: dict[str, str], status: int) -> None:
    async with viewing(lab_run) as client:
        named = {"Authorization": f"Bearer {client.viewer.token}", **headers}
        async with client.session.get(f"{client.origin}/api/runs", headers=named) as answer:
            assert answer.status == status
            assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_only_get_and_head_exist(lab_run: Path, method: str) -> None:
    async with viewing(lab_run) as client:
        headers = {"Authorization": f"Bearer {client.viewer.token}"}
        async with client.session.request(method, f"{client.origin}/api/runs", headers=headers) as answer:
            assert answer.status == 405


async def test_every_answer_carries_the_policy(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        for path in ("/", "/api/runs", "/api/lab/overview", "/nothing", "/api/none/overview"):
            _, _, answer = await client.get(path)
            assert "require-trusted-types-for 'script'" in answer.headers["Content-Security-Policy"], path
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
        _, _, answer = await client.get("/api/runs")
        assert answer.headers["Cache-Control"] == "no-store"


async def test_long_addresses_are_refused(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        status, _, _ = await client.get("/api/lab/rollouts", q="x" * 5000)
        assert status == 414


async def test_an_address_beyond_loopback_needs_a_flag(lab_run: Path) -> None:
    with pytest.raises(ConfigError, match="--allow-network"):
        async with serving([lab_run], host="0.0.0.0", port=0):
            pass


async def test_a_taken_port_is_named(lab_run: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} is in use; choose another with --port"):
            async with serving([lab_run], port=port):
                pass


async def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other-tool").mkdir()
    (tmp_path / "other-tool" / "events.jsonl").write_text("{}\n")
    for path in (tmp_path / "other-tool", tmp_path / "missing"):
        with pytest.raises(RecordError, match=path.name):
            async with serving([path], port=0):
                pass
