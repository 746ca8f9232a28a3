"""Types of arguments that a format writes without quotes, from the tool's JSON schema.

Text and JSON look alike in such formats. Of a schema only what names a kind of value is read: `type`, `enum`,
`const`, `$ref`, `allOf`, `anyOf`, `oneOf`, `nullable`. Tools come from the agent, so no pattern is run and no
address is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from insitu.chat.parse import decode_json
from insitu.chat.renderer import ParsedCall
from insitu.types import ToolSpec

_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
_MAX_DEPTH = 32
"""References and nested schemas that are followed; what lies deeper, or in itself, allows anything."""


def typed_call(
    name: str, found: Mapping[str, str], tools: Sequence[ToolSpec], spellings: Mapping[str, str]
) -> ParsedCall:
    """Return a call from unquoted values. `spellings`: JSON for words that the format writes instead of it.

    A value that its schema does not allow stays in the call, so that the agent can say what is wrong.
    """
    root = next((json.loads(tool.parameters) for tool in tools if tool.name == name), True)
    members = (
        f"{json.dumps(key, ensure_ascii=False)}: {_to_json(text, _of_key(root, key, root), root, spellings)}"
        for key, text in found.items()
    )
    return ParsedCall(name=name, arguments="{" + ", ".join(members) + "}")


def declared_keys(name: str, tools: Sequence[ToolSpec]) -> frozenset[str]:
    """Return the keys in the `properties` of a tool."""
    root = next((json.loads(tool.parameters) for tool in tools if tool.name == name), None)
    found = root.get("properties") if isinstance(root, dict) else None
    return frozenset(found) if isinstance(found, dict) else frozenset()


def _to_json(text: str, schema: object, root: object, spellings: Mapping[str, str]) -> str:
    """Return the JSON text of an unquoted value."""
    quoted = json.dumps(text, ensure_ascii=False)
    spelled = spellings.get(text, text)
    value = decode_json(spelled)
    # Strings stand without quotes, so what looks like a quoted one is a text with quotes in it.
    if value is None or isinstance(value[0], str):
        return quoted
    for exact in (True, False):
        # Text that reads as another value which the schema allows too is that value: both are written alike.
        if _Allowed(value[0], root, exact).by(schema):
            return spelled.strip()
        if _Allowed(text, root, exact).by(schema):
            return quoted
    return spelled.strip()


def _of_key(
    schema: object, key: str, root: object, seen: dict[int, object] | None = None, depth: int = 0
) -> object:
    """Return the schema of one member of an object."""
    seen = {} if seen is None else seen
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return True
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = True
    named = schema.get("properties")
    own = named.get(key) if isinstance(named, dict) else None
    own = schema.get("additionalProperties") if own is None else own
    # `additionalProperties: false` says nothing about the kind of a member that is there all the same.
    parts: list[object] = [own] if isinstance(own, dict) else []
    parts += [_of_key(one, key, root, seen, depth + 1) for one in _all_of(schema, root)]
    parts += [{"anyOf": [_of_key(b, key, root, seen, depth + 1) for b in union]} for union in _unions(schema)]
    seen[id(schema)] = {"allOf": parts}
    return seen[id(schema)]


class _Allowed:
    """Tells which schemas allow one value; not `exact`: one of the same kind."""

    def __init__(self, value: object, root: object, exact: bool) -> None:
        self._value, self._root, self._exact = value, root, exact
        # Each schema is looked at once: references may repeat and form circles.
        self._seen: dict[int, bool] = {}

    def by(self, schema: object, depth: int = 0) -> bool:
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return schema is not False
        if id(schema) not in self._seen:
            self._seen[id(schema)] = True
            self._seen[id(schema)] = self._by(schema, depth)
        return self._seen[id(schema)]

    def _by(self, schema: Mapping[str, object], depth: int) -> bool:
        if self._value is None and schema.get("nullable") is True:
            return True
        kinds = schema.get("type", [])
        kinds = {str(kind).lower() for kind in (kinds if isinstance(kinds, list) else [kinds])}
        if kinds and not _is_kind(self._value, kinds):
            return False
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list) and not any(self._is(one) for one in listed):
            return False
        return all(self.by(one, depth + 1) for one in _all_of(schema, self._root)) and all(
            any(self.by(one, depth + 1) for one in union) for union in _unions(schema)
        )

    def _is(self, listed: object) -> bool:
        # By kind first: Python's True equals 1, JSON's does not.
        same_kind = _is_kind(self._value, {_KINDS[type(listed)]})
        return same_kind and (not self._exact or self._value == listed)


def _is_kind(value: object, kinds: set[str]) -> bool:
    kind = _KINDS[type(value)]
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return True
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _all_of(schema: Mapping[str, object], root: object) -> list[object]:
    """Return the schemas that hold beside this one."""
    found = schema.get("allOf")
    parts = list(found) if isinstance(found, list) else []
    reference = schema.get("$ref")
    return [*parts, _resolved(reference, root)] if isinstance(reference, str) else parts


def _unions(schema: Mapping[str, object]) -> list[list[object]]:
    return [union for key in ("anyOf", "oneOf") if isinstance(union := schema.get(key), list) and union]


def _resolved(reference: str, root: object) -> object:
    """Return the schema at a JSON pointer into the tool's own schema; for any other reference, True."""
    at = root
    for part in reference.split("/")[1:] if reference.startswith("#") else ():
        part = part.replace("~1", "/").replace("~0", "~")
        at = at.get(part, True) if isinstance(at, dict) else True
    return at if reference == "#" or reference.startswith("#/") else True
