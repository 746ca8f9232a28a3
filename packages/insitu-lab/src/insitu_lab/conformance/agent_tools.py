"""Tools and argument names of each agent, so that a scripted policy can call them.

Names are those on the wire; where a dialect adds a namespace, the end of the name is compared. For an agent
without an entry the tools are taken from its first request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from insitu.types import WORKDIR

Arguments = Mapping[str, object]
Call = tuple[str, Arguments]
"""(tool, arguments)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTools:
    """One agent's tools. Paths are relative to the work folder."""

    read: Callable[[str], Call]
    edit: Callable[[str, str, str], Call]
    """(path, old text, new text)."""
    run: Callable[[str], Call]
    summarise: str
    """Pattern of a request for a summary, in the last user or system block of a prompt; must not match a
    summary."""
    spawn: Callable[[str], Call] | None = None
    """Prompt of a sub-agent -> call that starts it; None = no sub-agents."""
    wait: Callable[[str], Call] | None = None
    """Results of the spawning calls -> call that waits for the sub-agents, if one is needed."""
    answer: Callable[[str], Call] | None = None
    """Answer of a sub-agent -> call that returns it; None = a text ends the sub-agent."""
    finish: Call | None = None
    """Call that ends the run; None = a text ends it."""
    summary: str = "<analysis>Short.</analysis>\n<summary>{}</summary>"
    """Format of a summary."""
    review: str = ""
    """Pattern of a request to repeat the summary."""
    continues_after_text: bool = False
    """A reply without a call does not end the run."""
    repeats: int = 0
    """Number of identical commands after which the agent inserts a user message."""
    compacts: bool = True
    """The agent compacts its context."""
    window_tokens: int = 48_000
    """Context of the policy: small, so that the agent has to compact. Enlarged by run.py if the agent's own
    prompt nearly fills it."""
    grow_bytes: int = 8_000
    """Output of one command while the context is filled."""
    solves: bool = True
    """Its tools can do the task."""


def _replace(path: str, old: str, new: str) -> str:
    """Return a shell command, for agents without an edit tool."""
    code = f"import pathlib as p; f=p.Path({path!r}); f.write_text(f.read_text().replace({old!r}, {new!r}))"
    return f'python3 -c "{code}"'


def _agent_ids(answers: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", answers)))


SHELL_PARAMETERS = ("command", "cmd", "script", "code", "bash_command")
_FINISH = re.compile(r"finish|submit|complete|done", re.IGNORECASE)
_VALUES: Mapping[str, object] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}


def _arguments(schema: Mapping[str, Any], **given: str) -> dict[str, object]:
    """Return the given arguments, and any value for the other required ones."""
    fields = schema.get("properties", {})
    found: dict[str, object] = {}
    for name in schema.get("required", ()):
        field = fields.get(name, {})
        found[name] = field["enum"][0] if field.get("enum") else _VALUES.get(field.get("type"), "x")
    return found | given


def tools_from_schemas(schemas: Mapping[str, Mapping[str, Any]]) -> AgentTools:
    """Return how to use the tools that an unknown agent offers.

    The task is done with a tool that runs shell commands, if there is one; else any tool is called.
    """
    finish = [name for name in schemas if _FINISH.search(name)]
    tools = replace(OWN_AGENT, finish=(finish[0], _arguments(schemas[finish[0]])) if finish else None)
    for name, schema in schemas.items():
        for parameter in SHELL_PARAMETERS:
            if parameter in schema.get("properties", {}):

                def run(command: str, tool: str = name, key: str = parameter) -> Call:
                    return tool, _arguments(schemas[tool], **{key: command})

                return replace(
                    tools,
                    run=run,
                    read=lambda path: run(f"cat {path}"),
                    edit=lambda path, old, new: run(_replace(path, old, new)),
                    solves=True,
                )
    other = [name for name in schemas if name not in finish]
    call: Call = (other[0], _arguments(schemas[other[0]])) if other else ("", {})
    return replace(tools, run=lambda _: call, read=lambda _: call, edit=lambda *_: call)


