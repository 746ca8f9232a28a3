"""Wishes that are recorded: in the request, beside the turn, in the log and in what is exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from gateway_rig import ASK, TOOLS, Rig, said
from wire_lab import PLAIN

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.anthropic import AnthropicDialect
from insitu.gateway.dialects.chat import ChatDialect
from insitu.gateway.request import GatewayConfig
from insitu.gateway.server import DIALECTS
from insitu.gateway.session_export import export_json
from insitu.storage.session_log import recover


def test_wishes_that_nothing_follows_are_recorded() -> None:
    ask = [{"role": "user", "content": "Hi."}]
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    wire = AnthropicDialect().parse({"messages": ask, "max_tokens": 9, "context_management": edits}, "")
    assert dict(wire.request.advisory)["context_management"].startswith('{"edits"')
    guess = {"type": "content", "content": "Hello."}
    wire = ChatDialect().parse({"messages": ask, "prediction": guess}, "")
    assert "Hello." in dict(wire.request.advisory)["prediction"]


ODD: Mapping[str, dict[str, object]] = {
    "chat": {"verbosity": "low", "service_tier": "flex", "web_search_options": {}, "guided_json": {"a": 1}},
    "anthropic": {"service_tier": "auto", "new_wish": "us", "other_wishes": []},
    "responses": {
        **{"context_management": [{"type": "compaction"}], "text": {"verbosity": "low"}, "verbosity": "low"},
        "new_wish": {},
    },
    "gemini": {
        "safetySettings": [{"category": "X"}],
        "generationConfig": {"topK": 3, "newWish": "L"},
    },
}
STRICT: Mapping[str, dict[str, object]] = {
    "chat": {"type": "function", "function": {"name": "read", "strict": True}},
    "anthropic": {"name": "read", "strict": True},
    "responses": {"type": "function", "name": "read", "strict": True},
}


@pytest.mark.parametrize("name", ODD)
def test_every_field_is_followed_recorded_or_known_by_name(name: str) -> None:
    tools = {"tools": [STRICT[name]]} if name in STRICT else {}
    reported = dict(
        DIALECTS[name].parse({**PLAIN[name], **ODD[name], **tools}, "models/m:x").request.advisory
    )
    unknown = json.loads(reported["unknown_fields"])
    assert (
        unknown
        == {
            "chat": ["guided_json"],
            "anthropic": ["new_wish", "other_wishes"],
            "responses": ["new_wish"],
            "gemini": ["generationConfig.newWish"],
        }[name]
    )
    recorded = ({*ODD[name]} - {*unknown, "generationConfig"}) | ({"topK"} if name == "gemini" else set())
    assert recorded <= reported.keys()
    assert reported.get("tools.strict") == ('["read"]' if tools else None)
    plain = dict(DIALECTS[name].parse(PLAIN[name], "models/m:x").request.advisory)
    assert not {"unknown_fields", "tools.strict"} & plain.keys()


def test_wishes_are_bounded() -> None:
    many = {f"field{i}" + "x" * 999: 1 for i in range(999)}
    reported = ChatDialect().parse({"messages": ASK, "prediction": "p" * 9999, **many}, "").request.advisory
    assert len(reported) == 2
    assert max(len(value) for _, value in reported) < 2000


def logged(folder: Path, word: bytes) -> tuple[list[Mapping[str, str]], int]:
    """Wishes by turn as the one log in `folder` gives them back, and how often it holds `word`."""
    path = next(folder.glob("*.log"))
    turns = recover(path).forest.trajectory().turns
    return [dict(turn.advisory) for turn in turns], path.read_bytes().count(word)


async def test_what_was_wished_for_stands_beside_the_turn(renderer: TemplateRenderer, tmp_path: Path) -> None:
    """In the export, and in the session's log once for each change."""
    only_write = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "write"}}]}
    limited = {"type": "allowed_tools", "allowed_tools": only_write}
    ignored_params = {"model": "gpt-marker", "temperature": 0.125, "seed": 42, "logit_bias": {"5": 1}}
    config = GatewayConfig(log_dir=tmp_path)
    async with Rig(renderer, [said("One."), said("Two."), said("Three.")], config=config) as rig:
        for more in ({}, {}, {"tools": TOOLS, "tool_choice": limited}):
            status, _ = await rig.post({"messages": ASK, **ignored_params, **more})
            assert status == 200
        trajectory = await rig.sealed()
        reported = [dict(turn.advisory) for turn in trajectory.turns]
        assert reported[0] == {
            name: json.dumps(value, separators=(",", ":")) for name, value in ignored_params.items()
        }
        assert trajectory.turns[1].advisory is trajectory.turns[0].advisory
        assert '"name":"write"' in reported[2]["tool_choice"]
        exported = json.loads(export_json(trajectory, temperature=1.0))
        assert [dict(turn["advisory"]) for turn in exported["turns"]] == reported
        again, times = logged(tmp_path, b"gpt-marker")
        assert [dict(wished) for wished in again] == reported
        assert times == 2
