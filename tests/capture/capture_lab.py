"""A toy family, a toy engine and a driver that keeps its own account of what capture must say.

Every sampled token is a number used once, so a test can ask of any exported token where it came from. The
toy engine's logprob and version of a token are functions of that token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from per_request import per_request
from token_tree import tree
from tree_check import check_tree

from insitu.capture.drift import PromptPlan
from insitu.capture.forest import Forest
from insitu.capture.message_history import History, RequestMemory
from insitu.types import (
    Finish,
    Generation,
    IntArray,
    Message,
    ModelRequest,
    Segment,
    ToolCall,
    ToolSpec,
    Trajectory,
)

FINGERPRINT = "toy"
FIRST_SAMPLED = 1_000_000
END, NEWLINE = 2, 3
ROLES = {"system": 10, "user": 11, "assistant": 12, "tool": 13}
Hints = tuple[tuple[str, str], ...]
SHELL = ToolSpec(name="shell", description="run", parameters='{"type":"object"}')


def row(ids: Sequence[int]) -> IntArray:
    return np.array(ids, dtype=np.int32)


def render(message: Message) -> list[int]:
    """Ids of one message, a function of that message alone."""
    said = message.text + "".join(f"<{c.name}{c.arguments}>" for c in message.tool_calls)
    return [ROLES[message.role], *(100 + ord(c) for c in said), END, NEWLINE]


def close(ids: Sequence[int], finish: Finish) -> list[int]:
    """The stop token is sampled unless the model was cut off."""
    return [NEWLINE] if finish == "stop" else [END, NEWLINE]


def logprob_of(token: int) -> float:
    return -((token % 97) + 1) / 64.0


def user(text: str) -> Message:
    return Message(role="user", text=text)


def system(text: str) -> Message:
    return Message(role="system", text=text)


def says(text: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    return Message(role="assistant", text=text, tool_calls=calls, reasoning=reasoning)


def call(call_id: str, arguments: str = "{}", name: str = "shell") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def answer(call_id: str, text: str = "out") -> Message:
    return Message(role="tool", text=text, tool_call_id=call_id)


SYS = system("you fix bugs")
START = [SYS, user("fix it")]


@dataclass(slots=True)
class Call:
    """One model call as the driver saw it."""

    turn: int
    messages: tuple[Message, ...]
    """Without leading system messages."""
    root: str
    plan: PromptPlan
    context: int
    prompt: list[int]
    base: Call | None
    ids: list[int] = field(default_factory=list)
    finish: Finish = "stop"
    reply: Message = field(default_factory=lambda: says())
    node: int = -1
    delivered: int = 0
    synthetic: bool = False
    demonstrated: bool = False
    excluded: str = ""
    continued: bool = False
    echoed: bool = False
    """Named by a later request that had it rendered again."""


class Lab:
    """Drives one forest as the gateway does and remembers every call."""

    def __init__(
        self,
        rollout_id: str = "lab",
        pointer_key: bytes = b"",
        *,
        splices: bool = False,
        train_auxiliary: bool = False,
    ) -> None:
        """`splices`: requests that begin like an earlier one leave out what is known, as the gateway does."""
        self._splices = splices
        self._asked: list[tuple[tuple[Message, ...], RequestMemory]] = []
        self.forest = Forest(rollout_id, pointer_key, train_auxiliary=train_auxiliary)
        self.calls: list[Call] = []
        self.version = 0
        self.versions: dict[int, int] = {}
        """Sampled token -> version."""
        self._token = FIRST_SAMPLED
        self._turn = 0
        self._deliveries = 0

    @staticmethod
    def request(messages: Sequence[Message], tools: Sequence[ToolSpec] = (SHELL,)) -> ModelRequest:
        return ModelRequest(messages=messages, tools=tuple(tools))

    def _spliced(self, messages: tuple[Message, ...]) -> Sequence[Message]:
        if not self._splices:
            return messages
        memory, known, before = RequestMemory(), 0, None
        for earlier, kept in self._asked:
            if known < len(earlier) and messages[: len(earlier)] == earlier:
                known, before = len(earlier), kept
        self._asked.append((messages, memory))
        return History(messages[known:], memory, known=known, before=before, parse=lambda: messages)

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (SHELL,),
        hints: Hints = (),
        *,
        tool_choice_none: bool = False,
        stream: bool = False,
    ) -> Call:
        """Plan, render what is left, extend. `barred`: tools are sent and none may be called."""
        offered = () if tool_choice_none else tools
        asked = self.request(self._spliced(tuple(messages)), offered)
        request = replace(asked, hints=hints, tool_choice_none=tool_choice_none, stream=stream)
        plan = self.forest.plan(request, FINGERPRINT)
        if self._splices:  # what an earlier request left known changes nothing that is found
            whole = self.forest.plan(replace(request, messages=tuple(messages)), FINGERPRINT)
            assert (plan.base, plan.parent, plan.drift) == (whole.base, whole.parent, whole.drift)
            assert plan.replace == whole.replace
        base = next((c for c in self.calls if c.node == plan.base), None)
        lead = [m for m in messages if m.role == "system"] if base is None else []
        lead = lead[: next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))]
        if base is None:
            head = [1, *(i for m in lead for i in render(m)), *(i for t in offered for i in map(ord, t.name))]
        else:
            head = close(base.ids, base.finish)
            base.continued = True
        delta = head + [i for m in plan.replace for i in render(m)] + [ROLES["assistant"]]
        context = self.forest.extend(plan, row(delta))
        lead_count = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        made = Call(
            turn=self._turn,
            messages=tuple(messages[lead_count:]),
            root=plan.root_key,
            plan=plan,
            context=context,
            prompt=self.forest.path_ids(context).tolist(),
            base=base,
        )
        self._turn += 1
        expected = delta if base is None else base.prompt + base.ids + delta
        assert made.prompt == expected
        return made

    def sample(
        self,
        made: Call,
        reply: Message,
        *,
        count: int = 3,
        finish: Finish = "stop",
        synthetic: bool = False,
        demonstrated: bool = False,
        bump_at: int | None = None,
        labels: Sequence[str] = (),
    ) -> Call:
        """Commit a generation of `count` fresh tokens that mean `reply`."""
        made.ids = list(range(self._token, self._token + count))
        self._token += count
        runs = [(0, self.version)]
        if bump_at is not None and 0 < bump_at < count:
            self.version += 1
            runs.append((bump_at, self.version))
        for offset, token in enumerate(made.ids):
            self.versions[token] = max(v for start, v in runs if start <= offset)
        silent = synthetic or demonstrated
        generation = Generation(
            ids=row(made.ids),
            logprobs=None if silent else np.array([logprob_of(t) for t in made.ids], dtype=np.float32),
            finish=finish,
            version_runs=tuple(runs),
        )
        made.reply, made.finish, made.synthetic = reply, finish, synthetic
        made.demonstrated = demonstrated
        made.node = self.forest.commit(
            made.context, generation, reply, turn=made.turn, synthetic=synthetic, labels=labels
        )
        self.calls.append(made)
        return made

    def deliver(self, made: Call) -> Call:
        self.forest.mark_delivered(made.node)
        if not made.delivered:
            self._deliveries += 1
            made.delivered = self._deliveries
        return made

    def abort(self, made: Call) -> Call:
        self.forest.mark_aborted(made.context if made.node < 0 else made.node)
        return made

    def turn(
        self,
        messages: Sequence[Message],
        reply: Message,
        tools: Sequence[ToolSpec] = (SHELL,),
        hints: Hints = (),
        *,
        tool_choice_none: bool = False,
        stream: bool = False,
    ) -> Call:
        """One ordinary delivered call."""
        asked = self.ask(messages, tools, hints, tool_choice_none=tool_choice_none, stream=stream)
        return self.deliver(self.sample(asked, reply))


def long_chain(turns: int) -> tuple[Forest, list[Message]]:
    """A session of one line, with the conversation that continues it; built without asking for each turn."""
    forest = Forest("long")
    messages = [user("go")]
    plan = forest.plan(Lab.request(messages), FINGERPRINT)
    after = forest.plan(Lab.request([user("next")]), FINGERPRINT)
    for turn in range(turns):
        context = forest.extend(plan, row([1, 2, 3]))
        logprobs = np.full(3, -0.5, dtype=np.float32)
        made = Generation(ids=row([7, 8, 9]), logprobs=logprobs, finish="stop", version_runs=((0, 0),))
        node = forest.commit(context, made, says("OK"), turn=turn)
        forest.mark_delivered(node)
        messages += [says("OK"), user("next")]
        plan = replace(after, base=node)
    return forest, messages


def reasons_of(trajectory: Trajectory) -> dict[int, str]:
    return {turn.index: turn.excluded for turn in trajectory.turns}


def trained_turns(lab: Lab, trajectory: Trajectory) -> list[int]:
    """Turns whose tokens are masked in, in row order."""
    owner = {token: made.turn for made in lab.calls for token in made.ids}
    tokens = [int(t) for s in trajectory.segments for t in s.ids[s.mask]]
    return list(dict.fromkeys(owner[t] for t in tokens))


def check_exported(lab: Lab, trajectory: Trajectory) -> None:
    """Every invariant, from the driver's own records only."""
    owner = {token: made for made in lab.calls for token in made.ids}
    seen: set[int] = set()
    for index, segment in enumerate(trajectory.segments):
        assert segment.index == index
        ids = segment.ids.tolist()
        last = owner[ids[-1]]
        assert ids == last.prompt + last.ids, "the row is what the engine received and produced"
        assert segment.mask.any()
        drawn = [t for t, m in zip(ids, segment.mask, strict=True) if m]
        assert seen.isdisjoint(drawn), "masked in once"
        seen.update(drawn)
        for position, (token, masked) in enumerate(zip(ids, segment.mask, strict=True)):
            if not masked:
                assert segment.logprobs[position] == 0
                assert segment.versions[position] == 0
                continue
            made = owner[token]
            assert ids[: position - made.ids.index(token)] == made.prompt
            assert segment.versions[position] == lab.versions[token]
            assert made.demonstrated == (segment.kind == "demonstrated")
            expected = 0.0 if made.demonstrated else np.float32(logprob_of(token))
            assert segment.logprobs[position] == expected
    _check_turns(lab, trajectory)
    _check_ledger(lab, trajectory, owner, seen)


