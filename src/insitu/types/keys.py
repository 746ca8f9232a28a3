"""Base class of option tables, their number types, and marks for keys that some choices do not use."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Seconds = Annotated[float, Field(gt=0)]
SecondsOrZero = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class UsedWith:
    """Mark of a key that has an effect only with some values of other keys of its table."""

    keys: tuple[str, ...]
    values: tuple[str, ...] = ()
    """One of `keys` must have one of these."""
    unless: Any = None
    """Without `values`: none of `keys` may have this one."""
    known: frozenset[str] = frozenset()
    """Built-in values; if given, any other value, the user's own, is as good as one of `values`."""

    def reason(self, table: Keys) -> str:
        """Return why the key has no effect in `table`, or an empty string."""
        chosen = {key: getattr(table, key) for key in self.keys}
        own = self.known and {*chosen.values()} - self.known
        if self.values and not own and not {*chosen.values()} & {*self.values}:
            return f"{_assigned(chosen)}, only with {' or '.join(self.values)}"
        return _assigned(chosen) if not self.values and self.unless in chosen.values() else ""

    def __str__(self) -> str:
        if self.values:
            return ", ".join(self.values)
        return " or ".join(f"not {key} = {self.unless!r}" for key in self.keys)


def only(key: str, *values: str, known: Collection[str] = ()) -> UsedWith:
    """Mark a key that is used only with these values of `key`, and with own ones if `known` is given."""
    return UsedWith((key,), values, known=frozenset(known))


def unless(key: str, value: Any) -> UsedWith:
    """Mark a key that is not used with this value of `key`."""
    return UsedWith((key,), unless=value)


class Keys(BaseModel):
    """Options; frozen; unknown names and values of another type are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def pick(self, kind: type[AnyKeys], **more: Any) -> AnyKeys:
        """Return a `kind` with the values of the keys that it has in common with this table, and `more`."""
        shared = {key: value for key, value in self.__dict__.items() if key in kind.model_fields}
        return kind(**{**shared, **more})

    def changed(self: AnyKeys, **values: Any) -> AnyKeys:
        """Return a validated copy with other values."""
        return type(self)(**{**self.__dict__, **values})


AnyKeys = TypeVar("AnyKeys", bound=Keys)


def marks(field: FieldInfo) -> list[UsedWith]:
    """Return the marks of a key."""
    return [mark for mark in field.metadata if isinstance(mark, UsedWith)]


def description(field: FieldInfo) -> str:
    """Return the meaning of a key in one line, after the choices that use it, and its values if listed."""
    words = " ".join((field.description or "").split())
    values = _values(field.annotation)
    if values and not all(re.search(rf"\b{value}\b", words) for value in values):
        words = f"{words} One of: {', '.join(values)}."
    users = ", ".join(map(str, marks(field)))
    return f"{users}: {words}" if users and words else words


def _values(kind: Any) -> tuple[str, ...]:
    """Return the values of a Literal, also as element of a tuple."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return next(filter(None, map(_values, get_args(kind))), ())


def _assigned(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in values.items() if value != "" or len(values) == 1)
