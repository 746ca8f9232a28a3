"""Base class of all tables, and the number types of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from insitu import registry
from insitu.errors import ConfigError

Seconds = Annotated[float, Field(gt=0)]
SecondsOrZero = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _expand_home(text: str) -> str:
    """Expand a leading ~, which a shell leaves unchanged in `run.dir=~/x`."""
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise ValueError("no such home folder; write ./~ for a name that begins with ~") from error


OwnPath = Annotated[str, AfterValidator(_expand_home)]
"""Path on this machine; a leading ~ is the home folder. All path keys use this type."""


def _named(kind: registry.Kind) -> BeforeValidator:
    """Replace an object by its name in the registry, and reject an unknown name."""

    def validate(value: object) -> str:
        try:
            return registry.reference(kind, value)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(validate)


Agent = Annotated[str, _named("agents")]
"""Name, path or object of an agent; see `insitu.registry`. The same for the types below."""


class Table(BaseModel):
    """One table of the file; frozen; unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
