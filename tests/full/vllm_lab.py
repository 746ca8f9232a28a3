"""Runs of `insitu train FILE` beside a real vLLM server, and its log-probabilities beside our own forward."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.config import WARM_START
from insitu.engines.base import Engine
from insitu.engines.factory import probe_prompt
from insitu.storage.run_dir import read_store
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu_train.embedded.model import Qwen3

FAMILY = template_renderer(read_folder(WARM_START))
PROMPT = probe_prompt(FAMILY)
CLOSE = 1e-3
"""Nats between vLLM's logprobs and ours, both float32."""


def train(folder: Path, url: str, tables: Mapping[str, Mapping[str, object]]) -> tuple[Path, dict[str, Any]]:
    """Write a configuration, run it with the scripted agent on toy tasks: (run directory, summary).

    url: "" = the run starts its servers."""
    run = folder / "run"
    basis: dict[str, dict[str, object]] = {
        "run": {"dir": str(run)},
        "model": {"max_context_tokens": 2048},
        "tasks": {"source": "toy"},
        "harness": {"agent": "script", "mode": "warm", "workers": 8},
        "engine": {"kind": "vllm", "publish_dtype": "float32", **({"urls": [url]} if url else {})},
        "train": {"min_groups": 1},
    }
    for name, keys in tables.items():
        basis[name] = {**basis.get(name, {}), **keys}
    lines = []
    for name, keys in basis.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.toml"
    file.write_text("\n".join(lines))
    command = [sys.executable, "-m", "insitu", "train", str(file), "--plain", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    print(report(run, summary))
    return run, summary


def published_s(run: Path) -> list[float]:
    """Seconds of each publication after a step."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event["publish_s"] for event in events if event["event"] == "step"]


def report(run: Path, summary: Mapping[str, Any]) -> str:
    """What a person wants to know of such a run; `pytest -s` shows it."""
    with read_store(run) as store:
        steps = [step.metrics for step in store.steps()]
    stale = sorted(metrics.get("staleness_max", 0) for metrics in steps)
    return (
        f"{len(steps)} steps: held-out {summary['heldout_before']} -> {summary['heldout_after']}, staleness"
        f" at most {stale[-1]}, publication {statistics.median(published_s(run)):.2f} s (median), gap"
        f" {summary['max_logprob_gap']:.2g}, {summary['wall_s']:.0f} s"
    )


async def ask(
    engine: Engine,
    turn: int,
    max_tokens: int,
    *,
    temperature: float = 1.0,
    stop: frozenset[int] = frozenset(),
    prompt: IntArray = PROMPT,
) -> Generation:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_ids=stop)
    return await engine.generate(prompt, params, RequestKey(seed=5, rollout_id="real", turn=turn))


def our_logprobs(model: Qwen3, prompt: IntArray, sampled: IntArray, temperature: float) -> Any:
    """Of `sampled` after `prompt`, by insitu's own forward: [n] float32."""
    ids = torch.tensor(np.concatenate([prompt, sampled])[None].astype(np.int64))
    with torch.no_grad():
        rows = model.logits(model.hidden(ids[0, :0], ids))[0, len(prompt) - 1 : -1] / temperature
        return rows.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


def gap(model: Qwen3, said: Generation, temperature: float, prompt: IntArray = PROMPT) -> float:
    assert said.logprobs is not None
    return float(np.abs(our_logprobs(model, prompt, said.ids, temperature) - said.logprobs).max())
