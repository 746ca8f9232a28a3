"""The command line: verbs of all installed packages, their arguments, and overrides at any position."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, get_args

from insitu._version import __version__
from insitu.cli.completion import candidates
from insitu.command import Command, Group
from insitu.errors import ConfigError
from insitu.registry import find, names, not_installed, satellite_of

_INVALID_CHOICE = re.compile(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)")


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        if choice := _INVALID_CHOICE.search(message):
            message += _similar(choice[1], re.findall(r"[\w-]+", choice[2]))
        command = self.prog.removeprefix("insitu").strip()
        text = f"{command}: {message}" if command else message
        self.exit(2, f"insitu: {' '.join(text.split())}; see {self.prog} --help\n")


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _as_key(option: str, after: str) -> str:
    """Return a hint where an option is a key of the configuration, as --steps 3 is run.steps=3."""
    from insitu.config import dotted_keys

    name, equals, value = option.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value if equals else after if not after.startswith("-") else ""
    keys = [key for key in dotted_keys() if name in (key, key.rpartition(".")[2])]
    return f"; write {' or '.join(f'{key}={value}' for key in keys)}" if keys else ""


def commands() -> Mapping[str, Command]:
    """Return the verbs of all installed packages by name; one line names a package that is left out."""
    found: dict[str, Command] = {}
    for package in names("commands"):
        try:
            own = {command.name: command for command in find("commands", package)}
        except (ConfigError, AttributeError, TypeError) as error:
            print(f"insitu: the verbs of {package} are left out: {error}", file=sys.stderr)
            continue
        if taken := sorted(own.keys() & found.keys()):
            print(f"insitu: {package} has a verb {taken[0]}, which exists: it is left out", file=sys.stderr)
        found = {**own, **found}
    return found


def parse(argv: Sequence[str] | None) -> tuple[Command, argparse.Namespace]:
    """Parse the command line; overrides may be at any position."""
    # argparse by itself accepts positional overrides only as one contiguous group.
    argv = sys.argv[1:] if argv is None else argv
    found = commands()
    chosen = next((word for word in argv if not word.startswith("-")), "")
    if chosen not in found and (package := satellite_of("verbs", chosen)):
        raise ConfigError(f"{chosen} {not_installed(package)}")
    parser, parsers = _parsers(found, chosen)
    if os.environ.get("INSITU_COMPLETE"):
        print("\n".join(candidates(argv, parsers)))
        parser.exit()
    options, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or "=" not in text or "overrides" not in options]
    if unknown:
        command = parsers[options.command]
        known = command._option_string_actions
        hints = [
            ("overrides" in options and _as_key(text, after)) or _similar(text.partition("=")[0], known)
            for text, after in zip(unknown, [*unknown[1:], ""], strict=True)
            if text.startswith("-")
        ]
        command.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return found[options.command], options


def _parsers(
    found: Mapping[str, Command], chosen: str
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser and those of all verbs; only `chosen` has its arguments, whose module is imported."""
    parser = _Parser(
        prog="insitu",
        description="Train a language model inside the coding agent people really use.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"insitu {__version__}")
    verbs = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help="see below; COMMAND --help has its options"
    )
    for name, command in found.items():
        own = verbs.add_parser(name, description=command.text)
        own.epilog = f"example: insitu {name} {command.example}".rstrip()
        if name == chosen:
            command.add_arguments(own)
    parser.epilog = _overview(found)
    return parser, verbs.choices


def _overview(found: Mapping[str, Command]) -> str:
    """Return the verbs by topic."""
    lines = []
    for group in get_args(Group):
        own = (command for command in found.values() if command.group == group)
        lines += [f"{group}:", *(f"  {command.name:<13}{command.text}" for command in own), ""]
    return "\n".join([*lines, "INSITU_DEBUG=1 in the environment adds tracebacks to errors."])
