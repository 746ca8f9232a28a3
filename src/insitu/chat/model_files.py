"""The files of a model folder that determine how it is rendered, read once and checked for shape.

`tokenizer.json` is required; `chat_template.jinja` (or the one in `tokenizer_config.json`), `config.json` and
`insitu_renderer.json` are optional.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from insitu.chat.tool_formats import FORMATS
from insitu.errors import RenderError, boundary

_TAGS = (
    "a b blockquote body caption code div em footer h1 h2 h3 h4 h5 h6 html i iframe img li ol p pre span"
    " strong sub sup table tbody td tfoot th thead tr u ul"
)
_TEXT = re.compile(rf"[\s\u2581]+|[\s\u2581]*\w[^<>\[\]|]*|</?(?:{_TAGS.replace(' ', '|')})>", re.DOTALL)
"""White space (also as SentencePiece writes it), words, and tags of HTML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererFile:
    """Contents of insitu_renderer.json: optional settings that the template does not determine."""

    stop_tokens: tuple[str, ...] = ()
    """Further tokens that end a turn, besides the template's own and those that open a message."""
    tool_format: str = ""
    """A key of tool_formats.FORMATS; empty = the format that parses what the chat template writes."""
    control_tokens: tuple[str, ...] | None = None
    """Added tokens that outside text must never produce; None = all added tokens. Without this key those that
    are not special, and mere white space, words or HTML tags, are text."""
    template_arguments: dict[str, object] = field(default_factory=dict)
    """Extra variables for the template, e.g. {"enable_thinking": false}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Contents of the files."""

    folder: Path
    tokenizer_json: str
    template: str | None
    special_tokens: dict[str, object]
    """bos_token, eos_token, ... as templates expect them."""
    renderer: RendererFile


def read_folder(folder: Path) -> ModelFiles:
    """Read a model folder; raise RenderError if a file cannot be used."""
    with boundary(RenderError, f"reading the model folder {folder}"):
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
        config = _read_json(folder / "tokenizer_config.json")
        renderer = _renderer_file(_read_json(folder / "insitu_renderer.json"))
        if renderer.control_tokens is None:
            renderer = replace(renderer, control_tokens=_control_tokens(tokenizer_json))
        return ModelFiles(
            folder=folder,
            tokenizer_json=tokenizer_json,
            template=_template_source(folder, config),
            special_tokens=_special_tokens(config),
            renderer=renderer,
        )


def _control_tokens(tokenizer_json: str) -> tuple[str, ...] | None:
    """Return the added tokens without those that are text, as Gemma's runs of line ends; None if all are."""
    added = json.loads(tokenizer_json).get("added_tokens", [])
    named = [(str(token["content"]), token.get("special")) for token in added]
    control = tuple(name for name, special in named if special or not _TEXT.fullmatch(name))
    return control if len(control) < len(named) else None


def _read_json(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise RenderError(f"{path.name} is not a JSON object")
    return value


def _template_source(folder: Path, config: dict[str, object]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {str(t["name"]): str(t["template"]) for t in source}
        source = named.get("tool_use", named.get("default"))
    return source if isinstance(source, str) else None


def _special_tokens(config: dict[str, object]) -> dict[str, object]:
    """Return bos_token, eos_token, ... as templates expect them: plain strings."""
    found: dict[str, object] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _renderer_file(raw: dict[str, object]) -> RendererFile:
    known = set(RendererFile.__dataclass_fields__)
    unknown = sorted(set(raw) - known)
    if unknown:
        raise RenderError(f"insitu_renderer.json: unknown keys {unknown}; known keys: {sorted(known)}")
    control, arguments = raw.get("control_tokens"), raw.get("template_arguments", {})
    if not isinstance(arguments, dict):
        raise RenderError("insitu_renderer.json: template_arguments must be an object")
    file = RendererFile(
        stop_tokens=_names(raw.get("stop_tokens", [])),
        tool_format=str(raw.get("tool_format", "")),
        control_tokens=None if control is None else _names(control),
        template_arguments=arguments,
    )
    if file.tool_format and file.tool_format not in FORMATS:
        formats = ", ".join(sorted(FORMATS))
        raise RenderError(f"insitu_renderer.json: unknown tool_format {file.tool_format!r}; known: {formats}")
    return file


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise RenderError("insitu_renderer.json: token lists must be lists of strings")
    return tuple(value)
