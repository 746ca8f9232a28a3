"""What the bridges use of other packages, and whether it is there: no version number decides alone.

`check` says one of three things of an installed version. Proven, a test ran with its series: nothing.
Accepted, another one that has all that is used: one line in the log. Refused, something is missing: an error
with what is missing and the series that has it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from insitu.errors import ConfigError

log = logging.getLogger(__name__)

PROVEN: Mapping[str, str] = {"trl": "1.16", "verl": "0.9", "openenv": "0.10", "renderers": "0.1.12"}
"""Package -> release series that the tests of the bridges ran with."""


@dataclass(frozen=True, slots=True)
class Need:
    """A class or function, and the arguments that insitu gives it."""

    places: tuple[str, ...]
    """`module:name` of each layout, newest first."""
    arguments: tuple[str, ...] = ()
    complete: bool = False
    """Insitu calls it itself, with these arguments and no others."""

    @property
    def name(self) -> str:
        return self.places[0].partition(":")[2]

    def find(self) -> Any:
        """Return it from the first place that has it, else None."""
        for place in self.places:
            module, _, name = place.partition(":")
            try:
                found = getattr(import_module(module), name, None)
            except (ImportError, RuntimeError):  # the latter of lazy modules whose own imports fail
                continue
            if found is not None:
                return found
        return None

    def get(self) -> Any:
        """Return it. Raises ConfigError."""
        if (found := self.find()) is None:
            raise ConfigError(next(self.lacks()))
        return found

    def lacks(self) -> Iterator[str]:
        """Yield what is missing, or wanted and not given."""
        if (found := self.find()) is None:
            modules = " or ".join(place.partition(":")[0] for place in self.places)
            yield f"there is no {self.name} in {modules}"
            return
        try:
            parameters = inspect.signature(found).parameters.values()
        except (TypeError, ValueError):  # of an extension module
            return
        names = {one.name for one in parameters}
        missing = [name for name in self.arguments if name not in names]
        if missing and not any(one.kind is one.VAR_KEYWORD for one in parameters):
            yield f"{self.name} takes no {', '.join(missing)}"
        wanted = [one.name for one in parameters if one.default is one.empty and one.kind in _NAMED]
        more = [name for name in wanted if name not in self.arguments]
        if more and self.complete:
            yield f"{self.name} wants {', '.join(more)} too"


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check(package: str, *needs: Need) -> str:
    """Return the installed version, "" where there is none, and say whether it is proven.

    Raises ConfigError, in one line, for another version than a proven one that lacks something of `needs`. A
    package that is not installed is not looked for: who uses it says so.
    """
    series = PROVEN.get(package, "")
    try:
        found = version(package)
    except PackageNotFoundError:
        return ""
    if f"{found}.".startswith(f"{series}."):
        return found
    if lacks := [one for need in needs for one in need.lacks()]:
        raise ConfigError(
            f"{package} {found}: {'; '.join(lacks)}; {package} {series} has all of it: pip install"
            f" '{package}=={series}.*'"
        )
    log.warning(
        "%s %s is not %s, with which tests ran; what insitu uses of it is there", package, found, series
    )
    return found
