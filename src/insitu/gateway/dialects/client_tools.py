"""Provider-defined tools that the client runs: their public schemas, and their items in Responses; pure.

Clients name such a tool only by its type, since the provider's models are trained with it; other models need
its schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import orjson

from insitu.gateway.dialects.base import json_text, mapping, string
from insitu.types import ToolCall, ToolSpec

_Json = Mapping[str, object]


def _text(about: str, **more: object) -> dict[str, object]:
    return {"type": "string", "description": about, **more}


def _integer(about: str, **more: object) -> dict[str, object]:
    return {"type": "integer", "description": about, **more}


def _integers(about: str) -> dict[str, object]:
    return {"type": "array", "items": {"type": "integer"}, "description": about}


def _object(required: tuple[str, ...], **properties: _Json) -> _Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*names: str) -> dict[str, object]:
    return {"type": "string", "enum": list(names)}


# --------------------------------------------------------------------------- Anthropic

_BASH = _object(
    (),
    command=_text("The command to run."),
    restart={"type": "boolean", "description": "Restart the shell instead of running a command."},
)
_EDIT_COMMANDS = ("view", "create", "str_replace", "insert")


def _editor(*commands: str) -> _Json:
    return _object(
        ("command", "path"),
        command=_commands(*commands),
        path=_text("Absolute path of a file or folder."),
        view_range=_integers("For view: first and last line, -1 for the end."),
        file_text=_text("For create: the content of the file."),
        old_str=_text("For str_replace: the text to replace; it must occur exactly once."),
        new_str=_text("For str_replace: the new text. For insert of older versions: the text to insert."),
        insert_line=_integer("For insert: the line after which to insert; 0 for the beginning."),
        insert_text=_text("For insert: the text to insert."),
    )


_MEMORY = _object(
    ("command",),
    command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
    path=_text("Path below /memories."),
    view_range=_integers("For view: first and last line."),
    file_text=_text("For create: the content of the file."),
    old_str=_text("For str_replace: the text to replace."),
    new_str=_text("For str_replace: the new text."),
    insert_line=_integer("For insert: the line at which to insert."),
    insert_text=_text("For insert: the text to insert."),
    old_path=_text("For rename: the current path."),
    new_path=_text("For rename: the new path."),
)
_COMPUTER_1 = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click"),
    *("double_click", "screenshot", "cursor_position"),
)
_COMPUTER_2 = (
    *_COMPUTER_1,
    *("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click"),
)


def _computer(*actions: str) -> _Json:
    return _object(
        ("action",),
        action=_commands(*actions),
        coordinate=_integers("Pixels from the left and from the top."),
        start_coordinate=_integers("For left_click_drag: where it begins."),
        text=_text("For type: the text. For key and hold_key: the keys, joined by +."),
        scroll_direction=_commands("up", "down", "left", "right"),
        scroll_amount=_integer("For scroll: number of clicks of the wheel."),
        duration={"type": "number", "description": "For wait and hold_key: seconds."},
        region=_integers("For zoom: left, top, right and bottom of the part to show."),
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """Description and schema of a tool for the model."""

    about: str
    takes: _Json


_ANTHROPIC: Mapping[str, _Known] = {
    "bash": _Known("Run a command in a bash shell that keeps its state between calls.", _BASH),
    "text_editor": _Known("View, create and edit text files.", _editor(*_EDIT_COMMANDS)),
    "text_editor_20241022": _Known("View and edit text files.", _editor(*_EDIT_COMMANDS, "undo_edit")),
    "text_editor_20250124": _Known("View and edit text files.", _editor(*_EDIT_COMMANDS, "undo_edit")),
    "memory": _Known("Keep notes in files below /memories between conversations.", _MEMORY),
    "computer": _Known("Use a screen, a mouse and a keyboard.", _computer(*_COMPUTER_2, "zoom")),
    "computer_20241022": _Known("Use a screen, a mouse and a keyboard.", _computer(*_COMPUTER_1)),
    "computer_20250124": _Known("Use a screen, a mouse and a keyboard.", _computer(*_COMPUTER_2)),
}
"""By type, with or without its date; unlisted dates use the entry without one."""
_SHOWN = ("display_width_px", "display_height_px", "display_number", "max_characters")
"""Options of a tool that are passed to the model."""


def anthropic_tool(kind: str, tool: _Json, param: str) -> ToolSpec | None:
    """Return the tool for the model; None for one that the provider runs. Raises WireError."""
    plain, _, date = kind.rpartition("_")
    known = _ANTHROPIC.get(kind) or (_ANTHROPIC.get(plain) if date.isdigit() else None)
    if known is None:
        return None
    name = string(tool.get("name"), f"{param}.name") or plain
    options = {option: tool[option] for option in _SHOWN if tool.get(option) is not None}
    about = f"{known.about} Options: {json_text(options)}." if options else known.about
    return ToolSpec(name=name, description=about, parameters=json_text(known.takes))


# --------------------------------------------------------------------------- Responses

_ACTION = {
    "type": "object",
    "properties": {
        "type": _commands(
            *("click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait")
        ),
        "x": _integer("Pixels from the left."),
        "y": _integer("Pixels from the top."),
        "button": _commands("left", "right", "wheel", "back", "forward"),
        "path": {"type": "array", "items": _object(("x", "y"), x=_integer("Pixels."), y=_integer("Pixels."))},
        "keys": {"type": "array", "items": {"type": "string"}},
        "scroll_x": _integer("Pixels to scroll to the right."),
        "scroll_y": _integer("Pixels to scroll down."),
        "text": _text("For type: the text."),
    },
    "required": ["type"],
}
_TEXTS = {"type": "array", "items": {"type": "string"}}


@dataclass(frozen=True, slots=True)
class _Form:
    """A tool of Responses: its schema, and the place of the arguments in the item of a call."""

    about: str
    takes: _Json
    call: str
    """Type of the item."""
    field: str
    """Field of the item for the arguments; empty = they are fields of the item."""
    fixed: _Json
    """Constant members of that field."""
    filled: _Json
    """Values that clients need where the model omitted them; also the defaults in `takes`."""

    def read(self, held: _Json) -> dict[str, object]:
        """Return the arguments in an item, without what clients fill in, leave out or do not know."""
        known = mapping(self.takes["properties"], "properties").keys() - self.fixed.keys()
        return {
            key: value
            for key, value in held.items()
            if key in known and value is not None and value != self.filled.get(key)
        }


_RESPONSES: Mapping[str, _Form] = {
    "local_shell": _Form(
        "Run a program on this machine.",
        _object(
            ("command",),
            command={**_TEXTS, "description": "The program and its arguments."},
            env={"type": "object", "additionalProperties": {"type": "string"}, "default": {}},
            working_directory=_text("Where to run it.", default=None),
            timeout_ms=_integer("Limit in milliseconds.", default=None),
            user=_text("As whom to run it.", default=None),
        ),
        "local_shell_call",
        "action",
        {"type": "exec"},
        {"command": [], "env": {}, "working_directory": None, "timeout_ms": None, "user": None},
    ),
    "shell": _Form(
        "Run shell commands on this machine.",
        _object(
            ("commands",),
            commands={**_TEXTS, "description": "The commands, each in a shell of its own."},
            timeout_ms=_integer("Limit in milliseconds.", default=None),
            max_output_length=_integer("Characters of output to return.", default=None),
        ),
        "shell_call",
        "action",
        {},
        {"commands": [], "timeout_ms": None, "max_output_length": None},
    ),
    "apply_patch": _Form(
        "Create, update or delete one file.",
        _object(
            ("type", "path"),
            type=_commands("create_file", "update_file", "delete_file"),
            path=_text("The file."),
            diff=_text(
                "For create_file and update_file: lines that begin with a space, - or +, below @@ lines."
            ),
        ),
        "apply_patch_call",
        "operation",
        {},
        {"type": "update_file", "path": ""},
    ),
    "computer": _Form(
        "Use a screen, a mouse and a keyboard.",
        _object(("actions",), actions={"type": "array", "items": _ACTION}),
        "computer_call",
        "",
        {},
        {"actions": []},
    ),
    "computer_use_preview": _Form(
        "Use a screen, a mouse and a keyboard.",
        _object(("action",), action=_ACTION),
        "computer_call",
        "",
        {},
        {"action": {"type": "screenshot"}},
    ),
}
RESPONSES_CALLS = frozenset(form.call for form in _RESPONSES.values())
RESPONSES_OUTPUTS = frozenset(f"{call}_output" for call in RESPONSES_CALLS)
"""Types of the items of such calls and of their answers."""
_REMOTE = ("container_auto", "container_reference")


def responses_tool(kind: str, tool: _Json, param: str) -> ToolSpec | None:
    """Return the tool for the model; None for one that the provider runs. Raises WireError."""
    form = _RESPONSES.get(kind)
    place = mapping(tool.get("environment") or {}, f"{param}.environment") if kind == "shell" else {}
    if form is None or place.get("type") in _REMOTE:
        return None
    return ToolSpec(name=kind, description=form.about, parameters=json_text(form.takes))


def responses_item(kind: str, call: ToolCall, place: str) -> dict[str, object] | None:
    """Return the item of a call of the tool `kind`; None for another tool.

    `place`: of the call within the session.
    """
    form = _RESPONSES.get(kind)
    if form is None:
        return None
    given = _arguments(call.arguments)
    if not form.field:  # its fields are beside those of the item
        given = form.read(given)
    held = {**form.filled, **given, **form.fixed}
    item: dict[str, object] = {
        "id": f"{form.call.removesuffix('_call')}_{place}",
        "type": form.call,
        "call_id": call.id,
        "status": "completed",
        **({form.field: held} if form.field else held),
    }
    if form.call == "computer_call":
        item["pending_safety_checks"] = []
    return item


def responses_call(item: _Json, param: str) -> ToolCall:
    """Return the call of an item that the client sent back. Raises WireError."""
    kind = str(item.get("type"))
    name, form = next((name, form) for name, form in _RESPONSES.items() if form.call == kind)
    if kind == "computer_call" and item.get("action") is not None:
        name, form = "computer_use_preview", _RESPONSES["computer_use_preview"]
    held = mapping(item.get(form.field) or {}, f"{param}.{form.field}") if form.field else item
    id = string(item.get("call_id"), f"{param}.call_id")
    return ToolCall(id=id, name=name, arguments=json_text(form.read(held)))


def echoed(call: ToolCall, form: str) -> ToolCall:
    """Return a sampled call as its item is read when a client sends it back, so that the echo is known.

    `form`: its entry in `ParsedBody.names`. An item cannot hold everything that a model writes.
    """
    kind = str(orjson.loads(form).get("type"))
    if kind == "custom":
        return replace(call, arguments=json_text({"input": free_form_text(call.arguments)}))
    item = responses_item(kind, call, "")
    return call if item is None else responses_call(item, "")


def free_form_text(arguments: str) -> str:
    """Return the free-form input in arguments; arguments of another shape are returned unchanged."""
    value = _arguments(arguments)
    text = value.get("input")
    return text if isinstance(text, str) and len(value) == 1 else arguments


def responses_answer(item: _Json) -> object:
    """Return the content of an answer to such a call, as text or text parts."""
    output = item.get("output")
    if isinstance(output, list) and item.get("type") == "shell_call_output":
        return json_text(output)
    status = item.get("status")
    if item.get("type") == "apply_patch_call_output":
        return f"{status or 'completed'}\n{output}" if output else str(status or "completed")
    return output


def _arguments(text: str) -> dict[str, object]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
