"""Base class of all tables, and the types of their keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Self, get_args

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from insitu import registry
from insitu.errors import ConfigError
from insitu.types.keys import (
    Count,
    CountOrZero,
    Fraction,
    Keys,
    Seconds,
    SecondsOrZero,
    UsedWith,
    description,
    marks,
    only,
    unless,
)

__all__ = [
    "Address",
    "AdvantageName",
    "Agent",
    "Count",
    "CountOrZero",
    "EngineName",
    "Fraction",
    "Keys",
    "LossName",
    "OwnPath",
    "RewardName",
    "SamplerName",
    "SandboxName",
    "Seconds",
    "SecondsOrZero",
    "Table",
    "TaskSourceName",
    "ToolsOrHook",
    "TrackerName",
    "UsedWith",
    "description",
    "holds_paths",
    "is_extension",
    "is_path",
    "is_url",
    "marks",
    "only",
    "split_address",
    "unless",
]


def _expand_home(text: str) -> str:
    """Expand a leading ~, which a shell leaves unchanged in `run.dir=~/x`."""
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise ValueError("no such home folder; write ./~ for a name that begins with ~") from error


_PATH = AfterValidator(_expand_home)
OwnPath = Annotated[str, _PATH]
"""Path on this machine; a leading ~ is the home folder. All path keys use this type."""


def is_url(text: str) -> bool:
    """Return whether a key that takes a folder or an address holds an address."""
    return text.startswith(("http://", "https://"))


HUB = "hub:"
"""What a model's name at a hub begins with, in a key that takes a folder."""


_DOTTED = re.compile(r"[A-Za-z_][\w.]*(?<!\.py):[A-Za-z_][\w.]*")
"""An attribute of a module."""


def is_path(text: str) -> bool:
    """Return whether a key that may hold an address, an image, a name at a hub or an object holds a path."""
    known = text.startswith((HUB, "docker://", registry.OBJECT))
    return not (known or is_url(text) or _DOTTED.fullmatch(text))


def holds_paths(field: FieldInfo) -> bool:
    """Return whether a key is an OwnPath or a tuple of these."""
    nested = (mark for kind in get_args(field.annotation) for mark in getattr(kind, "__metadata__", ()))
    return _PATH in (*field.metadata, *nested)


def is_extension(field: FieldInfo) -> bool:
    """Return whether a key names an entry of the registry."""
    return any(isinstance(mark, BeforeValidator) for mark in field.metadata)


STORED = "stored"
"""Validation context of a run's own configuration."""


def _named(kind: registry.Kind) -> BeforeValidator:
    """Replace an object by its name in the registry, and reject an unknown name."""

    def validate(value: object, info: ValidationInfo) -> str:
        # A run can be read where its plug-ins are not installed; `registry.find` raises when one is needed.
        if info.context == STORED and isinstance(value, str):
            return value
        try:
            return "" if value == "" else registry.reference(kind, value)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(validate)


def _tools_or_hook(value: object, info: ValidationInfo) -> str:
    """Return a file's path as it is, the reference of a function that has a name or is an object."""
    if isinstance(value, str) and (info.context == STORED or value not in registry.names("hooks")):
        return value
    try:
        return registry.reference("hooks", registry.find("hooks", value))
    except ConfigError as error:
        raise ValueError(str(error)) from error


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, or of a port of this machine; raise ValueError."""
    host, colon, port = text.rpartition(":")
    if not (bool(colon) == bool(host) and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError("is neither HOST:PORT nor a port")
    return host.strip("[]") or "127.0.0.1", int(port)


Address = Annotated[
    str,
    BeforeValidator(lambda given: str(given) if type(given) is int else given),
    AfterValidator(lambda text: text and split_address(text) and text),
]
"""Where a server listens, as HOST:PORT or a port; empty = nowhere. `split_address` takes it apart."""
Agent = Annotated[str, _named("agents")]
"""Name, path or object of an agent; see `insitu.registry`. The same for the types below."""
RewardName = Annotated[str, _named("rewards")]
TaskSourceName = Annotated[str, _named("tasks")]
SandboxName = Annotated[str, _named("sandboxes")]
EngineName = Annotated[str, _named("engines")]
SamplerName = Annotated[str, _named("samplers")]
LossName = Annotated[str, _named("losses")]
AdvantageName = Annotated[str, _named("advantages")]
TrackerName = Annotated[str, _named("trackers")]
ToolsOrHook = Annotated[str, BeforeValidator(_tools_or_hook), _PATH]
"""Path of a file with host tools, or a hook on tool calls."""


class Table(Keys):
    """One table of the file; a key that has no effect with the other values is an error."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        for key, field in type(self).model_fields.items():
            if self.__dict__[key] == field.default:
                continue
            for mark in marks(field):
                if reason := mark.reason(self):
                    raise ValueError(f"{key} has no effect with {reason}")
        return self
