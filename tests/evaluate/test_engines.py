"""`insitu rollout` on engines that are servers: shipped fakes here, a real process of ours."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

import insitu
from tests.fakes.sglang import serve_sglang
from tests.fakes.vllm import serve_vllm

pytestmark = pytest.mark.slow

VOCAB = 448
"""Of the warm start."""


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_as_engine(tmp_path: Path, kind: str) -> None:
    async with serve_vllm(VOCAB) if kind == "vllm" else serve_sglang(VOCAB) as fake:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "insitu", "rollout", str(empty(tmp_path)), "--json", "--plain",
            f"engine.kind={kind}", f"engine.urls={fake.url}/v1/", "rollout.count=2", "rollout.samples=2",
            "harness.workers=2", "limits.max_calls=3", "harness.agent=script", f"run.dir={tmp_path / 'run'}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(insitu.__file__).parents[1])},
        )  # fmt: skip
        async with asyncio.timeout(90):
            out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    summary = json.loads(out.splitlines()[-1])
    assert (summary["engine"], summary["graded"]) == (kind, 4)
    assert summary["ledger"]["captured"] == summary["sampled_tokens"] > 0
    assert summary["prompt_tokens"] > summary["calls"] >= 4


def empty(tmp_path: Path) -> Path:
    file = tmp_path / "rollout.toml"
    file.write_text("")
    return file
