"""Verbs of the command line, and arguments that are the annotated parameters of a function.

A package lists its verbs as `Command`s in a light module (extensions of kind `commands`). What a verb runs is
imported when it is chosen; an argument exists once, as a parameter with an `Arg`.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from insitu.registry import load

Group = Literal["train", "look", "tasks", "tools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """How a parameter is written on the command line: `--its-name`, or by its position."""

    help: str = ""
    metavar: str | None = None
    """Name of the value, or of a positional argument."""
    positional: bool = False
    flag: str = ""
    """Another option than `--its-name`."""
    choices: tuple[str, ...] = ()
    required: bool = False
    """An option that must be given; of positional lists, at least one."""
    instead_of: str = ""
    """Parameters of the same name exclude each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One verb. The parameters of its function that have an `Arg` are its arguments."""

    name: str
    group: Group
    text: str
    """What it does, for the help."""
    example: str
    """Arguments of an example."""
    run: str
    """Path of the function that does it and returns the exit code, `module:name`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the arguments of the function, whose module is imported."""
        exclusive: dict[str, Any] = {}
        for name, default, kind, arg in _arguments(load(self.run)):
            if arg.instead_of and arg.instead_of not in exclusive:
                exclusive[arg.instead_of] = parser.add_mutually_exclusive_group()
            _add(exclusive.get(arg.instead_of, parser), name, default, kind, arg)

    def __call__(self, options: argparse.Namespace) -> int:
        """Run with parsed arguments and return the exit code."""
        run: Callable[..., int] = load(self.run)
        return run(**{name: getattr(options, name) for name, _, _, _ in _arguments(run)})


def _arguments(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Any, Arg]]:
    """Yield name, default (inspect.Parameter.empty = none), type and `Arg` of each argument."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        if get_origin(hint) is Annotated:
            kind, *more = get_args(hint)
            for arg in more:
                if isinstance(arg, Arg):
                    yield name, parameter.default, kind, arg


def _add(parser: Any, name: str, default: Any, kind: Any, arg: Arg) -> None:
    """Add one argument; its type and default decide its form."""
    required = default is inspect.Parameter.empty
    value = _value_type(kind)
    flags = [] if arg.positional else [arg.flag or "--" + name.replace("_", "-")]
    more: dict[str, Any] = {"help": arg.help or None}
    if not arg.positional:
        more["dest"] = name
        if arg.required:
            more["required"] = True
    if value is bool:
        parser.add_argument(*flags, action="store_true", **more)
        return
    more["metavar"] = arg.metavar
    if arg.choices:
        more["choices"] = arg.choices
    if value is not str:
        more["type"] = value
    several = get_origin(kind) is Sequence
    if several and not arg.positional:
        more |= {"action": "append", "default": list(default)}
    elif several:
        more["nargs"] = "+" if arg.required else "*"
    elif not required:
        more["default"] = default
        if arg.positional:
            more["nargs"] = "?"
    parser.add_argument(*(flags or [name]), **more)


def _value_type(kind: Any) -> Callable[[str], Any]:
    """Return what makes a value of one word: of `X | None` and of lists, what makes X."""
    found = next(part for part in (get_args(kind) or (kind,)) if part is not type(None))
    if found is Path:
        return path_argument
    return found if found in (bool, int, float) else str


def path_argument(text: str) -> Path:
    """Return a path of the command line; the shell does not expand the ~ of `--resume=~/x`."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text} is in no known home folder") from error


Overrides = Annotated[
    Sequence[str], Arg(positional=True, metavar="a.b=c", help="override a key, e.g. run.seed=3")
]
RunPath = Annotated[Path, Arg(positional=True, metavar="RUN", help="run directory")]
Json = Annotated[bool, Arg(help="print the result as JSON, last on stdout")]
Plain = Annotated[bool, Arg(help="plain lines instead of the live view")]
