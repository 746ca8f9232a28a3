"""What real agents make of a reply, as recorded: echoes, compaction and sub-agents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from recordings_lab import FOLDER, Echo, Recording, echoes, read, requests, said

from insitu.types import ModelRequest, ToolCall
from insitu_lab.conformance.anonymise import masked

AGENTS = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.jsonl.xz"))


@pytest.fixture(params=AGENTS)
def recording(request: pytest.FixtureRequest) -> Recording:
    return of(request.param)


def of(agent: str) -> Recording:
    return read(FOLDER / f"{agent}.jsonl.xz")


def arguments_way(said: ToolCall, got: ToolCall) -> str:
    """What an agent did to the arguments of one call."""
    if said.arguments == got.arguments:
        return "verbatim"
    before, after = json.loads(said.arguments), json.loads(got.arguments)
    if before != after:
        added = {key for key in after if key not in before}
        return "default added" if before == {k: v for k, v in after.items() if k not in added} else "changed"
    return "spelled anew" if list(before) == list(after) else "reordered"


def reasoning_way(echo: Echo) -> str:
    if not echo.said.reasoning:
        return "none"
    if echo.said.reasoning == echo.got.reasoning:
        return "verbatim"
    return "changed" if echo.got.reasoning else "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How an agent hands replies back."""

    arguments: frozenset[str]
    reasoning: str = "verbatim"
    pointers: str = "never"
    """Echoes that carry the gateway's pointer: never, always, or those with reasoning."""
    edits: Mapping[str, int] | None = None
    """Causes of edited branches, with how often."""


HABITS = {
    "claude_code": Habits(
        arguments=frozenset({"spelled anew", "reordered", "default added"}),
        pointers="reasoning",
        # Its summary is asked without the last exchange, which stays behind the summary as it was.
        edits={"missing": 1},
    ),
    "codex": Habits(arguments=frozenset({"verbatim"}), pointers="reasoning"),
    "gemini_cli": Habits(
        # An object on the wire, so there is no spelling to keep; the edit is its interruption of a loop.
        arguments=frozenset({"verbatim"}),
        reasoning="dropped",
        pointers="always",
        edits={"text": 1},
    ),
    # A reply without a call is left out of what follows.
    "mini_swe": Habits(arguments=frozenset({"verbatim"}), edits={"missing": 1}),
    "opencode": Habits(arguments=frozenset({"spelled anew"})),
    "pi": Habits(arguments=frozenset({"spelled anew"})),
    "qwen_code": Habits(arguments=frozenset({"spelled anew"})),
}


@pytest.mark.case(18, 21, 22)
def test_echoes_are_as_known_and_only_named_ones_are_edits(recording: Recording) -> None:
    habits, seen = HABITS[recording.agent], list(echoes(recording))
    assert len(seen) >= 5
    pairs = [pair for echo in seen for pair in zip(echo.said.tool_calls, echo.got.tool_calls, strict=True)]
    assert {arguments_way(*pair) for pair in pairs} == habits.arguments
    assert {reasoning_way(echo) for echo in seen} - {"none"} == {habits.reasoning}
    assert all(echo.said.text == echo.got.text for echo in seen)
    carrying = [bool(echo.got.pointers) for echo in seen]
    reported = {"never": False, "always": True}
    assert carrying == [reported.get(habits.pointers, bool(echo.said.reasoning)) for echo in seen]
    edits = [cause for kind, cause, *_ in recording.books["drifts"] if kind == "edited"]
    assert {cause: edits.count(cause) for cause in edits} == (habits.edits or {})


@pytest.mark.case(18)
@pytest.mark.parametrize("agent", sorted(set(AGENTS) - {"codex", "mini_swe"}))
def test_escapes_are_written_out_by_all_who_read_the_arguments(agent: str) -> None:
    echo = next(e for e in echoes(of(agent)) if "caf" in e.said.tool_calls[-1].arguments)
    assert "café" in echo.got.tool_calls[-1].arguments


def test_ids_of_calls_come_back_as_they_were_minted(recording: Recording) -> None:
    """But for the summaries of one agent, which puts the tool's name before them."""
    minted = {call.id for each in recording.calls for call in said(each).tool_calls}
    foreign = [
        (len(request.tools), call.id)
        for request in requests(recording)
        for message in request.messages
        for call in message.tool_calls
        if call.id not in minted
    ]
    assert {tools for tools, _ in foreign} == ({0} if recording.agent == "gemini_cli" else set())
    assert {call.rpartition("__")[2] for _, call in foreign} <= minted


