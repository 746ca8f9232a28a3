"""A program in the place of the Python of an environment with vLLM and SGLang: runs a fake server.

Like vLLM it has a child of its own, in another session. FAKE_SERVER names a file for what it was started
with; FAKE_FAILS makes it end at its start.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def interpreter(folder: Path) -> Path:
    """An executable that runs this program, in the place of a Python."""
    file = folder / "python"
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'src')!r}]"
    run = f"{code}; from tests.fakes.server_program import main; main(sys.argv[1:])"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{run}" "$@"\n')
    file.chmod(0o755)
    return file


async def _serve(kind: str, port: int) -> None:
    from tests.fakes.sglang import FakeSglang
    from tests.fakes.vllm import FakeVllm, listening

    fake = FakeVllm(448, token_delay_s=0.002) if kind == "vllm" else FakeSglang(448, token_delay_s=0.002)
    async with listening(fake.app(), port):
        await asyncio.Event().wait()


def main(argv: list[str]) -> None:
    if argv[:1] == ["-c"]:
        sys.exit(0)
    kind = argv[1].partition(".")[0]
    if os.environ.get("FAKE_FAILS"):
        sys.exit("ValueError: no memory for the KV cache\nthe server gives up")
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    if record := os.environ.get("FAKE_SERVER"):
        shown = {name: os.environ[name] for name in os.environ if name.startswith(("VLLM", "CUDA", "PYTHON"))}
        line = {"argv": argv, "environment": shown, "pids": [os.getpid(), child.pid]}
        with Path(record).open("a") as file:
            file.write(json.dumps(line) + "\n")
    asyncio.run(_serve(kind, int(argv[argv.index("--port") + 1])))
