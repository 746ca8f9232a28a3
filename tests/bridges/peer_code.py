"""Code of other trainers that is too large to install: functions of their files, run alone.

scripts/test-bridges names the folders of the files: wheels and checkouts at fixed versions.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def source_file(variable: str, file: str) -> Path:
    """Return a file of the folder that an environment variable names; skip without it."""
    source = os.environ.get(variable)
    if not source:
        pytest.skip(f"{variable} names no folder with {file}")
    return Path(source, file)


def taken(variable: str, file: str, names: Iterable[str], **namespace: Any) -> dict[str, Any]:
    """Run classes, functions and methods of a file without what its module imports."""
    names = set(names)
    tree = ast.parse(source_file(variable, file).read_text())
    found = [node for node in ast.walk(tree) if getattr(node, "name", "") in names]
    assert len(found) == len(names), f"{file} has {[getattr(node, 'name', '') for node in found]}"
    for node in found:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        node.decorator_list = [each for each in node.decorator_list if "dataclass" in ast.unparse(each)]
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                inner.returns = None
                for argument in (*inner.args.args, *inner.args.kwonlyargs):
                    argument.annotation = None
    tree.body = list(found)
    exec(compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True), namespace)
    return namespace


def prime_types() -> Any:
    """Return prime-rl's module of the types on its wire."""
    path = source_file("INSITU_PRIME_SRC", "src/prime_rl/transports/rollouts/types.py")
    spec = importlib.util.spec_from_file_location("prime_types", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prime_types"] = module
    spec.loader.exec_module(module)
    return module
