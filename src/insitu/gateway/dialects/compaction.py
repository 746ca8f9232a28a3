"""Compaction in the Responses format: one opaque item replaces a history; pure.

A client asks by `POST …/responses/compact` or by an item `compaction_trigger` at the end of its input. The
policy is asked for a summary in a user message, below the same system text and tools. The summary is sent in
the item's `encrypted_content`, so nothing is stored; in a later request it is one user message.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence

from insitu.gateway.dialects.base import Envelope, WireError
from insitu.types import Message, Reply

REQUEST = (
    "The context is almost full. Write a summary of this conversation with which you can go on without the "
    "rest: what was asked, what was done and found, which files and commands matter, and what is still to "
    "be done. Answer with the summary as text only and call no tools."
)
"""Request for a summary."""
OPENING = "Summary of the conversation so far, which is not shown any more:\n"
"""Prefix of the summary in later prompts."""
NOTHING = "(no summary was given)"
_MARK = "insitu1."

ASKED = Message(role="user", text=REQUEST)


def _sealed(summary: str) -> str:
    """Return the `encrypted_content` with a summary."""
    return _MARK + base64.urlsafe_b64encode(summary.encode("utf-8", "surrogatepass")).decode()


def opened(content: str, param: str) -> Message:
    """Return the message of a compaction item. Raises WireError for one of another provider."""
    try:
        if not content.startswith(_MARK):
            raise ValueError("another provider's")
        packed = content[len(_MARK) :].encode("ascii")
        summary = base64.b64decode(packed, altchars=b"-_", validate=True).decode("utf-8", "surrogatepass")
    except (ValueError, binascii.Error) as error:
        message = "The encrypted content of this compaction item could not be verified."
        raise WireError("invalid_request", message, f"{param}.encrypted_content") from error
    return Message(role="user", text=OPENING + summary)


def without_trigger(items: Sequence[object]) -> tuple[Sequence[object], bool]:
    """Return the items before a trailing trigger, and whether there is one."""
    last = items[-1]
    asked = isinstance(last, dict) and last.get("type") == "compaction_trigger"
    return (items[:-1] if asked else items), asked


def is_compaction(item: object) -> bool:
    return isinstance(item, dict) and item.get("type") == "compaction"


def in_effect(items: Sequence[object]) -> Sequence[object]:
    """Return the items that the model reads: the newest compaction item stands for those before it.

    Instructions and tools before it stay. So do messages of the user if there is nothing else: then the items
    begin with the window that the route answered with. Clients need not prune.
    """
    newest = max((i for i, item in enumerate(items) if is_compaction(item)), default=0)
    before = items[:newest]
    if all(_role(item) in ("user", *_RULES) for item in before):
        return items
    return [*(item for item in before if _role(item) in _RULES), *items[newest:]]


_RULES = ("system", "developer", "additional_tools")


def _role(item: object) -> str:
    """Return the role of a message, the type of another item."""
    fields = item if isinstance(item, dict) else {}
    kind = fields.get("type") or "message"
    return str(fields.get("role") if kind == "message" else kind)


def kept(items: Sequence[object]) -> Iterator[Mapping[str, object]]:
    """Return the items kept before the compaction item: those of the user."""
    for item in items:
        if isinstance(item, dict) and _role(item) == "user":
            content = item.get("content")
            parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content or []
            yield {"type": "message", "role": "user", "status": "completed", "content": parts}


def item(reply: Reply, envelope: Envelope) -> dict[str, object]:
    """Return the compaction item of a reply."""
    summary = reply.text.strip() or NOTHING
    return {"id": f"cmp_{envelope.id}", "type": "compaction", "encrypted_content": _sealed(summary)}