def check_views(trajectory: Trajectory) -> None:
    """Chains, tree and per-request rows train the same tokens, and their sums are the ledger's."""
    wanted = _trained(trajectory.segments)
    rows = per_request(trajectory)
    assert _trained(rows) == wanted
    label_of = {int(token): s.label for s in trajectory.segments for token in s.ids[s.mask]}
    assert all({label_of[int(token)] for token in r.ids[r.mask]} == {r.label} for r in rows)
    kinds = [row.kind for row in rows for _ in range(int(row.mask.sum()))]
    assert kinds.count("sampled") == trajectory.ledger.trained
    assert kinds.count("demonstrated") == trajectory.ledger.excluded.get("demonstrated", 0)
    for mode in ("once", "branch_mean"):
        held = tree(trajectory, mode)
        check_tree(held, trajectory)
        spots = zip(held.ids[held.mask], held.logprobs[held.mask], held.versions[held.mask], strict=True)
        assert sorted((int(i), float(p), int(v)) for i, p, v in spots) == wanted
        assert bool(((held.weights > 0) == held.mask).all())
        assert bool((held.weights <= 1).all())


def _trained(rows: Sequence[Segment]) -> list[tuple[int, float, int]]:
    found: list[tuple[int, float, int]] = []
    for row_ in rows:
        spots = zip(row_.ids[row_.mask], row_.logprobs[row_.mask], row_.versions[row_.mask], strict=True)
        found += [(int(i), float(p), int(v)) for i, p, v in spots]
    return sorted(found)


