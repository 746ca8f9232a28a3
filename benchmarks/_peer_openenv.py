"""OpenEnv's capture server, driven by lines of JSON; runs in the environment of `openenv`, without insitu.

`python _peer_openenv.py ENGINE_URL MODEL_FOLDER`. Caller: bench/_peers.
"""

import json
import socket
import sys

from openenv.core.harness.capture import CaptureServer


def main(engine: str) -> None:
    """Serve until the end of stdin; each line asks for so many sessions."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = CaptureServer(llm_url=f"{engine}/v1", model="m", port=port)
    server.start()
    print(json.dumps({"port": port}), flush=True)
    for line in sys.stdin:
        opened = [server.registry.create(None) for _ in range(json.loads(line)["open"])]
        reported = [{"path": "/v1/chat/completions", "secret": session.session_id} for session in opened]
        print(json.dumps({"port": port, "sessions": reported}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