@pytest.mark.case(23)
def test_a_reply_that_its_agent_drops_is_kept_and_trained() -> None:
    """mini-swe-agent puts a message of its own in the place of a reply without a call."""
    recording = of("mini_swe")
    replies = [said(call) for call in recording.calls]
    (dropped,) = (turn for turn, reply in enumerate(replies) if not reply.tool_calls)
    after = requests(recording)[dropped + 1]
    assert replies[dropped].text not in [message.text for message in after.messages]
    assert after.messages[-1].role == "user"
    parents = recording.books["parents"]
    assert parents[dropped + 1] == parents[dropped]
    assert ["edited", "missing", dropped + 1, dropped] in recording.books["drifts"]
    assert recording.books["excluded"] == []


@pytest.mark.case(24)
def test_moving_cache_marks_change_no_meaning() -> None:
    """Claude Code marks the newest block in every call; what is parsed has the same beginning."""
    recording = of("claude_code")
    calls, moved = recording.calls, 0
    for turn, parent in enumerate(recording.books["parents"]):
        if parent < 0:
            continue
        before, after = calls[parent], calls[turn]
        count = len(before.body["messages"])
        moved += before.body["messages"] != after.body["messages"][:count]
        old, new = before.wire().request.messages, after.wire().request.messages
        assert new[: len(old)] == old
    assert moved == sum(parent >= 0 for parent in recording.books["parents"])


def summaries(recording: Recording) -> list[int]:
    return [turn for turn, call in enumerate(recording.calls) if "[[summary" in said(call).text]


def assistants(request: ModelRequest) -> int:
    return sum(message.role == "assistant" for message in request.messages)


COMPACTION = {
    # The line itself is asked, with its tools.
    "claude_code": ("on the line", True, True),
    "qwen_code": ("on the line", True, True),
    # The whole history under another root, without tools.
    "codex": ("anew", False, True),
    "gemini_cli": ("anew", False, True),
    # The history as one text.
    "opencode": ("anew", False, False),
    "pi": ("anew", False, False),
}


@pytest.mark.case(33)
@pytest.mark.parametrize("agent", sorted(COMPACTION))
def test_each_agent_compacts_in_its_own_way(agent: str) -> None:
    recording = of(agent)
    parents, labels = recording.books["parents"], recording.books["labels"]
    asked = summaries(recording)
    assert len(asked) == (2 if agent == "gemini_cli" else 1)
    for turn in asked:
        request = requests(recording)[turn]
        where = "on the line" if parents[turn] >= 0 else "anew"
        # Some hand over a call or two as they were: those count as history only from three on.
        assert (where, bool(request.tools), assistants(request) > 2) == COMPACTION[agent]
    after = asked[-1] + 1
    assert parents[after] == -1
    assert len(requests(recording)[after].tools) == len(requests(recording)[0].tools)
    assert labels.count("final") == 1
    assert "wipe" in labels


def trees(recording: Recording) -> list[list[int]]:
    """Turns by root, in order."""
    root: dict[int, int] = {}
    for turn, parent in enumerate(recording.books["parents"]):
        root[turn] = turn if parent < 0 else root[parent]
    return [[turn for turn, top in root.items() if top == one] for one in dict.fromkeys(root.values())]


def sub_agents(recording: Recording) -> dict[str, list[int]]:
    """What a sub-agent answered -> its turns."""
    found = {}
    for tree in trees(recording):
        last = said(recording.calls[tree[-1]])
        reported = last.text + "".join(call.arguments for call in last.tool_calls)
        if "[[part" in reported:
            found[reported[reported.index("[[part") : reported.index("height.") + 7]] = tree
    return found


@pytest.mark.case(29)
@pytest.mark.parametrize("agent", ["claude_code", "codex", "gemini_cli", "opencode", "qwen_code"])
def test_two_sub_agents_run_at_once_under_one_system_prompt(agent: str) -> None:
    recording = of(agent)
    parts = sub_agents(recording)
    assert len(parts) == 2
    one, two = parts.values()
    assert max(one[0], two[0]) < min(one[-1], two[-1])
    first, second = (requests(recording)[turns[0]] for turns in (one, two))
    assert first.tools == second.tools
    assert first.messages != second.messages
    systems = [[m.text for m in request.messages if m.role == "system"] for request in (first, second)]
    assert systems[0] == systems[1] or agent == "codex"
    assert recording.books["labels"].count("subagent") == 2
    meanwhile = [turn for turn in range(one[0], max(one[-1], two[-1])) if turn not in {*one, *two}]
    assert bool(meanwhile) == (agent in ("claude_code", "codex", "qwen_code"))


@pytest.mark.case(30)
@pytest.mark.parametrize(("agent", "role"), [("claude_code", "system"), ("qwen_code", "user")])
def test_answers_of_background_agents_come_later_in_nobodys_place(agent: str, role: str) -> None:
    recording = of(agent)
    for answer, turns in sub_agents(recording).items():
        reported = str(masked({"instructions": answer})["instructions"])
        heard = [
            turn
            for turn, request in enumerate(requests(recording))
            if any(reported in message.text for message in request.messages if message.role == role)
        ]
        assert heard
        assert min(heard) > turns[-1]
        assert not set(heard) & set(turns)
