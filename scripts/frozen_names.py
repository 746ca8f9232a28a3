"""The names that others use, and the tests that kill: parts of scripts/frozen.

Found by what the package and the files say, wherever they lie.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
KILLS = re.compile(r"SIGKILL|\bos\.kill\(|killpg|\.kill\(|failpoint", re.IGNORECASE)
KILL_NAMES = re.compile(r"_(kill\w*|dies|died|dead|crash\w*)(_|$)")


def plain(value: object) -> str:
    """Return a type or value without the modules it lives in, private functions, addresses and folders."""
    text = re.sub(r"<(?:class|function|enum) '?([^'> ]+)[^>]*>", r"\1", str(value)).replace(str(ROOT), "")
    text = re.sub(r" at 0x[0-9a-f]+|(?<=Validator)\(.*\)", "", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations that are strings
    return re.sub(r"('[^']*')|\b[a-z_]\w*(?:\.[a-z_]\w*)*\.(?=[A-Za-z_])", r"\1", text)


def api() -> Any:
    """Return the public names: signatures, fields, methods and members, and the classes of errors."""
    errors = importlib.import_module("insitu.errors")
    found: dict[str, Any] = {
        module: {name: described(getattr(importlib.import_module(module), name)) for name in names}
        for module in ("insitu", "insitu_lab.testing")
        for names in [sorted(importlib.import_module(module).__all__)]
    }
    classes = {name: item for name, item in vars(errors).items() if inspect.isclass(item)}
    own = {name: item for name, item in classes.items() if issubclass(item, Exception)}
    return {**found, "errors": {name: plain(item.__bases__) for name, item in sorted(own.items())}}


def described(item: Any) -> Any:
    if not inspect.isclass(item):
        start = "async " if inspect.iscoroutinefunction(item) else ""
        return start + plain(inspect.signature(item) if inspect.isroutine(item) else item)
    if issubclass(item, enum.Enum):
        return {member.name: member.value for member in item}
    if hasattr(item, "model_fields"):
        return dict(keys_of(item, ""))
    found = dict(_fields(item))
    for name, value in inspect.getmembers(item):
        if isinstance(value, property) and not name.startswith("_"):
            found[name] = "property " + plain(inspect.get_annotations(value.fget).get("return"))  # type: ignore[arg-type]
        elif inspect.isroutine(value) and not name.startswith("_") and not hasattr(Exception, name):
            found[name] = described(value)
    return found


def _fields(item: Any) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(item) if dataclasses.is_dataclass(item) else ():
        made = "" if field.default is dataclasses.MISSING else f" = {plain(repr(field.default))}"
        if field.default_factory is not dataclasses.MISSING:
            made = f" = {plain(field.default_factory)}()"
        yield field.name, plain(field.type) + made


def config() -> Any:
    """Return every key of the configuration: type, default and bounds."""
    return dict(keys_of(importlib.import_module("insitu").Config, ""))


def keys_of(model: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        inner = [
            kind for kind in (field.annotation, *get_args(field.annotation)) if hasattr(kind, "model_fields")
        ]
        for kind in inner:
            yield from keys_of(kind, f"{prefix}{name}.")
        if not inner:
            default = plain(repr(field.get_default(call_default_factory=True)))
            bounds = "".join(f", {plain(bound)}" for bound in field.metadata)
            yield f"{prefix}{name}", f"{plain(field.annotation)} = {default}{bounds}"


class _Parsing(BaseException):
    pass


def verbs(main: Callable[[list[str]], object]) -> Any:
    """Return the verbs of the command line with their arguments, as argparse has them."""
    return {
        verb: arguments_of(_verbs(_parser(main, verb))[verb])
        for verb in sorted(_verbs(_parser(main, "doctor")))
    }


def _parser(main: Callable[[list[str]], object], verb: str) -> argparse.ArgumentParser:
    """Return the parser that a verb's command line is given to; the other verbs' may be empty in it."""
    real = argparse.ArgumentParser.parse_known_args

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> Any:
        raise _Parsing(parser)

    argparse.ArgumentParser.parse_known_args = stop  # type: ignore[method-assign,assignment]
    try:
        main([verb])
    except _Parsing as found:
        parser: argparse.ArgumentParser = found.args[0]
        return parser
    finally:
        argparse.ArgumentParser.parse_known_args = real  # type: ignore[method-assign]
    raise RuntimeError("the command line does not use argparse")


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def arguments_of(parser: argparse.ArgumentParser) -> Any:
    found: dict[str, Any] = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        facts = [type(action).__name__.strip("_").removesuffix("Action")]
        facts += ["required"] if action.option_strings and action.required else []
        facts += [action.type.__name__] if action.type in (int, float) else []
        facts += [f"nargs={action.nargs}"] if action.nargs not in (None, 0) else []
        facts += [f"of {', '.join(map(str, action.choices))}"] if action.choices else []
        unset = action.default is False or action.default in (None, "", argparse.SUPPRESS)
        facts += [] if unset else [f"default={action.default!r}"]
        found["/".join(action.option_strings) or action.dest] = "; ".join(facts)
    for group in parser._mutually_exclusive_groups:
        found.setdefault("only one of", []).append(
            ["/".join(action.option_strings) for action in group._group_actions]
        )
    return found


def extensions() -> Any:
    """Return the names of each kind of extension."""
    registry = importlib.import_module("insitu.registry")
    return {kind: sorted(registry.names(kind)) for kind in registry.KINDS}


def metrics() -> Any:
    """Return metrics as sent to trackers -> as in metrics.jsonl, from the page of the documentation."""
    page = importlib.import_module("docs").metrics()
    return dict(re.findall(r"^\| `(\S+)` \| `(\S+)` \|", page, re.MULTILINE))


def kill_tests(recorded: Iterable[str]) -> list[str]:
    """Return the tests that kill a process, by name and parameters: files and helpers may move."""
    known = {_function(test) for test in recorded}
    found = {}
    for top in ROOT.iterdir():
        if top.is_dir() and not top.name.startswith("."):
            for path in top.rglob("test_*.py"):
                names = killing_tests(ast.parse(path.read_text(encoding="utf-8")), known)
                if names and path.parent.name != "scripts":
                    found[path] = names
    command = [sys.executable, *"-m pytest --collect-only -q -o addopts= --import-mode=importlib".split()]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "INSITU_"))
    }
    done = subprocess.run(
        [*command, *map(str, found)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"pytest cannot collect the tests: {done.stdout[-2000:]}")
    ids = (line.split("::", 1) for line in done.stdout.splitlines() if "::" in line)
    return sorted(test for path, test in ids if _function(test) in found[(ROOT / path).resolve()])


def _function(test: str) -> str:
    return test.partition("[")[0].rpartition("::")[2]


def killing_tests(module: ast.Module, recorded: Set[str] = frozenset()) -> set[str]:
    """Return the tests of a module that are known, say so or do so, also by a helper or a fixture."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    known = {node.name: node for node in ast.walk(module) if isinstance(node, kinds)}

    def text(node: ast.AST, seen: set[str]) -> str:
        used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        used |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
        fresh = (used & known.keys()) - seen
        return ast.unparse(node) + "".join(text(known[name], seen | fresh) for name in sorted(fresh))

    return {
        name
        for name, node in known.items()
        if name.startswith("test")
        and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (name in recorded or KILL_NAMES.search(name) or KILLS.search(text(node, {name})))
    }
