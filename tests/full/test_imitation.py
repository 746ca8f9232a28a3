"""Distillation as a person runs it: a teacher behind a provider's API, its rollouts kept as text, `insitu
sft` on them, and a student that solves more unseen tasks than before."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from insitu.tasks.toy import ToySource
from insitu.types import Limits
from tests.fakes.provider import KEY, serve_provider

pytestmark = pytest.mark.full

TASKS, HELD_OUT = 96, 128
SETTINGS = ["examples/rollout.toml", "harness.workers=4"]


class Teacher:
    """Reads the file, then puts the one fault right; speaks chat completions."""

    def __init__(self) -> None:
        source = ToySource(Limits())
        self._problems = [source.problem(task) for task in source.tasks("train", 0, TASKS)]

    def __call__(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        messages = asked["messages"]
        issue = next(m["content"] for m in messages if m["role"] == "user")
        heard = [m["content"] for m in messages if m["role"] == "tool"]
        # An issue may be that of several tasks; the file tells which.
        problem = next(
            p
            for p in self._problems
            if p.prompt == issue and (not heard or p.text(solved=False).strip() in heard[0])
        )
        edits = [{"oldText": problem.fault.old, "newText": problem.fault.new}]
        acts = [("read", {"path": problem.path}), ("edit", {"path": problem.path, "edits": edits})]
        if len(heard) == len(acts):
            return {"content": "Done."}
        name, arguments = acts[len(heard)]
        call = {"id": f"call_{len(heard)}", "type": "function"}
        call["function"] = {"name": name, "arguments": json.dumps(arguments)}  # type: ignore[assignment]
        return {"content": None, "tool_calls": [call]}


async def insitu(*arguments: str) -> dict[str, Any]:
    """Runs a command; returns its last line."""
    command = [sys.executable, "-m", "insitu", *arguments, "--plain", "--json"]
    env = {**os.environ, "FAKE_KEY": KEY}
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=env)
    out, _ = await asyncio.wait_for(child.communicate(), 900)
    assert child.returncode == 0
    reported: dict[str, Any] = json.loads(out.splitlines()[-1])
    return reported


async def solve_rate(folder: Path, *more: str) -> float:
    settings = ["rollout.split=eval", f"rollout.count={HELD_OUT}", "rollout.samples=1", f"run.dir={folder}"]
    reported = await insitu("rollout", *SETTINGS, *settings, *more)
    rate: float = reported["pass_at"]["1"]["value"]
    return rate


async def test_a_student_of_a_teachers_text_solves_more_unseen_tasks(tmp_path: Path) -> None:
    source, student = tmp_path / "teacher", tmp_path / "student"
    async with serve_provider() as fake:
        fake.replies = Teacher()
        upstream = ["engine.kind=upstream", f"engine.urls={fake.url}", "engine.model=big-model"]
        upstream += ["engine.key_env=FAKE_KEY", "rollout.split=train", f"rollout.count={TASKS}"]
        taught = await insitu("rollout", *SETTINGS, *upstream, "rollout.samples=1", f"run.dir={source}")
    assert taught["pass_at"]["1"]["value"] == 1.0
    settings = ["train.lr=3e-4", "train.epochs=4", "sft.rollouts_per_step=16", f"run.dir={student}"]
    learnt = await insitu("sft", str(source), *settings)
    assert (learnt["chosen"], learnt["choice"]) == (TASKS, f"{TASKS} rollouts, {TASKS} chosen")
    before = await solve_rate(tmp_path / "before")
    after = await solve_rate(tmp_path / "after", f"model.path={learnt['checkpoint']}")
    assert after > before + 0.08
