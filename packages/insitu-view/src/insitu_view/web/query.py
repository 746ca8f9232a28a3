"""Query parameters of a request, each checked and bounded."""

from __future__ import annotations

from collections.abc import Mapping

from insitu.errors import InsituError
from insitu.storage.queries import FILTERS, NUMBERS

MAX_NAME_CHARS = 200
MAX_TEXT_CHARS = 1000


class BadRequest(InsituError):
    """A parameter of the request is missing or not valid."""


class Query:
    """Parameters by name."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """All parameters, in order: equal keys ask for the same."""
        return tuple(sorted(self._values.items()))

    def text(self, name: str, default: str | None = None, limit: int = MAX_NAME_CHARS) -> str:
        """Return a text; raise BadRequest when it is missing without a default, or too long."""
        value = self._values.get(name, default)
        if value is None:
            raise BadRequest(f"the parameter {name} is missing")
        if len(value) > limit or "\0" in value:
            raise BadRequest(f"the parameter {name} is longer than {limit} characters or has a NUL")
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**53) -> int:
        """Return a whole number in a range; raise BadRequest otherwise."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        try:
            number = int(self.text(name, limit=20))
        except ValueError as error:
            raise BadRequest(f"the parameter {name} is not a whole number") from error
        if not least <= number <= most:
            raise BadRequest(f"the parameter {name} must be from {least} to {most}")
        return number

    def filters(self) -> dict[str, object]:
        """Return the filters of a list of rollouts that are given."""
        found: dict[str, object] = {}
        for name in FILTERS:
            if name not in self._values:
                continue
            text = self.text(name, limit=MAX_TEXT_CHARS)
            try:
                found[name] = float(text) if name in NUMBERS else text
            except ValueError as error:
                raise BadRequest(f"the filter {name} takes a number") from error
        return found
