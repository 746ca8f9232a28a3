"""A stand-in for the docker command line whose containers are processes that answer `/health`.

State is in the folder FAKE_DOCKER: NAME.json of each container, `calls` with every command, `broken` while
`run` fails, `slow` while it has yet to make the container.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SERVER = """
import http.server, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): ...
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
made = pathlib.Path(sys.argv[1] + ".new")
made.write_text(str(server.server_port))
made.rename(sys.argv[1])
server.serve_forever()
"""


def install(folder: Path) -> dict[str, str]:
    """Write the program `docker` into a folder; return the environment that uses it."""
    bin = folder / "bin"
    bin.mkdir()
    (bin / "docker").write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} "$@"\n')
    (bin / "docker").chmod(0o755)
    return {"PATH": f"{bin}:{os.environ['PATH']}", "FAKE_DOCKER": str(folder), "DOCKER_HOST": ""}


def containers(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _run(folder: Path, words: list[str]) -> int:
    if (folder / "broken").exists():
        print("docker: Error response from daemon: no space left.", file=sys.stderr)
        return 125
    slow = folder / "slow"
    time.sleep(1.5 if slow.exists() else 0)
    name, label = words[words.index("--name") + 1], words[words.index("--label") + 1]
    port = folder / f"{name}.port"
    with (folder / "log").open("ab") as log:
        pid = subprocess.Popen(
            [sys.executable, "-S", "-c", SERVER, str(port)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        ).pid  # fmt: skip
    while not port.exists():
        time.sleep(0.01)
    made = {"name": name, "label": label, "pid": pid, "port": int(port.read_text()), "image": words[-1]}
    (folder / f"{name}.json").write_text(json.dumps(made))
    slow.unlink(missing_ok=True)
    print("0123abcd")
    return 0


def main(words: list[str]) -> int:
    folder = Path(os.environ["FAKE_DOCKER"])
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    verb, name = words[0], words[-1]
    if verb == "run":
        return _run(folder, words[1:])
    if verb == "info":
        print("{}")
    if verb == "ps":
        for one in containers(folder):
            print(one["name"], str(one["label"]).partition("=")[2])
    path = folder / f"{words[1] if verb == 'port' else name}.json"
    if verb not in ("port", "inspect", "rm") or not path.exists():
        return 0 if verb in ("info", "ps", "logs") else 1
    made = json.loads(path.read_text())
    if verb == "port" and _alive(made["pid"]):
        print(f"127.0.0.1:{made['port']}")
    elif verb == "inspect":
        print(str(_alive(made["pid"])).lower())
    elif verb == "rm":
        if _alive(made["pid"]):
            os.kill(made["pid"], signal.SIGKILL)
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
