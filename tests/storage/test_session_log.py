"""A killed gateway: whatever frame was written last, the forest comes back as it was then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said
from render_families import write_renderer

import insitu
from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.errors import RecordError
from insitu.gateway.request import GatewayConfig
from insitu.serving.served import SESSIONS, recover_run
from insitu.storage.open_run import open_run
from insitu.storage.session_log import LogFile, _sized, recover
from insitu.types import Message, Trajectory


@pytest.fixture(scope="session")
def category(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return template_renderer(read_folder(write_renderer(tmp_path_factory.mktemp("model") / "hermes")))


def same(a: Trajectory, b: Trajectory) -> None:
    assert a.ledger == b.ledger
    assert a.drifts == b.drifts
    assert len(a.turns) == len(b.turns)
    for one, other in zip(a.turns, b.turns, strict=True):
        for name in ("index", "parent", "finish", "version_runs", "excluded", "hints", "advisory"):
            assert one.__getattribute__(name) == other.__getattribute__(name), name
        for name in ("context_ids", "ids", "logprobs"):
            np.testing.assert_array_equal(one.__getattribute__(name), other.__getattribute__(name))
    assert len(a.segments) == len(b.segments)
    for row, other_row in zip(a.segments, b.segments, strict=True):
        assert (row.label, row.kind) == (other_row.label, other_row.kind)
        for name in ("ids", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(row.__getattribute__(name), other_row.__getattribute__(name))


async def history(rig: Rig) -> None:
    """Two turns with a call, a twin, an edit, and a sub-agent's root with a reply cut at a stop string."""
    auth = {"x-claude-code-agent-id": "a1"}
    _, body = await rig.post({"messages": ASK, "tools": TOOLS}, **auth)
    echo: dict[str, Any] = body["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "x = 1"}
    longer = [*ASK, echo, result]
    await rig.post({"messages": longer, "tools": TOOLS})
    await rig.post({"messages": longer, "tools": TOOLS, "seed": 2})
    changed = json.loads(json.dumps(echo))
    changed["tool_calls"][0]["function"]["arguments"] = '{"path": "other"}'
    await rig.post({"messages": [*ASK, changed, result], "tools": TOOLS})
    await rig.post({"messages": [{"role": "user", "content": "A title, please: é\u0000"}], "stop": "tit"})


SCRIPT = [
    Message(role="assistant", text="I look.", tool_calls=(call("read", '{"path": "a"}'),)),
    said("Done."),
    said("Done otherwise."),
    said("Edited."),
    said("A title"),
]


@pytest.mark.case(58)
async def test_killed_at_every_step_and_at_every_byte(category: TemplateRenderer, tmp_path: Path) -> None:
    config = GatewayConfig(log_dir=tmp_path)
    async with Rig(category, SCRIPT, config=config) as rig:
        file = tmp_path / f"{rig.session.public_id}.log"
        await history(rig)
        assert oct(file.stat().st_mode & 0o777) == "0o600"
        whole = file.read_bytes()
        trajectory = await rig.session.seal(1.0)
        assert file.read_bytes() == whole
    assert trajectory.ledger.excluded["after_stop"] > 0
    found = recover(file)
    assert (found.rollout_id, found.torn) == ("r/0", False)
    same(found.forest.trajectory(), trajectory)
    ends = [0]
    for _, _, size in _sized(whole):
        ends.append(ends[-1] + 12 + size)
    assert ends[-1] == len(whole)
    torn = tmp_path / "torn.log"
    captured = []
    for frame, end in enumerate(ends[1:], start=1):
        torn.write_bytes(whole[:end])
        exact = recover(torn)
        assert (exact.frames, exact.torn) == (frame, False)
        held = exact.forest.trajectory()
        assert held.ledger.balanced
        captured.append(held.ledger.captured)
        # What is there is what was there: the turns are the first ones of the whole.
        for turn, full in zip(held.turns, trajectory.turns, strict=False):
            np.testing.assert_array_equal(turn.ids, full.ids)
            np.testing.assert_array_equal(turn.context_ids, full.context_ids)
        # A frame that was being written is as if it had not begun.
        following = ends[frame + 1] if frame + 1 < len(ends) else end
        for cut in {end + 1, end + 11, end + 13, following - 1}:
            if end < cut < following:
                torn.write_bytes(whole[:cut])
                part = recover(torn)
                assert (part.frames, part.torn) == (frame, True)
                same(part.forest.trajectory(), held)
    assert captured == sorted(captured)
    assert captured[-1] == trajectory.ledger.captured


async def test_a_repeated_prompt_with_other_call_ids_comes_back(
    category: TemplateRenderer, tmp_path: Path
) -> None:
    async with Rig(category, SCRIPT, config=GatewayConfig(log_dir=tmp_path)) as rig:
        _, body = await rig.post({"messages": ASK, "tools": TOOLS})
        echo: dict[str, Any] = body["choices"][0]["message"]
        for name in (echo["tool_calls"][0]["id"], "own"):
            echo["tool_calls"][0]["id"] = name
            result = {"role": "tool", "tool_call_id": name, "content": "x = 1"}
            await rig.post({"messages": [*ASK, echo, result], "tools": TOOLS})
        trajectory = await rig.session.seal(1.0)
        assert trajectory.turns[1].parent == trajectory.turns[2].parent == 0
        found = recover(tmp_path / f"{rig.session.public_id}.log")
    same(found.forest.trajectory(), trajectory)


def test_a_changed_byte_ends_the_log_there(category: TemplateRenderer, tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    log = LogFile.create(file, "r")
    log.write({"op": "delivered", "node": 5})
    log.close()
    whole = file.read_bytes()
    with pytest.raises(RecordError, match="cannot be replayed"):
        recover(file)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert recover(file).torn


@pytest.mark.parametrize("raw", [b"", b"\0" * 40, b"SQLite format 3\0" * 9])
def test_what_is_no_log(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "b.log"
    file.write_bytes(raw)
    with pytest.raises(RecordError, match="is not a session log"):
        recover(file)


def test_text_that_no_file_can_hold_is_kept_as_far_as_it_can_be(tmp_path: Path) -> None:
    log = LogFile.create(tmp_path / "a.log", "r/0")
    log.write({"op": "x", "messages": (Message(role="user", text="cut \ud83d"),), "names": {"a\udcff": "b"}})
    log.close()
    _, (event, _, _) = _sized((tmp_path / "a.log").read_bytes())
    assert event["messages"][0]["text"] == "cut ?"
    assert event["names"] == {"a?": "b"}


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    LogFile.create(tmp_path / "c.log", "r").close()
    with pytest.raises(RecordError, match="cannot create"):
        LogFile.create(tmp_path / "c.log", "r")


async def test_a_person_gets_the_sessions_of_a_killed_server_back(
    category: TemplateRenderer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    folder = run / SESSIONS
    with open_run("serve", insitu.load_config(None, {"run.dir": str(run)})):
        folder.mkdir()
    async with Rig(category, SCRIPT, config=GatewayConfig(log_dir=folder)) as rig:
        await history(rig)
        sampled = rig.session.stats.sampled_tokens
    (rollout,) = recover_run(run)
    assert (rollout.id, rollout.reward, len(rollout.turns)) == ("r/0", None, 5)
    assert rollout.trajectory.ledger.captured == sampled
    (stored,) = insitu.open_run(run).rollouts(phase="serve")
    assert stored.trajectory.ledger == rollout.trajectory.ledger
    assert stored.tokens().mask.sum() == stored.trajectory.ledger.trained
    assert recover_run(run) == recover_run(tmp_path / "nowhere") == []
