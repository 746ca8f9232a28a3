"""The gateway's public URL: where it comes from, and that it leads to this gateway."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, SetupError
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.runtime.preflight import renderer_of
from insitu_fleet import public_url
from insitu_fleet.public_url import check_public_url, configured_url, open_public_url
from insitu_train.demo.scripted import ScriptedEngine

TUNNEL = """
import http.client, ssl, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit
origin, certificate, port = urlsplit(sys.argv[1]), sys.argv[2], int(sys.argv[3])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        way = http.client.HTTPConnection(origin.hostname, origin.port)
        way.request("GET", self.path)
        reply = way.getresponse()
        body = reply.read()
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate)
server.socket = context.wrap_socket(server.socket, server_side=True)
print("terms: https://tunnel.example.com/terms (please read)", file=sys.stderr, flush=True)
print(f"|  https://localhost:{server.server_port}  |", file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, ""),
        ({"SPACE_HOST": "me-run.hf.space", "SPACE_ID": "other/name"}, "https://me-run.hf.space"),
        ({"SPACE_ID": "Me/My_Run.1"}, "https://me-my-run-1.hf.space"),
    ],
)
def test_a_space_gives_its_url(environment: dict[str, str], url: str) -> None:
    assert configured_url(load_config(None, []), environment) == url
    named = load_config(None, ["gateway.listen=8000", "gateway.public_url=https://a.example/"])
    assert configured_url(named, environment) == "https://a.example"


def test_a_url_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_HOST", "host?query=1")
    with pytest.raises(ConfigError, match="SPACE_HOST"):
        check_public_url(load_config(None, ["gateway.listen=8000"]), needed=True)


def gateway() -> Gateway:
    renderer = renderer_of(load_config(None, []))
    return Gateway(TokenBackend(ScriptedEngine(renderer, lambda ids, key: None), renderer))  # type: ignore[arg-type]


@pytest.mark.slow
async def test_the_url_must_lead_to_this_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_url, "PUBLIC_S", 2.0)
    async with gateway() as one, gateway() as other, one.listen_tcp() as here, other.listen_tcp() as there:
        lines: list[str] = []

        def config(url: str) -> list[str]:
            return ["gateway.listen=1", f"gateway.public_url={url}"]

        right = load_config(None, config(here.origin))
        async with open_public_url(right, one, here.origin, lines.append) as url:
            assert url == here.origin
        with pytest.raises(SetupError, match="does not lead to this run's gateway: another server answers"):
            async with open_public_url(load_config(None, config(there.origin)), one, "", lines.append):
                pass
        with pytest.raises(SetupError, match="does not lead to this run's gateway: HTTP 40"):
            wrong = load_config(None, config(f"{here.origin}/below"))
            async with open_public_url(wrong, one, "", lines.append):
                pass
        async with aiohttp.ClientSession() as http, http.get(f"{here.origin}/health") as plain:
            assert await plain.json() == {"status": "ok"}


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = tmp_path / "both.pem"
    words = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost"]
    made = ["openssl", "req", "-x509", *words, *names, "-keyout", f"{path}.key", "-out", f"{path}.crt"]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    path.write_text(Path(f"{path}.key").read_text() + Path(f"{path}.crt").read_text())
    monkeypatch.setenv("SSL_CERT_FILE", f"{path}.crt")
    return path


@pytest.mark.slow
async def test_a_tunnel_runs_as_long_as_the_gateway(certificate: Path, tmp_path: Path) -> None:
    (tmp_path / "tunnel.py").write_text(TUNNEL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"{sys.executable} {tmp_path / 'tunnel.py'} {{origin}} {certificate} {port}"
    config = load_config(None, ["gateway.listen=1", f"gateway.public_url={command}"])
    lines: list[str] = []
    async with gateway() as one, one.listen_tcp() as here:
        async with open_public_url(config, one, here.origin, lines.append) as url:
            assert url == f"https://localhost:{port}"
            assert lines == [f"the gateway's public URL is {url}"]
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "the tunnel has ended"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "sh -c 'echo no such account >&2; exit 3' {origin}",
            "sh printed no https URL; its last line: no such account",
        ),
        ("no-such-tunnel {origin}", "no-such-tunnel printed no https URL; its last line: .*no-such-tunnel"),
    ],
)
async def test_a_tunnel_that_fails_is_one_line(command: str, line: str) -> None:
    config = load_config(None, ["gateway.listen=1", f"gateway.public_url={command}"])
    async with gateway() as one:
        with pytest.raises(SetupError, match=line) as caught:
            async with open_public_url(config, one, "http://127.0.0.1:1", lambda text: None):
                pass
    assert "\n" not in str(caught.value)
