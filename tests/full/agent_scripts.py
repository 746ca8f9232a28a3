"""Scripts of the written model, one per agent: it reads, mends or spoils, checks, asks two sub-agents, reads
long output until the agent compacts its context, and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from written_model import Reply

from insitu_lab.conformance.agent_tools import AGENT_TOOLS, Call
from insitu_lab.conformance.scripted_policy import RIGHT, WRONG

TASK, LOOK, EDIT, CHECK, ASK = " Lisbon", " Nairobi", " Quebec", " Havana", " Warsaw"
PARTS, SEEN, AGAIN, SUMMARY = (" Kyoto", " Zurich"), " Dublin", " Athens", " Oslo"
LONG = (" Helsinki", " Lima", " Prague", " Vienna", " Cairo", " Berlin")
MARKERS = (TASK, LOOK, EDIT, CHECK, ASK, *PARTS, SEEN, AGAIN, SUMMARY, *LONG)
"""Words that tell the model how far it is; each is one token."""
PROMPT = f"The function area in app.py is wrong: check.py says how. Mend it, then run check.py.{TASK}"
SPOILT = "return w - h"
RUN_CHECK = "python3 check.py > ran.txt; cat ran.txt"
TOOL_END = "</tool_response>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """How one agent's session goes."""

    context_tokens: int
    """Small, so that the agent has to compact."""
    summary_behind: Sequence[str]
    """Ends of its requests for a summary."""
    lines: int = 300
    """Of each long output."""
    long: int = 2
    """How many of these there are; by then the agent has compacted its context."""
    namespace: str = ""
    """Before the name of the tool that starts a sub-agent."""


def said(text: str, *calls: Call) -> str:
    """Return a reply with calls in the model's format."""
    for name, arguments in calls:
        call = json.dumps({"name": name, "arguments": dict(arguments)})
        text += f"\n<tool_call>\n{call}\n</tool_call>"
    return text


def replies(agent: str) -> list[Reply]:
    """Return what is said, by the latest marker in the context."""
    tools, session = AGENT_TOOLS[agent], SESSIONS[agent]
    found = [
        Reply(after=[TASK], text=said(f"{LOOK} (I|We) look first.", tools.read("app.py"))),
        *(
            Reply(after=[LOOK], text=said(f"{EDIT} (Now|Next) the edit.", tools.edit("app.py", WRONG, new)))
            for new in (RIGHT, SPOILT)
        ),
        Reply(after=[EDIT], text=said(f"{CHECK} (Is|Was) it right?", tools.run(RUN_CHECK))),
    ]
    before, behind = CHECK, ""
    if tools.spawn is not None:
        asked = [tools.spawn(f"Read notes.txt and say what it says.{part}") for part in PARTS]
        asked = [(session.namespace + name, arguments) for name, arguments in asked]
        answer = "(A|The) rectangle is width times height."
        found += [
            Reply(after=[CHECK], text=said(f"{ASK} (Two|Both) helpers.", *asked)),
            Reply(
                after=PARTS,
                text=said(f"{SEEN} (Let|Allow) me see.", tools.read("notes.txt")),
                not_behind=TOOL_END,
            ),
            Reply(after=[SEEN], text=said("", tools.answer(answer)) if tools.answer else answer),
        ]
        before, behind = PARTS[-1], TOOL_END
    if tools.repeats:  # until the agent warns of a loop
        again = said(f"{AGAIN} (Once|One) more.", tools.run("echo again"))
        found += [Reply(after=[before, AGAIN], text=again, behind=TOOL_END)]
        before, behind = AGAIN, ""
    for place, marker in enumerate(LONG[: session.long]):
        # agents take a repeated call for a loop
        code = f"for n in range({session.lines + place}): print(n, 'a line of output')"
        text = said(f"{marker} (More|Much) to read.", tools.run(f'python3 -c "{code}"'))
        hidden = TOOL_END if before == AGAIN else ""
        found.append(Reply(after=[before], text=text, behind=behind, not_behind=hidden))
        before, behind = marker, ""
    summary = tools.summary.format(f"Done so far:{SUMMARY}. (The|That) function is mended and checked.")
    found += [
        Reply(after=[*LONG[: session.long], SUMMARY], text=summary, behind=text, urgent=True)
        for text in session.summary_behind
    ]
    return [*found, Reply(after=[before, SUMMARY], text="(The|This) task is done.")]


SESSIONS: Mapping[str, Session] = {
    "claude_code": Session(context_tokens=28_672, summary_behind=[" and you will fail the task."]),
    "codex": Session(
        context_tokens=16_384, summary_behind=[" continue the work.\n"], namespace="multi_agent_v1__"
    ),
    "opencode": Session(context_tokens=14_336, long=3, summary_behind=[" or that context was compacted."]),
    "qwen_code": Session(context_tokens=26_624, summary_behind=[" produce the <state_snapshot> XML."]),
    "gemini_cli": Session(
        context_tokens=24_576,
        # The last output passes the limit whatever was sampled: a failed check is some 50 tokens longer.
        lines=285,
        long=5,
        summary_behind=[" generate the updated <state_snapshot>.", " evaluate the <state_snapshot>."],
    ),
}
