"""Base class of public values: conversion to plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import BaseModel


class Value:
    """A frozen dataclass that converts to a dictionary."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; numpy arrays and bytes stay what they are."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """Return a value as `Value.to_dict` returns those of its fields."""
    if isinstance(value, Value):
        return value.to_dict()
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value
