"""examples/capture.py: the core alone, from an agent to rows for another trainer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from insitu.chat.load import load_renderer
from insitu.config import WARM_START
from tests.fakes.vllm import serve_vllm

ROOT = Path(__file__).parents[2]
ALONE = """
import runpy, sys
sys.argv = ["capture.py", *sys.argv[1:]]
runpy.run_path("examples/capture.py")
others = {"torch", "transformers", "insitu_train"} & {*sys.modules}
sys.exit(f"not the core alone: {others}" if others else 0)
"""
AGENT = """
import json, os, sys, urllib.request
body = {"model": "m", "max_tokens": 24, "messages": [{"role": "user", "content": "Say hello."}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
sys.exit(0 if answer["choices"][0]["finish_reason"] else 1)
"""


@pytest.mark.slow
async def test_an_agent_becomes_rows_without_torch_or_another_package(tmp_path: Path) -> None:
    vocab = load_renderer(WARM_START).vocab_size
    async with serve_vllm(vocab) as server:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ALONE, server.url, str(WARM_START), "--", sys.executable, "-c", AGENT),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(child.communicate(), 120)
    assert child.returncode == 0
    rows = [line.split() for line in out.decode().splitlines() if line and line[0].isdigit()]
    assert len(rows) == 4
    for ids, sampled, logprob, version in rows:
        assert 0 < int(sampled) < int(ids)
        assert float(logprob) < 0
        assert int(version) == 0
