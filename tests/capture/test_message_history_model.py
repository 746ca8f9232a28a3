"""Random sessions against a reference model: whatever an agent does, the account holds after every step.

The model finds the turn to continue by comparing whole conversations with every earlier call, and decides
the fate of each turn from what the driver did; it knows nothing of trees.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from capture_lab import (
    SHELL,
    Call,
    Lab,
    answer,
    call,
    check_exported,
    check_views,
    respelled,
    says,
    system,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.capture.drift_diagnosis import CAUSES
from insitu.capture.turn_refs import sign
from insitu.types import Message, ToolSpec, Trajectory

# One history costs as much as ten bodies.
HISTORIES = int(os.environ.get("INSITU_FUZZ", "1500")) // 10
KEY, FOREIGN = b"k" * 32, b"f" * 32
SEARCH = replace(SHELL, name="search")

SYSTEMS = ("main", "sub", "other")
TEXTS = ("OK", "OK", "look", "")
ARGUMENTS = ('{"b": 1, "a": "caf\\u00e9"}', '{"cmd":"ls"}', '{"broken": ')


def meaning(messages: tuple[Message, ...]) -> list[object]:
    """A conversation as plain values: no ids, no spelling, no reasoning."""
    values: list[object] = []
    for at, message in enumerate(messages):
        calls = []
        for made in message.tool_calls:
            try:
                calls.append((made.name, json.loads(made.arguments)))
            except ValueError:
                calls.append((made.name, made.arguments))
        values.append((message.role, message.text, calls, _answered(messages[:at], message)))
    return values


def _answered(before: tuple[Message, ...], message: Message) -> tuple[int, int] | None:
    """(position of the assistant message, ordinal of the call) that a tool message answers."""
    for at in range(len(before) - 1, -1, -1):
        ids = [made.id for made in before[at].tool_calls]
        if message.tool_call_id and message.tool_call_id in ids:
            return at, len(ids) - 1 - ids[::-1].index(message.tool_call_id)
    return None


@dataclass
class Line:
    """One conversation that the agent keeps."""

    system: str
    tools: tuple[ToolSpec, ...]
    history: list[Message]

    @property
    def messages(self) -> list[Message]:
        return [system(self.system), *self.history]


@dataclass
class World:
    style: str
    keeps_reasoning: bool
    keeps_pointers: bool = False
    splices: bool = False
    lab: Lab = field(init=False)
    lines: list[Line] = field(default_factory=lambda: [Line("main", (SHELL,), [user("fix it")])])
    roots: dict[int, tuple[str, tuple[ToolSpec, ...]]] = field(default_factory=dict)
    """Turn -> (system, tools offered)."""
    signed: dict[str, int] = field(default_factory=dict)
    """Pointer that was given out -> node."""
    wanted: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    """By context node."""

    def __post_init__(self) -> None:
        self.lab = Lab(pointer_key=KEY, splices=self.splices)

    # ------------------------------------------------------------ the model

    def expected_base(self, line: Line) -> Call | None:
        """The call whose whole conversation and reply this request starts with; the longest."""
        history = tuple(line.history)
        values = meaning(history)

        def hits(made: Call | None) -> tuple[int, int]:
            """Turns on its path named by pointer, by call id."""
            if made is None:
                return 0, 0
            echo = history[len(made.messages)]
            said = {c.id for c in echo.tool_calls}
            pointed, minted = hits(made.base)
            named = made.node in {self.signed.get(text) for text in echo.pointers}
            return pointed + named, minted + bool(said & {c.id for c in made.reply.tool_calls})

        fitting = [
            made
            for made in self.lab.calls
            if self.roots[made.turn] == (line.system, line.tools)
            and values[: len(made.messages) + 1] == meaning((*made.messages, made.reply))
        ]
        return max(fitting, key=lambda m: (len(m.messages), *hits(m), m.delivered, m.node), default=None)

    def expected_reasons(self) -> dict[int, str]:
        calls = self.lab.calls
        acting = any(tools for turn, (_, tools) in self.roots.items() if any(c.turn == turn for c in calls))
        tops: dict[int, list[Call]] = {}
        for made in calls:
            first = made
            while first.base is not None:
                first = first.base
            tops.setdefault(first.context, []).append(made)
        reasons: dict[int, str] = {}
        for context in {made.context for made in calls}:
            reasons.update(self._sibling_reasons([made for made in calls if made.context == context]))
        for tree in tops.values():
            asked = tree[0].plan
            goes_on = asked.replace[-1].role != "user" and asked.echoes
            idle = acting and not self.roots[tree[0].turn][1] and not any(made.continued for made in tree)
            idle = idle and not goes_on
            for made in tree:
                if not reasons[made.turn]:
                    reasons[made.turn] = "auxiliary" if idle else "demonstrated" * made.demonstrated
        return reasons

    def _sibling_reasons(self, siblings: list[Call]) -> dict[int, str]:
        reasons = {}
        for made in siblings:
            heard = made.delivered or made.continued or made.echoed
            reasons[made.turn] = "synthetic" * made.synthetic or made.excluded or "undelivered" * (not heard)
        left = [made for made in siblings if not reasons[made.turn]]
        left.sort(key=lambda made: (made.continued or made.echoed, made.delivered), reverse=True)
        wanted = self.wanted[siblings[0].context]
        winners = [made for at, made in enumerate(left) if at < wanted or made.continued or made.echoed]
        reasons.update((made.turn, "retry_sibling") for made in left if made not in winners)
        return reasons

    def check(self) -> None:
        trajectory: Trajectory = copy.deepcopy(self.lab.forest).trajectory()
        check_exported(self.lab, trajectory)
        check_views(trajectory)
        assert {turn.index: turn.excluded for turn in trajectory.turns} == self.expected_reasons()
        assert {n.cause for n in trajectory.drifts if n.kind == "edited"} <= CAUSES
        counted = sum(len(made.ids) for made in self.lab.calls)
        assert all(0 <= n.tokens <= counted for n in trajectory.drifts)
        labels = [segment.label for segment in trajectory.segments]
        assert labels.count("final") <= 1
        assert set(labels) <= {"final", "append", "wipe", "subagent"}
        owner = {token: made.turn for made in self.lab.calls for token in made.ids}
        ends = [owner[int(segment.ids[-1])] for segment in trajectory.segments]
        assert ends == sorted(ends)
        shown = sum(
            int(segment.mask.sum()) for segment in trajectory.segments if segment.kind == "demonstrated"
        )
        assert shown == trajectory.ledger.excluded.get("demonstrated", 0)

    # ------------------------------------------------------------ what agents do

    def ask(self, line: Line, pick: int = 0) -> Call:
        if line.history[-1].role == "assistant":
            line.history += self._results(line.history[-1], pick)
        expected = self.expected_base(line)
        made = self.lab.ask(line.messages, line.tools)
        assert made.base is expected
        if made.plan.drift.cause == "append":
            assert all(message.role != "assistant" for message in made.plan.replace)
        self.roots[made.turn] = (line.system, line.tools)
        self._hear(line.history[len(expected.messages) + 1 if expected is not None else 0 :])
        if self.lost.get(made.context, 0):
            self.lost[made.context] -= 1
        else:
            self.wanted[made.context] = self.wanted.get(made.context, 0) + 1
        return made

    def _hear(self, rest: list[Message]) -> None:
        """Turns that messages to be rendered again name."""
        said = {c.id for message in rest for c in message.tool_calls}
        pointed = {self.signed.get(text) for message in rest for text in message.pointers}
        for made in self.lab.calls:
            ids = {c.id for c in made.reply.tool_calls}
            made.echoed = made.echoed or bool(ids & said) or made.node in pointed

    def _results(self, said: Message, pick: int) -> list[Message]:
        results = [answer(made.id, f"r{pick % 2}") for made in said.tool_calls]
        if pick % 3 == 1:
            results.reverse()
        if pick % 5 == 2:
            results = results[1:]
        return results or [user(("go", "why?", "")[pick % 3])]

    def reply(self, turn: int, pick: int) -> Message:
        calls = [call(f"c{turn}_{i}", ARGUMENTS[(pick + i) % 3]) for i in range(pick % 3)]
        return says(TEXTS[pick % 4], *calls, reasoning="hm" if pick % 2 else "")

    def echo(self, line: Line, made: Call) -> None:
        said = respelled(made.reply, self.style)
        pointer = self.lab.forest.pointer(made.node)
        self.signed[pointer] = made.node
        line.history.append(
            replace(
                said,
                reasoning=said.reasoning if self.keeps_reasoning else "",
                pointers=(pointer,) if self.keeps_pointers else (),
            )
        )

    def abort(self, made: Call) -> None:
        self.lab.abort(made)
        self.lost[made.context] = self.lost.get(made.context, 0) + 1

    def finish(self, line: Line, made: Call, pick: int, **how: object) -> None:
        self.lab.sample(made, self.reply(made.turn, pick), **how)  # type: ignore[arg-type]
        self.lab.deliver(made)
        self.echo(line, made)

    def do_next(self, line: Line, pick: int) -> None:
        self.finish(line, self.ask(line, pick), pick)

    def do_truncated(self, line: Line, pick: int) -> None:
        self.finish(line, self.ask(line, pick), pick, finish="length", count=1 + pick)

    def do_synthetic(self, line: Line, pick: int) -> None:
        self.finish(line, self.ask(line, pick), pick, synthetic=True)

    def do_demonstrated(self, line: Line, pick: int) -> None:
        self.finish(line, self.ask(line, pick), pick, demonstrated=True)

    def do_weights(self, line: Line, pick: int) -> None:
        self.finish(line, self.ask(line, pick), pick, count=4, bump_at=1 + pick % 3)

    def do_excluded(self, line: Line, pick: int) -> None:
        made = self.ask(line, pick)
        self.finish(line, made, pick)
        made.excluded = ("stale", "edited")[pick % 2]
        self.lab.forest.exclude(made.node, made.excluded)

    def do_lost_reply(self, line: Line, pick: int) -> None:
        made = self.ask(line, pick)
        self.abort(self.lab.sample(made, self.reply(made.turn, pick)))
        if pick % 3 == 0:  # the client had it all the same
            self.echo(line, made)

    def do_replay(self, line: Line, pick: int) -> None:
        made = self.ask(line, pick)
        self.abort(self.lab.sample(made, self.reply(made.turn, pick)))
        self.lab.deliver(made)
        self.lost[made.context] -= 1
        self.echo(line, made)

    def do_no_generation(self, line: Line, pick: int) -> None:
        made = self.ask(line, pick)
        if pick % 2:
            self.lab.sample(made, says(), count=0, finish="abort")
        self.abort(made)

    def do_unmarked(self, line: Line, pick: int) -> None:
        made = self.ask(line, pick)
        self.lab.sample(made, self.reply(made.turn, pick))

    def do_repeat(self, line: Line, pick: int) -> None:
        made = self.ask(line, pick)
        self.lab.deliver(self.lab.sample(made, self.reply(made.turn, pick)))

    def do_twins(self, line: Line, pick: int) -> None:
        twins = [self.ask(line, pick) for _ in range(2 + pick % 2)]
        for made in reversed(twins) if pick % 2 else twins:
            self.lab.deliver(self.lab.sample(made, self.reply(made.turn, pick % 4)))
        if pick:
            self.echo(line, twins[pick % len(twins)])

    def do_interleaved(self, line: Line, pick: int) -> None:
        other = self.lines[pick % len(self.lines)]
        first = self.ask(line, pick)
        second = self.ask(other, pick) if other is not line else None
        if second is not None:
            self.finish(other, second, pick)
        self.finish(line, first, pick + 1)

    def do_edit(self, line: Line, pick: int) -> None:
        spots = [i for i, m in enumerate(line.history) if m.role == "assistant"]
        if not spots:
            return
        at = spots[pick % len(spots)]
        said = line.history[at]
        edits: tuple[Callable[[], list[Message]], ...] = (
            lambda: [replace(said, text=said.text + "!")],
            lambda: [replace(said, tool_calls=tuple(replace(c, arguments="[0]") for c in said.tool_calls))],
            lambda: [replace(said, tool_calls=tuple(replace(c, name="bash") for c in said.tool_calls))],
            lambda: [user("your reply had no call")],
            lambda: [says("nobody said this")],
            lambda: [said, user("by the way")],
        )
        line.history[at : at + 1] = edits[pick % len(edits)]()

    def do_point_elsewhere(self, line: Line, pick: int) -> None:
        """Forged, foreign and stale pointers, and valid ones of other turns, on any echo."""
        spots = [i for i, m in enumerate(line.history) if m.role == "assistant"]
        if not spots:
            return
        at = spots[pick % len(spots)]
        others = list(self.signed) or [""]
        other = others[pick % len(others)]
        kinds = ("", "x", other, other[:-1] + "g", sign(FOREIGN, pick), sign(KEY, 10**6 + pick), sign(KEY, 0))
        line.history[at] = replace(line.history[at], pointers=(kinds[pick % len(kinds)], "junk"))

    def do_other_tools(self, line: Line, pick: int) -> None:
        line.tools = ((SHELL,), (SHELL, SEARCH), (SEARCH, SHELL), ())[pick % 4]

    def do_clear_result(self, line: Line, pick: int) -> None:
        spots = [i for i, m in enumerate(line.history) if m.role in ("tool", "user")]
        at = spots[pick % len(spots)]
        line.history[at] = replace(line.history[at], text="[cleared]")

    def do_rewind(self, line: Line, pick: int) -> None:
        del line.history[1 + pick % len(line.history) :]

    def do_branch(self, line: Line, pick: int) -> None:
        self.lines.append(replace(line, history=line.history[: 1 + pick % len(line.history)]))

    def do_compact(self, line: Line, pick: int) -> None:
        if pick % 3 == 0:
            line.system = SYSTEMS[pick % 2]
        line.history = [user(f"so far: {pick}")]
        if pick % 2:
            line.history += [says("it was long"), user("continue")]

    def do_sub_agent(self, line: Line, pick: int) -> None:
        twin = pick % 2
        prompt = line.history[0] if twin else user("look")
        self.lines.append(Line(line.system if twin else "sub", (SHELL,), [prompt]))

    def do_title(self, line: Line, pick: int) -> None:
        aside = Line("title", () if pick % 4 else (SHELL,), [line.history[0]])
        self.finish(aside, self.ask(aside), 0)

    def do_new_ids(self, line: Line, pick: int) -> None:
        def renamed(call_id: str) -> str:
            return f"{call_id}~{pick}" if call_id else ""

        line.history = [
            replace(
                message,
                tool_calls=tuple(replace(c, id=renamed(c.id)) for c in message.tool_calls),
                tool_call_id=renamed(message.tool_call_id),
            )
            for message in line.history
        ]


STEPS = [name.removeprefix("do_") for name in dir(World) if name.startswith("do_")]


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.case(28, 36, 60)
@settings(max_examples=HISTORIES)
@given(
    style=st.sampled_from(["sorted", "spaced", "ascii"]),
    keeps=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    steps=st.lists(
        st.tuples(st.sampled_from(["next", "next", *STEPS]), st.integers(0, 3), st.integers(0, 11)),
        min_size=4,
        max_size=16,
    ),
)
def test_any_history_keeps_every_invariant(
    style: str, keeps: tuple[bool, bool, bool], steps: list[tuple[str, int, int]]
) -> None:
    world = World(style=style, keeps_reasoning=keeps[0], keeps_pointers=keeps[1], splices=keeps[2])
    for name, which, pick in steps:
        act: Callable[[Line, int], None] = {n: getattr(world, f"do_{n}") for n in STEPS}[name]
        act(world.lines[which % len(world.lines)], pick)
        world.check()


def test_the_steps_cover_what_agents_do() -> None:
    assert len(STEPS) >= 20