def _check_turns(lab: Lab, trajectory: Trajectory) -> None:
    full: dict[int, list[int]] = {-1: []}
    records = {made.turn: made for made in lab.calls}
    for turn in trajectory.turns:
        made = records[turn.index]
        prompt = full[turn.parent] + turn.context_ids.tolist()
        assert prompt == made.prompt
        assert turn.ids.tolist() == made.ids
        full[turn.index] = prompt + made.ids
    assert [t.index for t in trajectory.turns] == sorted(records)


def _check_ledger(lab: Lab, trajectory: Trajectory, owner: dict[int, Call], masked: set[int]) -> None:
    ledger = trajectory.ledger
    assert ledger.balanced
    assert ledger.captured == sum(len(made.ids) for made in lab.calls)
    reasons = reasons_of(trajectory)
    trained = {t for t, made in owner.items() if not reasons[made.turn]}
    shown = {t for t in masked if owner[t].demonstrated}
    assert trained == masked - shown
    assert ledger.trained == len(trained)
    sums: dict[str, int] = {}
    for made in lab.calls:
        if reasons[made.turn] and made.ids:
            sums[reasons[made.turn]] = sums.get(reasons[made.turn], 0) + len(made.ids)
    assert dict(ledger.excluded) == sums


# ---------------------------------------------------------------- how agents spell what they echo


def respelled(message: Message, style: str) -> Message:
    """The same meaning as another agent writes it."""
    calls = []
    for made in message.tool_calls:
        try:
            value = json.loads(made.arguments)
        except ValueError:
            calls.append(made)
            continue
        if style == "sorted" and isinstance(value, dict):
            value = dict(sorted(value.items(), reverse=True))
        spaced = style == "spaced"
        text = json.dumps(value, ensure_ascii=style == "ascii", indent=1 if spaced else None)
        calls.append(replace(made, arguments=text))
    return replace(message, tool_calls=tuple(calls))
