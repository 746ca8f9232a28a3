"""Base class of all tables, and the number types of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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


class Table(BaseModel):
    """One table of the file; frozen; unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
