"""Sessions that drop reasoning as the template does, over HTTP: branches, known bodies, logs, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gateway_rig import ASK, TOOLS, Rig, call
from render_families import QWEN3_HEAD, QWEN3_REASONING, write_renderer

from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.errors import ConfigError
from insitu.gateway.request import GatewayConfig
from insitu.storage.session_log import recover
from insitu.types import Message


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return template_renderer(
        read_folder(write_renderer(tmp_path_factory.mktemp("m") / "q", QWEN3_HEAD + QWEN3_REASONING))
    )


def thinks(text: str, reasoning: str, *calls: str) -> Message:
    made = tuple(call("read", f'{{"path": "{path}"}}') for path in calls)
    return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=made)


SCRIPT = [
    thinks("Look.", "First.", "a"),
    thinks("Done.", "Second."),
    thinks("More.", "Third.", "b"),
    thinks("All done.", "Fourth."),
    thinks("Bye.", "Fifth."),
]


async def converse(rig: Rig) -> list[str]:
    """Three questions, two with a tool; returns the prompts."""
    messages: list[dict[str, Any]] = list(ASK)
    for turn in range(5):
        status, body = await rig.post({"messages": messages, "tools": TOOLS})
        assert status == 200
        said = body["choices"][0]["message"]
        messages.append(said)
        for made in said.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": f"r{turn}"})
        if not said.get("tool_calls"):
            messages.append({"role": "user", "content": f"question {turn}"})
    return [rig.engine._renderer.decode(sent.ids) for sent in rig.engine.sent]


@pytest.mark.case(9)
async def test_each_question_is_a_branch_without_the_reasoning_before_it(
    dropping: TemplateRenderer, tmp_path: Path
) -> None:
    config = GatewayConfig(keep_reasoning="template", log_dir=tmp_path)
    async with Rig(dropping, SCRIPT, config=config) as rig:
        prompts = await converse(rig)
        held = ["", "First.", "", "Third.", ""]
        for prompt, kept in zip(prompts, held, strict=True):
            words = [w for w in ("First.", "Second.", "Third.", "Fourth.") if w in prompt]
            assert words == ([kept] if kept else [])
        again = recover(tmp_path / f"{rig.session.public_id}.log").forest.trajectory()
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, 0, -1, 2, -1]
        assert [turn.parent for turn in again.turns] == [-1, 0, -1, 2, -1]
        assert [segment.label for segment in trajectory.segments] == ["wipe", "wipe", "final"]
        assert [(n.kind, n.cause, n.request) for n in trajectory.drifts] == [
            ("fork", "retention", 2),
            ("fork", "retention", 4),
        ]
        assert trajectory.ledger.trained == trajectory.ledger.captured
        assert rig.session.stats.edited == 0


@pytest.mark.case(9)
async def test_by_default_all_reasoning_stays(dropping: TemplateRenderer) -> None:
    async with Rig(dropping, SCRIPT) as rig:
        prompts = await converse(rig)
        assert all(w in prompts[-1] for w in ("First.", "Second.", "Third.", "Fourth."))
        assert [turn.parent for turn in (await rig.sealed()).turns] == [-1, 0, 1, 2, 3]


async def test_a_retry_of_a_question_samples_from_the_branch_that_is_there(
    dropping: TemplateRenderer,
) -> None:
    config = GatewayConfig(keep_reasoning="template")
    async with Rig(dropping, [SCRIPT[1], SCRIPT[4]], config=config) as rig:
        _, body = await rig.post({"messages": ASK, "tools": TOOLS})
        later = [*ASK, body["choices"][0]["message"], {"role": "user", "content": "And?"}]
        for _ in range(2):
            assert (await rig.post({"messages": later, "tools": TOOLS}))[0] == 200
        one, two = rig.engine.sent[1:]
        assert one.ids.tolist() == two.ids.tolist()
        assert len((await rig.sealed()).turns) == 3
        assert rig.session.stats.forks == 1


def test_rules_that_keep_all_reasoning_refuse_the_mode(renderer: TemplateRenderer) -> None:
    from insitu.gateway.server import Gateway
    from insitu.gateway.token_backend import TokenBackend

    with pytest.raises(ConfigError, match="keeps all reasoning"):
        Gateway(TokenBackend(None, renderer), GatewayConfig(keep_reasoning="template"))  # type: ignore[arg-type]
