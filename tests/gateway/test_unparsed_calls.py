"""Calls that do not parse, or of tools that were not offered: counted, labelled, stored, never the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gateway_rig import ASK, TOOLS, Rig, call

from insitu.attempt import AttemptSpec
from insitu.chat.template import TemplateRenderer
from insitu.config import load_config
from insitu.storage.queries import RunReader
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.types import IntArray, Message, Rollout, Task, Turn, arm_of
from insitu_train.unparsed import UnparsedAlarm, unparsed_counts
from tests.fakes.attempts import fake_rollout

GOOD = Message(role="assistant", text="", tool_calls=(call("read", '{"path": "a"}'),))
UNKNOWN = Message(role="assistant", text="", tool_calls=(call("search_web", "{}"),))
INSIDE = '{"name": "read", "arguments": {"path": "a"}}'
ROLLOUTS, CALLS = 8, 5
NOTHING = np.empty(0, dtype=np.int32)


def marked(renderer: TemplateRenderer, *parts: str) -> IntArray:
    """Sampled ids in which the markers of a call are control tokens, then the end token."""
    control = renderer.codec.control
    ids = [[control[part]] if part in control else renderer.codec.encode(part) for part in parts]
    return np.concatenate([*ids, renderer.end_ids[:1]]).astype(np.int32)


def unclosed(renderer: TemplateRenderer) -> IntArray:
    return marked(renderer, "<tool_call>", INSIDE)


async def labels_of(
    renderer: TemplateRenderer, script: Sequence[Message | IntArray], **body: object
) -> Rollout:
    """One session in which the agent goes on whatever it gets, as a rollout."""
    async with Rig(renderer, script) as rig:
        messages = list(ASK)
        for _ in script:
            status, reply = await rig.post({"messages": messages, "tools": TOOLS, **body})
            assert status == 200
            echo = reply["choices"][0]["message"]
            messages.append(echo)
            calls = echo.get("tool_calls") or ()
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in calls]
            messages += [] if calls else [{"role": "user", "content": "That was no call."}]
        trajectory, stats = await rig.sealed(), rig.session.stats
    made = fake_rollout(AttemptSpec(rollout_id="r/0", task=Task(id="t", prompt="", files={}), seed=0), 1.0)
    rollout = replace(made, trajectory=trajectory)
    counts = unparsed_counts([rollout])
    assert (stats.malformed, stats.unknown_tools) == (counts["malformed_calls"], counts["unknown_tools"])
    return rollout


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("<tool_call>", INSIDE), {"malformed"}),
        (("<tool_call>", '{"name": "read", "name": "read", "arguments": {}}', "</tool_call>"), {"malformed"}),
        (("<tool_call>", "read(a)", "</tool_call>"), {"malformed"}),
        (("A call begins with <tool", "_call>. ", "<tool_call>", INSIDE, "</tool_call>"), set[str]()),
        (("<tool_call>", '{"name": "Read", "arguments": {}}', "</tool_call>"), {"unknown_tool"}),
        (
            ("<tool_call>", '{"name": "Read", "arguments": {}}', "</tool_call>", "<tool_call>", "{"),
            {"malformed", "unknown_tool"},
        ),
        (("I am done.",), set[str]()),
    ],
)
async def test_a_reply_says_what_is_wrong_with_its_calls(
    renderer: TemplateRenderer, parts: tuple[str, ...], expected: set[str]
) -> None:
    rollout = await labels_of(renderer, [marked(renderer, *parts)])
    (turn,) = rollout.turns
    assert turn.labels == expected


async def test_a_call_without_offered_tools_is_one_of_an_unknown_tool(renderer: TemplateRenderer) -> None:
    rollout = await labels_of(renderer, [GOOD], tools=[])
    assert rollout.turns[0].labels == {"unknown_tool"}


async def test_metadata_of_a_client_is_no_label(renderer: TemplateRenderer) -> None:
    spelled = '["label","malformed"]'
    rollout = await labels_of(renderer, [GOOD], metadata={"label": "malformed", "x": spelled}, user=spelled)
    assert rollout.turns[0].labels == frozenset()
    assert rollout.turns[0].hints


async def step_of(renderer: TemplateRenderer, share: float, step: int, store: Store) -> list[Rollout]:
    """Rollouts of a policy of whose calls this share is bad; half of these are of unknown tools."""
    made = []
    bad = round(share * ROLLOUTS * CALLS)
    for slot in range(ROLLOUTS):
        numbers = range(slot * CALLS, slot * CALLS + CALLS)
        script = [GOOD if n >= bad else UNKNOWN if n % 2 else unclosed(renderer) for n in numbers]
        name = f"train/{step:05d}/{slot // 4:03d}/{slot % 4:02d}"
        rollout = replace(await labels_of(renderer, script), id=name, part="bugs")
        segments = [replace(s, rollout_id=name) for s in rollout.trajectory.segments]
        rollout = replace(rollout, trajectory=replace(rollout.trajectory, segments=tuple(segments)))
        store.put_rollout("train", step, slot // 4, slot % 4, rollout)
        made.append(store.rollout(name))
    return made


@pytest.mark.slow
async def test_a_policy_that_drifts_is_named_and_its_rollouts_are_found(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    config = load_config(None, [f"run.dir={tmp_path / 'r'}"])
    metrics: list[dict[str, object]] = []
    with RunDir.create(config) as run, run.store() as store:
        said_aloud = []
        for step, share in enumerate((0.0, 0.0, 0.2, 0.5, 0.5), 1):
            rollouts = await step_of(renderer, share, step, store)
            assert [len(rollout.turns) for rollout in rollouts] == [CALLS] * ROLLOUTS, "they went on"
            flags, lines = UnparsedAlarm(0.1, lambda part: "pi", metrics).look(rollouts)
            metrics.append({**unparsed_counts(rollouts), **flags})
            said_aloud.append("".join(lines))
    assert [found["unparsed_share"] for found in metrics] == [0.0, 0.0, 0.2, 0.5, 0.5]
    assert [found["malformed_calls"] for found in metrics] == [0, 0, 4, 10, 10]
    assert [bool(line) for line in said_aloud] == [False, False, True, True, False]
    assert said_aloud[3].startswith(
        "50% of the replies have a malformed call or one of an unknown tool, 20% "
    )
    assert "10 malformed, 10 unknown; most of task set bugs, agent pi (50%), there of call " in said_aloud[3]
    with RunReader(tmp_path / "r") as reader:
        with_any = reader.count({"unparsed": 1})
        assert with_any == reader.count({}) - reader.count({"unparsed": 0}) > 0
        assert 0 < reader.count({"malformed": 1}) <= with_any
        assert (
            reader.count({"unknown_tool": 1, "step": 1}) == 0 < reader.count({"unknown_tool": 1, "step": 4})
        )


def test_nothing_captured_is_not_zero() -> None:
    nothing = {"malformed_calls": None, "unknown_tools": None, "unparsed_share": None}
    assert unparsed_counts([]) == nothing
    assert UnparsedAlarm(0.1, str, [nothing, {}]).look([]) == ({"unparsed_alarm": False}, [])


def of_share(share: float, part: str = "", replies: int = 200) -> Rollout:
    made = fake_rollout(AttemptSpec(rollout_id="r", task=Task(id="t", prompt="", files={}), seed=0), 1.0)
    turn = Turn(
        index=0,
        parent=-1,
        context_ids=NOTHING,
        ids=NOTHING,
        logprobs=None,
        finish="stop",
        version_runs=(),
    )
    bad = replace(turn, hints=(("label", "malformed"),))
    turns = tuple(bad if n < round(replies * share) else turn for n in range(replies))
    return replace(made, part=part, trajectory=replace(made.trajectory, turns=turns))


def test_a_slow_rise_is_an_alarm_and_noise_is_none() -> None:
    def shares(values: Sequence[float], at: float = 0.1) -> list[int]:
        alarm = UnparsedAlarm(at, str, [])
        return [n for n, share in enumerate(values) if alarm.look([of_share(share)])[1]]

    rising = [0.18 + 0.002 * step for step in range(190)]
    assert len(shares(rising)) == 3, "never by 0.1 in 8 steps"
    assert shares(rising, 0.0) == []
    assert shares([0.1, 0.15, 0.08, 0.14, 0.05] * 20) == []
    assert shares([0.02] * 9 + [0.3] * 20) == [9], "once"


def test_a_rise_in_one_part_is_an_alarm_though_it_is_small_in_the_whole() -> None:
    metrics: list[dict[str, object]] = []
    said_aloud = []
    for share in (0.02, 0.04, 0.06, 0.5, 0.5):
        parts = [of_share(0.02, "bugs@+a", 900), of_share(share, "bugs@+b", 100)]
        flags, lines = UnparsedAlarm(0.1, lambda part: arm_of(part).agent, metrics).look(parts)
        shares = {f"bugs+{agent}/{k}": v for agent, one in zip("ab", parts, strict=True)
                  for k, v in unparsed_counts([one]).items()}  # fmt: skip
        metrics.append({**unparsed_counts(parts), **shares, **flags})
        said_aloud.append(lines)
    assert [len(lines) for lines in said_aloud] == [0, 0, 0, 1, 0]
    assert said_aloud[3][0].startswith("50% of the replies of bugs+b have a malformed call")
    assert "2% before" in said_aloud[3][0]
    names = ("unparsed_alarm", "bugs+a/unparsed_alarm", "bugs+b/unparsed_alarm")
    assert [metrics[3][name] for name in names] == [False, False, True]
