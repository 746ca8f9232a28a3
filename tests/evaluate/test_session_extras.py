"""Host tools and the text shim in runs: what the configuration adds to every session of a rollout."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from test_run_verb import DONE, Scripted, run

from insitu.config import load_config
from insitu.errors import ConfigError
from insitu.storage.run_dir import read_store
from insitu.types import IntArray, Message, RequestKey, Rollout
from insitu_train.demo.demonstrator import call

REPORT: dict[str, Any] = {
    "name": "report",
    "description": "Say how sure you are.",
    "parameters": {
        "type": "object",
        "properties": {"sure": {"type": "number", "maximum": 1}},
        "required": ["sure"],
    },
}


class Reporting(Scripted):
    """Calls the host tool, rightly in slot 0 and wrongly in slot 1, then stops."""

    def policy(self, ids: IntArray, key: RequestKey) -> Message:
        sure = 0.5 if key.rollout_id.endswith("/00") else 7
        return call("report", sure=sure) if key.turn == 0 else DONE


class Writing(Scripted):
    """Cannot call tools: writes a command as text, once."""

    def policy(self, ids: IntArray, key: RequestKey) -> Message:
        text = "I look.\n```bash\necho found >found.txt; cat found.txt\n```"
        return Message(role="assistant", text=text) if key.turn == 0 else DONE


def stored(folder: Path) -> list[Rollout]:
    with read_store(folder / "run") as store:
        return [rollout for place in store.phases() for rollout in store.rollouts(*place)]


def tool_file(tmp_path: Path, *tools: object) -> str:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(tools))
    return f"gateway.tools={path}"


@pytest.mark.slow
def test_host_tools_of_a_run_are_offered_acknowledged_and_kept(tmp_path: Path) -> None:
    scripted = Reporting()
    summary = run(tmp_path, scripted, tool_file(tmp_path, REPORT), "rollout.count=1")
    assert summary["graded"] == 2
    assert scripted.engine is not None
    renderer = scripted.engine._renderer
    prompts = {(s.key.rollout_id[-2:], s.key.turn): renderer.decode(s.ids) for s in scripted.engine.sent}
    assert all("Say how sure you are." in prompt for prompt in prompts.values())
    assert '{"ok":true}' in prompts["00", 1]
    assert "7 is greater than the maximum of 1" in prompts["01", 1]
    kept = [json.loads(line) for line in (tmp_path / "run" / "host_calls.jsonl").read_text().splitlines()]
    kept.sort(key=lambda line: line["rollout_id"])
    assert [(k["rollout_id"][-2:], k["attempt"], k["index"], k["name"]) for k in kept] == [
        ("00", 1, 0, "report"),
        ("01", 1, 0, "report"),
    ]
    assert [json.loads(k["arguments"]) for k in kept] == [{"sure": 0.5}, {"sure": 7}]
    assert [(k["source"], bool(k["error"])) for k in kept] == [("model", False), ("model", True)]


@pytest.mark.slow
def test_the_shim_of_a_run_turns_text_into_calls_and_labels_the_turns(tmp_path: Path) -> None:
    scripted = Writing()
    shown = StringIO()
    one = ["rollout.count=1", "rollout.samples=1"]
    run(tmp_path, scripted, "gateway.shim_tool=bash", *one, shown=shown)
    assert "shim_tool" not in shown.getvalue()
    assert scripted.engine is not None
    renderer = scripted.engine._renderer
    assert "found" in renderer.decode(scripted.engine.sent[1].ids).split("```")[-1]
    (rollout,) = stored(tmp_path)
    hints = [[value for name, value in turn.hints if name == "label"] for turn in rollout.trajectory.turns]
    assert hints == [["shim"], []]
    assert not (tmp_path / "run" / "host_calls.jsonl").exists()


@pytest.mark.slow
def test_a_shim_for_a_tool_that_the_agent_does_not_have_is_told_of_once(tmp_path: Path) -> None:
    shown = StringIO()
    summary = run(tmp_path, Writing(), "gateway.shim_tool=bahs", "rollout.count=1", shown=shown)
    assert summary["calls"] == 2, "each of two agents took the text for its end"
    assert shown.getvalue().count("gateway.shim_tool 'bahs' is not among the tools") == 1


@pytest.mark.slow
def test_without_the_shim_a_text_is_the_end(tmp_path: Path) -> None:
    scripted = Writing()
    assert run(tmp_path, scripted, "rollout.count=1", "rollout.samples=1")["calls"] == 1


@pytest.mark.slow
def test_tools_that_cannot_be_end_the_run_before_it_begins(tmp_path: Path) -> None:
    for tools, said in (
        ([{**REPORT, "name": "step"}], "valid tool name"),
        ([{"name": "a"}], "Field required"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(tmp_path, Scripted(), tool_file(tmp_path, *tools))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["gateway.shim_whole_text=true"], "has no effect with shim_tool = ''"),
        (["gateway.tools=a.json", "harness.agent=single_turn"], "gateway.tools has no effect with harness"),
        (
            ["gateway.shim_tool=bash", "engine.kind=upstream", "engine.urls=http://a", "engine.model=m"],
            "gateway.shim_tool has no effect with engine.kind upstream",
        ),
    ],
)
def test_extras_that_would_change_nothing_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, overrides)
