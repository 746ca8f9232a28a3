"""A knob that changes nothing is an error: every key of the configuration is read somewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import insitu
from insitu.config import dotted_keys, table_classes
from insitu.config.tasks import LAYERS

SOURCE = Path(insitu.__file__).parent
TABLES = table_classes()
CLASSES = {kind.__name__: table for table, kind in TABLES.items()}

SHARED = {
    f"{table}.{key}"
    for table, kind in TABLES.items()
    for key in kind.model_fields
    if key not in kind.__annotations__
}
"""Keys inherited from a class that other packages use without their table."""

ALIASES = {"task_set": "tasks"}
"""Attributes of the configuration that return one of its tables."""
FIXED: set[str] = {f"{table}.{key}" for table in ("tasks", "eval") for key in LAYERS} | {
    "eval.every_steps",
    "run.profile",
}
"""Keys that `config.arms` reads in a loop, and the one that is read before there are tables."""


def bound(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets of assignments and loops with their values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, (ast.For, ast.comprehension)):
            yield node.target, node.iter


def keys_read(tree: ast.AST) -> Iterator[str]:
    """Yield the keys that a file reads.

    `x.table.key`; `name.key` where the file has `name = x.table`, `for name in x.table` or an argument of its
    class.
    """
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name):
            names[node.arg] = CLASSES.get(node.annotation.id, names.get(node.arg, ""))
    for target, value in bound(tree):
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
            table = ALIASES.get(value.attr, value.attr)
            names |= {target.id: table} if table in TABLES else {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield f"*.{node.attr}"
            if isinstance(node.value, ast.Attribute):
                yield f"{ALIASES.get(node.value.attr, node.value.attr)}.{node.attr}"
            elif isinstance(node.value, ast.Name):
                yield f"{names.get(node.value.id, '')}.{node.attr}"


def without_checks(path: Path) -> ast.Module:
    """A parsed module; of the configuration only what is no validator."""
    tree = ast.parse(path.read_text())
    if path.parent == SOURCE / "config":
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                node.body = [part for part in node.body if "model_validator" not in ast.dump(part)]
    return tree


@pytest.mark.slow
def test_every_key_is_read() -> None:
    # A key that only its own validator looks at changes nothing.
    folders = [SOURCE, *(SOURCE.parents[1] / "packages").glob("*/src")]
    read = {
        key for folder in folders for path in folder.rglob("*.py") for key in keys_read(without_checks(path))
    }
    read |= {name for name in SHARED if f"*.{name.partition('.')[2]}" in read}
    assert set(dotted_keys()) - read - FIXED == set()


def test_the_search_can_tell() -> None:
    source = "t = config.train\nprint(t.lr, c.run.seed, other.lr2)\ndef f(a: SftTable): return a.per_task"
    read = set(keys_read(ast.parse(source)))
    assert {"train.lr", "run.seed", "sft.per_task"} <= read
    assert "train.lr2" not in read
