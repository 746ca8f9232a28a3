"""The shipped warm start: what was recorded through Pi equals what is rendered, and it passes its gate."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.agents.base import ModelAccess
from insitu.agents.install import find
from insitu.agents.pi import RECIPE
from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.config import WARM_START, demo_preset, load_config
from insitu.progress.plain import PlainView
from insitu.tasks.toy import ToyProblem, make_problem
from insitu_train.demo.demonstrator import Habits
from insitu_train.demo.make_warm_start import RECORDED, constant_ids, record, sent_prompt
from insitu_train.demo.rendered_demonstrations import Demonstration, render
from insitu_train.demo.sft_data import (
    Phase,
    Recorded,
    SftJob,
    read_job,
    read_recorded,
    write_job,
    write_recorded,
)
from insitu_train.demo.sft_job import GATE, gate
from insitu_train.embedded.model import load_model


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return template_renderer(read_folder(WARM_START))


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return read_recorded(WARM_START / "recorded.npz")


def problem_of(demonstration: Demonstration) -> ToyProblem:
    return make_problem(int(demonstration.task_id.removeprefix("toy-")))


def same(recorded: Demonstration, renderer: TemplateRenderer, habits: Habits, seed: int) -> bool:
    rendered = render(renderer, problem_of(recorded), habits, seed)
    return np.array_equal(recorded.ids, rendered.ids) and np.array_equal(recorded.mask, rendered.mask)


def test_at_least_300_demonstrations_were_recorded_through_pi(recorded: Recorded) -> None:
    assert sum(len(rows) for rows in recorded.rows.values()) == RECORDED >= 300


def test_every_recorded_demonstration_equals_its_rendering(
    recorded: Recorded, renderer: TemplateRenderer
) -> None:
    job = read_job(WARM_START / "job.json")
    for phase, rows in recorded.rows.items():
        for demonstration in rows:
            assert same(demonstration, renderer, job.phases[phase].habits, job.seed), demonstration.task_id


def test_the_demonstrator_is_often_wrong_and_often_does_not_look(
    recorded: Recorded, renderer: TemplateRenderer
) -> None:
    """The last phase's habits are what RL starts from."""
    rows = recorded.rows[max(recorded.rows)]
    looked = [renderer.decode(d.ids[d.mask]).split("</tool_call>")[0].count('"edit"') == 0 for d in rows]
    assert 0.02 < np.mean(looked) < 0.3


@pytest.mark.full
@pytest.mark.slow
def test_the_shipped_weights_pass_the_gate_in_every_family(
    recorded: Recorded, renderer: TemplateRenderer
) -> None:
    measured = gate(load_model(WARM_START), renderer, recorded.prefixes[0], tasks=192)
    stated = json.loads((WARM_START / "gate.json").read_text())
    assert set(measured) == set(stated)
    assert all(rate >= GATE for rate in stated.values())
    # A quarter of the tasks: allow what chance allows.
    assert all(measured[name] >= GATE - 0.08 for name in measured), measured


def test_the_shipped_weights_are_small() -> None:
    assert sum(f.stat().st_size for f in WARM_START.iterdir()) < 6 << 20


@pytest.mark.slow
def test_a_live_pi_sends_the_prompt_the_warm_start_knows_and_the_same_ids(
    recorded: Recorded, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find(RECIPE) is None and not os.environ.get("INSITU_REQUIRE_PI"):
        pytest.skip("Pi is not installed; scripts/setup installs it")
    monkeypatch.setattr("insitu_train.demo.make_warm_start.RECORDED", 24)
    config = load_config(None, ["harness.workers=3"], demo_preset())
    view = PlainView(io.StringIO())
    prefix = asyncio.run(constant_ids(config, "pi", WARM_START, view))
    assert np.array_equal(prefix, recorded.prefixes[0])
    job = SftJob(phases=(Phase(steps=1, look=0.6, wrong=0.3), Phase(steps=1, look=0.1, wrong=0.1)), seed=7)
    live = asyncio.run(record(config, WARM_START, job, [prefix], view))
    assert sum(len(rows) for rows in live.rows.values()) == 24
    for phase, rows in live.rows.items():
        assert all(same(d, renderer, job.phases[phase].habits, job.seed) for d in rows)


def test_job_and_recordings_round_trip(tmp_path: Path, recorded: Recorded) -> None:
    job = SftJob(seed=3, phases=(Phase(steps=2, look=0.5, wrong=0.1),))
    write_job(job, tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job
    write_recorded(tmp_path / "recorded.npz", recorded)
    again = read_recorded(tmp_path / "recorded.npz")
    assert [p.tolist() for p in again.prefixes] == [p.tolist() for p in recorded.prefixes]
    assert {k: [d.ids.tolist() for d in v] for k, v in again.rows.items()} == {
        k: [d.ids.tolist() for d in v] for k, v in recorded.rows.items()
    }


@pytest.mark.slow
async def test_the_recorded_agent_gets_the_window_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's prompt may depend on it: Codex shortens its list of skills."""
    started: list[ModelAccess] = []

    def access(**values: Any) -> ModelAccess:
        started.append(ModelAccess(**values))
        return started[-1]

    monkeypatch.setattr("insitu_train.demo.make_warm_start.ModelAccess", access)
    config = load_config(None, ["model.max_context_tokens=16384"], demo_preset())
    await sent_prompt(config, "script", WARM_START, PlainView(io.StringIO()))
    assert [one.max_context_tokens for one in started] == [16384]
