"""Servers that do not fit a run: one line that names the server and what to do, before anything starts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.config.load import WARM_START
from insitu.engines.safetensors_file import check_complete
from insitu.errors import EngineError
from tests.fakes.vllm import serve_vllm

pytestmark = pytest.mark.slow
WORDS = WARM_START / "tokenizer.json"
VOCAB = 454
TRAIN = ("train", "policy.kind=hf", "run.steps=1")
LORA = (*TRAIN, "policy.lora_rank=4")
ROLLOUT = ("rollout", "rollout.count=1", "rollout.samples=1")


async def ended(tmp_path: Path, arguments: tuple[str, ...], *urls: str) -> tuple[int | None, str]:
    """Return the exit code and the last line of a command that these servers cannot serve."""
    (file := tmp_path / "run.toml").write_text("")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "insitu", arguments[0], str(file), "--plain", *arguments[1:],
        "engine.kind=vllm", f"engine.urls={json.dumps(urls)}", "engine.start_timeout_s=0",
        "harness.agent=script", f"run.dir={tmp_path / 'run'}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(insitu.__file__).parents[1])},
    )  # fmt: skip
    async with asyncio.timeout(90):
        out, err = await process.communicate()
    assert b"starting the learner" not in out
    assert not (tmp_path / "run").exists()
    lines = [line for line in err.decode().splitlines() if line.startswith("insitu: ")]
    assert len(lines) == 1, err.decode()
    return process.returncode, lines[0]


def other_words(folder: Path) -> Path:
    """A vocabulary of the same size, in another order."""
    content: dict[str, Any] = json.loads(WORDS.read_text())
    names = sorted(content["model"]["vocab"], reverse=True)
    content["model"]["vocab"] = {name: number for number, name in enumerate(names)}
    (folder / "other.json").write_text(json.dumps(content))
    return folder / "other.json"


@pytest.mark.parametrize("arguments", [ROLLOUT, TRAIN], ids=["rollout", "train"])
async def test_another_vocabulary(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    async with (
        serve_vllm(VOCAB, tokenizer=WORDS) as right,
        serve_vllm(VOCAB, tokenizer=other_words(tmp_path)) as wrong,
    ):
        code, line = await ended(tmp_path, arguments, right.url, wrong.url)
    assert code == 1
    assert f"vllm at {wrong.url} serves another vocabulary than the tokenizer in {WARM_START}" in line
    assert "set model.path to the model that it serves" in line


async def test_a_smaller_vocabulary(tmp_path: Path) -> None:
    async with serve_vllm(300, tokenizer=WORDS) as fake:
        code, line = await ended(tmp_path, ROLLOUT, fake.url)
    assert code == 1
    assert f"vllm at {fake.url} serves another vocabulary" in line
    assert "out of range" in line


async def test_a_dead_replica(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB, tokenizer=WORDS) as fake:
        code, line = await ended(tmp_path, TRAIN, fake.url, "http://127.0.0.1:9")
    assert code == 1
    assert "vllm at http://127.0.0.1:9 is not reachable" in line
    assert line.endswith("start it, or leave it out of engine.urls")


async def test_adapters_at_a_server_without_them(tmp_path: Path) -> None:
    async with serve_vllm(VOCAB, tokenizer=WORDS, lora=False) as fake:
        code, line = await ended(tmp_path, LORA, fake.url)
    assert code == 1
    assert f"vllm at {fake.url} takes no adapters: start it with --enable-lora and" in line
    assert 'engine.publish_lora = "merged"' in line


async def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in WARM_START.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = model / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1000)
    code, line = await ended(tmp_path, (*TRAIN, f"model.path={model}"), "http://127.0.0.1:9")
    assert code == 2
    cut = f"{weights} has {size - 1000:,} bytes where its header needs {size:,}"
    assert line == f"insitu: model.path: {cut}: download it again"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes((WARM_START / "model.safetensors").read_bytes())
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        EngineError, match=r"two\.safetensors is missing, .* \(1 of 2 files\): download it again"
    ):
        check_complete(tmp_path)
    (tmp_path / "two.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineError, match=r"two\.safetensors is damaged or cut off: download it again"):
        check_complete(tmp_path)
