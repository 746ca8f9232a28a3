"""HumanEval from its file to verdicts: its own solutions, stubs, and replies of a model without an agent."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import insitu
from benchmarks.grading import run as run_bench
from insitu.config import load_config
from tests.fakes.provider import KEY, serve_provider

pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("INSITU_HUMANEVAL", Path(__file__).parents[1] / "data" / "HumanEval.jsonl.gz"))
SETTINGS = ["tasks.source=humaneval", "tasks.eval_share=1.0", f"tasks.path={DATA}"]


def rows() -> list[dict[str, Any]]:
    with gzip.open(DATA, "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.full
def test_the_first_solutions_pass_and_their_stubs_do_not() -> None:
    reported = run_bench(load_config(None, SETTINGS), 12)
    assert (reported["solution"], reported["stub"]) == ({"resolved": 12}, {"unresolved": 12})


@pytest.mark.full
def test_every_solution_passes_and_no_stub_does() -> None:
    reported = run_bench(load_config(None, SETTINGS))
    assert (reported["solution"], reported["stub"]) == ({"resolved": 164}, {"unresolved": 164})
    assert (reported["solution_wrong"], reported["stub_wrong"]) == ({}, {})


@pytest.mark.full
async def test_replies_of_a_model_are_graded_without_an_agent(tmp_path: Path) -> None:
    """The model knows every other answer; it talks around the code and shows a first try before."""
    held = {row["prompt"].strip(): (number, row) for number, row in enumerate(rows()[:8])}

    def reply(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        (message,) = asked["messages"]
        number, row = next(found for prompt, found in held.items() if prompt in message["content"])
        body = row["canonical_solution"] if number % 2 == 0 else "    return None\n"
        first = "```python\nprint('thinking')\n```\n"
        return {"content": f"{first}So:\n```python\n{row['prompt']}{body}```\nThat is it."}

    async with serve_provider() as fake:
        fake.replies = reply
        fake.busy = [(429, "0.1")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "insitu", "rollout", str(config_file(tmp_path, fake.url)),
            "--json", "--plain", *SETTINGS, f"run.dir={tmp_path / 'run'}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(insitu.__file__).parents[1]), "FAKE_KEY": KEY},
        )  # fmt: skip
        async with asyncio.timeout(90):
            out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    summary = json.loads(out.splitlines()[-1])
    assert (summary["graded"], summary["verdict"]["resolved"], summary["calls"]) == (16, 8, 16)
    assert (summary["pass_at"]["1"]["value"], summary["pass_at"]["2"]["value"]) == (0.5, 0.5)
    assert set(summary["trust"]) <= {"strong", "standard", "weak"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    for line in lines:
        number = int(line["task_id"].split("/")[1])
        assert line["verdict"] == ("unresolved" if number % 2 else "resolved")


def config_file(tmp_path: Path, url: str) -> Path:
    file = tmp_path / "rollout.toml"
    file.write_text(
        '[engine]\nkind = "upstream"\nmodel = "big-model"\nkey_env = "FAKE_KEY"\n'
        f'urls = "{url}"\n[harness]\nagent = "single_turn"\nworkers = 4\n'
        "[rollout]\ncount = 8\nsamples = 2\n[limits]\nmax_calls = 1\n"
    )
    return file
