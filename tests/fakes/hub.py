"""A stand-in of the Hugging Face Hub that speaks the part of its HTTP API that uploads and downloads use."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "1" * 40
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"


class FakeHub:
    """What was received; `fail` answers the next commits with these statuses."""

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, dict[str, object]] = {}
        self.files: dict[str, bytes] = {}
        """Files of the newest commit."""
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.fail: list[int] = []
        self.space: dict[str, object] = {}
        """What was asked for a Space: its secrets and its hardware."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        path = path.partition("?")[0]
        self.requests.append(f"{method} {path}")
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            self.repos.setdefault(name, wanted)
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if method == "GET" and (name := "/".join(path.split("/")[3:])) in self.repos:
            siblings = [{"rfilename": file} for file in self.files]
            private = str(self.repos[name]["visibility"]) == "private"
            return 200, {"id": name, "private": private, "sha": COMMIT, "siblings": siblings}
        if method == "GET" and "/tree/" in path:
            return 200, [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
        if method == "GET" and "/revision/" in path and "/".join(path.split("/")[3:5]) in self.repos:
            name = "/".join(path.split("/")[3:5])
            siblings = [{"rfilename": file} for file in self.files]
            found: dict[str, object] = {"id": name, "sha": COMMIT, "private": True, "siblings": siblings}
            return 200, found
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".parquet")) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if method == "PUT":
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if "/commit/" in path:
            return self._commit(body)
        return self._space(path, body)

    def _space(self, path: str, body: bytes) -> tuple[int, object]:
        if not path.startswith("/api/spaces/") or not path.endswith(("/secrets", "/hardware")):
            return 404, {"error": f"no {path}"}
        asked = json.loads(body)
        self.space[asked.get("key", "hardware")] = asked.get("value") or asked["flavor"]
        return 200, {"stage": "BUILDING", "hardware": {"current": None, "requested": None}}

    def _commit(self, body: bytes) -> tuple[int, object]:
        if self.fail:
            return self.fail.pop(0), {"error": "busy"}
        self.files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/me/x/commit/1", "commitOid": COMMIT}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve on a free port inside the context."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if token := self.headers.get("Authorization"):
                hub.tokens.add(token)
            body = self.rfile.read(length) if length else b""
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            if "/resolve/" in self.path:
                self._resolve()
                return
            status, answer = hub.answer(self.command, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _resolve(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            data = hub.files.get(self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0])
            self.send_response(404 if data is None else 200)
            if data is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            data = data or b""
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


@contextmanager
def only_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[FakeHub]:
    """A stand-in that huggingface_hub reaches instead of the Hub, with an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