OWN_AGENT = AgentTools(
    run=lambda command: ("", {}),
    read=lambda path: ("", {}),
    edit=lambda path, old, new: ("", {}),
    summarise=r"(?!)",
    compacts=False,
    solves=False,
)
"""Of an agent that is not in AGENT_TOOLS, until its first request shows its tools."""
AGENT_TOOLS: Mapping[str, AgentTools] = {
    "claude_code": AgentTools(
        read=lambda path: ("Read", {"file_path": f"{WORKDIR}/{path}"}),
        edit=lambda path, old, new: (
            "Edit",
            {"new_string": new, "old_string": old, "file_path": f"{WORKDIR}/{path}"},
        ),
        run=lambda command: ("Bash", {"description": "Run it", "command": command}),
        spawn=lambda prompt: (
            "Agent",
            {"prompt": prompt, "description": "Look", "subagent_type": "general-purpose"},
        ),
        summarise=r"an <analysis> block followed by a <summary> block",
    ),
    "codex": AgentTools(
        read=lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        edit=lambda path, old, new: ("exec_command", {"cmd": _replace(path, old, new)}),
        run=lambda command: ("exec_command", {"cmd": command}),
        spawn=lambda prompt: ("spawn_agent", {"message": prompt}),
        wait=lambda answers: ("wait_agent", {"targets": _agent_ids(answers)}),
        summarise=r"CONTEXT CHECKPOINT COMPACTION",
    ),
    "opencode": AgentTools(
        read=lambda path: ("read", {"filePath": f"{WORKDIR}/{path}"}),
        edit=lambda path, old, new: (
            "edit",
            {"newString": new, "oldString": old, "filePath": f"{WORKDIR}/{path}"},
        ),
        run=lambda command: ("bash", {"description": "Run it", "command": command}),
        summarise=r"Do not mention the summary process",
        spawn=lambda prompt: ("task", {"prompt": prompt, "description": "Look", "subagent_type": "general"}),
    ),
    "pi": AgentTools(
        read=lambda path: ("read", {"path": path}),
        edit=lambda path, old, new: (
            "edit",
            {"edits": [{"newText": new, "oldText": old}], "path": path},
        ),
        run=lambda command: ("bash", {"command": command}),
        summarise=r"Only summarize information explicitly present above",
    ),
    "qwen_code": AgentTools(
        read=lambda path: ("read_file", {"file_path": f"{WORKDIR}/{path}"}),
        edit=lambda path, old, new: (
            "edit",
            {"new_string": new, "old_string": old, "file_path": f"{WORKDIR}/{path}"},
        ),
        run=lambda command: ("run_shell_command", {"is_background": False, "command": command}),
        spawn=lambda prompt: ("agent", {"prompt": prompt, "description": "Look"}),
        summarise=r"Then, produce the <state_snapshot> XML",
        summary="<analysis>Short.</analysis>\n<state_snapshot>{}</state_snapshot>",
    ),
    "gemini_cli": AgentTools(
        read=lambda path: ("read_file", {"file_path": f"{WORKDIR}/{path}"}),
        edit=lambda path, old, new: (
            "replace",
            {
                "new_string": new,
                "old_string": old,
                "instruction": "Mend it.",
                "file_path": f"{WORKDIR}/{path}",
            },
        ),
        run=lambda command: ("run_shell_command", {"description": "Run it", "command": command}),
        spawn=lambda prompt: ("invoke_agent", {"prompt": prompt, "agent_name": "generalist"}),
        answer=lambda text: ("complete_task", {"result": {"response": text}}),
        # It compacts only at user messages; its warning of a loop is one.
        repeats=5,
        summarise=r"generate the updated <state_snapshot>|evaluate the <state_snapshot>",
        summary="<state_snapshot>{}</state_snapshot>",
        review=r"evaluate the <state_snapshot>",
    ),
    "mini_swe": AgentTools(
        read=lambda path: ("bash", {"command": f"cat {path}"}),
        edit=lambda path, old, new: ("bash", {"command": _replace(path, old, new)}),
        run=lambda command: ("bash", {"command": command}),
        finish=("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
        continues_after_text=True,
        summarise=r"(?!)",
        compacts=False,
    ),
}
