"""What `insitu serve` says of agents' first prompts is what their recordings say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recordings_lab import FOLDER, read

from insitu.chat.load import load_renderer
from insitu.config.load import WARM_START
from insitu.gateway.prompt_ids import leading_system
from insitu.runtime.prompt_sizes import FIRST_CALLS, OWN_FIRST_CALLS, PromptFit
from insitu.serving.agent_setup import agent_names
from insitu.storage.run_dir import read_store
from tests.e2e.test_runs import command, finish


def test_the_table_is_what_the_recordings_say() -> None:
    renderer = load_renderer(WARM_START)
    assert set(FIRST_CALLS) == set(agent_names())
    for agent, held in FIRST_CALLS.items():
        calls = (call.wire().request for call in read(FOLDER / f"{agent}.jsonl.xz").calls)
        request = next(request for request in calls if request.tools)
        lead = leading_system(request.messages)
        parts = [renderer.open(lead, request.tools), renderer.append(list(request.messages)[len(lead) :])]
        ids = np.concatenate([*parts, renderer.generation_prompt(request.messages[-1].role)])
        assert held.characters == pytest.approx(len(renderer.decode(ids)), rel=0.02), agent
        if agent not in ("pi", "mini_swe"):  # measured with the agents themselves
            assert held.shipped_tokens == pytest.approx(len(ids), rel=0.01), agent


def test_what_fits_depends_on_context_and_vocabulary(tmp_path: Path) -> None:
    shipped = PromptFit(WARM_START, 8192)
    assert [agent for agent in agent_names() if shipped.fits(agent)] == ["pi", "mini_swe"]
    assert "8,192" in shipped.note("codex")
    assert "36,700" in shipped.note("codex")
    assert "can serve pi, mini_swe;" in shipped.summary(agent_names())
    assert shipped.summary(["pi"]) == shipped.note("pi") == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    assert PromptFit(tmp_path, 32_768).summary(agent_names()) == ""
    assert [agent for agent in agent_names() if not PromptFit(tmp_path, 16_384).fits(agent)] == ["qwen_code"]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("agent", OWN_FIRST_CALLS)
def test_the_sizes_of_own_agents_are_those_of_a_rollout(agent: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    limits = ["rollout.count=1", "limits.max_calls=1", "harness.workers=1"]
    finish(command("rollout", "--json", "--plain", f"harness.agent={agent}", f"run.dir={run_dir}", *limits))
    with read_store(run_dir) as store:
        (rollout,) = [one for phase, step in store.phases() for one in store.rollouts(phase, step)]
    ids = rollout.turns[0].context_ids
    held = OWN_FIRST_CALLS[agent]
    assert held.shipped_tokens == pytest.approx(len(ids), rel=0.01)
    assert held.characters == pytest.approx(len(load_renderer(WARM_START).decode(ids)), rel=0.01)
