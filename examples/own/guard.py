"""A hook on tool calls: it sees each call and each result, and may block, rewrite or remind.

insitu train examples/own/own.toml gateway.tools=examples/own/guard.py:guard
"""

import re

import insitu

FORBIDDEN = re.compile(r"\bgit\s+push\b|\brm\s+-rf\s+/|\bpip\s+install\b")
SECRET = re.compile(r"\bsk-[A-Za-z0-9_-]{8,}")
LONG = 20_000


def guard(event: insitu.ToolEvent) -> dict[str, str] | None:
    """Block some commands, hide keys in results, and say something about long ones."""
    if event.kind == "call":
        found = FORBIDDEN.search(" ".join(map(str, event.arguments.values())))
        return {"block": f"Not allowed here: {found[0]}"} if found else None
    if SECRET.search(event.text):
        return {"result": SECRET.sub("sk-***", event.text)}
    if len(event.text) > LONG:
        return {"remind": f"That were {len(event.text)} characters. Read parts of files."}
    return None
