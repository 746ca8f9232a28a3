"""Responses that the client may refer to by id (`store` of the Responses format), per session.

The client sends `previous_response_id`, or `item_reference` in place of an item; the gateway inserts the
items before the body is parsed. Texts are kept once, however often a conversation repeats them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from insitu.gateway.dialects.base import WireError, json_text

MAX_BYTES = 16 << 20
"""Limit of text per session; beyond it the oldest responses are dropped and their ids are unknown."""


@dataclass(slots=True)
class _Text:
    id: str
    """Id of the item that was sent with it; empty for one that was received."""
    uses: int = 0
    """Number of responses whose conversations contain it."""


class StoredResponses:
    """Stored responses of one session; used on one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: dict[str, _Text] = {}
        """By JSON text of an item."""
        self._size = 0
        self._responses: dict[str, tuple[str, ...]] = {}
        """Response id -> JSON texts of the items of its conversation and its own output. Oldest first."""
        self._items: dict[str, str] = {}
        """Item id -> JSON text of an item that was sent."""

    def keep(self, conversation: Sequence[str], response: Mapping[str, object]) -> None:
        """Store a response and its conversation, given as JSON texts of the items.

        The newest response is kept, however long it is.
        """
        output = response.get("output")
        items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
        sent = {json_text(item): str(item.get("id")) for item in items}
        name = str(response.get("id"))
        self._forget(name)  # of a reply that is sent again
        self._responses[name] = tuple(self._text(text, sent.get(text, "")) for text in (*conversation, *sent))
        while self._size > self._max_bytes and len(self._responses) > 1:
            self._forget(next(iter(self._responses)))

    def _text(self, text: str, id: str) -> str:
        if text not in self._texts:
            self._size += len(text)
        held = self._texts.setdefault(text, _Text(id))
        held.uses += 1
        if id:
            held.id = id
            self._items[id] = text
        return text

    def _forget(self, name: str) -> None:
        for text in self._responses.pop(name, ()):
            held = self._texts[text]
            held.uses -= 1
            if not held.uses:
                del self._texts[text]
                self._size -= len(text)
                self._items.pop(held.id, None)

    def expand(self, body: Mapping[str, object]) -> Mapping[str, object]:
        """Return the body with the referenced items inserted; the same object without references.

        Raises WireError for unknown ids.
        """
        given = body.get("input")
        items = given if isinstance(given, list) else []
        before = body.get("previous_response_id")
        references = any(isinstance(item, dict) and item.get("type") == "item_reference" for item in items)
        if before is None and not references:
            return body
        whole = [self._resolved(item, f"input[{i}]") for i, item in enumerate(items)]
        if isinstance(given, str):
            whole = [{"role": "user", "content": given}]
        if before is not None:
            whole = [*self._conversation(str(before)), *whole]
        return {**body, "input": whole, "previous_response_id": None}

    def _conversation(self, id: str) -> list[object]:
        texts = self._responses.get(id)
        if texts is None:
            raise WireError(
                "invalid_request",
                f"Previous response with id '{id[:64]}' not found.",
                "previous_response_id",
                code="previous_response_not_found",
            )
        return [orjson.loads(text) for text in texts]

    def _resolved(self, item: object, param: str) -> object:
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            return item
        id = str(item.get("id"))
        text = self._items.get(id)
        if text is None:
            raise WireError("invalid_request", f"Item with id '{id[:64]}' not found.", param)
        return orjson.loads(text)
