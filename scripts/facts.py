"""Measure the source: size, names and words. `scripts/facts.py --json` prints what budgets limit."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRAIN_PATH = (
    "types", "config", "tasks", "sandbox", "agents", "gateway", "chat", "engines", "capture", "grading",
    "attempt", "collect", "runtime", "storage", "training",
)  # fmt: skip
"""Packages and modules from a task to a trained step."""
DOWNTIME = re.compile(r"\b(away_s|AwayTime|away_since|no_time|engine_downtime\w*|Downtime)\b")
"""Names that deal with the time in which an engine is down."""
BANNED = (
    "told", "retold", "anew", "lent", "lends", "hears", "woke", "nobody", "means nothing with", "of no use",
    "as it is there", "what is left of",
)  # fmt: skip
"""Words that a reader of this field stumbles over, in code, docs and messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One parsed module of the package."""

    path: Path
    name: str
    """Dotted, without the package's own name: `train.loop`."""
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.split(".")[0]


def sources(package: Path) -> list[Source]:
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__") or "__init__"
        text = path.read_text(encoding="utf-8")
        found.append(Source(path=path, name=name, text=text, tree=ast.parse(text)))
    return found


def lines_per_package(modules: list[Source]) -> dict[str, int]:
    lines: Counter[str] = Counter()
    for module in modules:
        lines[module.package] += module.text.count("\n")
    return dict(sorted(lines.items()))


def longest_function(modules: list[Source]) -> tuple[int, str]:
    lengths = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{module.name}.{node.name}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return max(lengths)


def classes_used_twice(modules: list[Source]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def banned_words(files: list[Path], words: tuple[str, ...]) -> dict[str, int]:
    """How often each word stands in `files`; those that do not stand there are left out."""
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    counts = {word: len(re.findall(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text, re.I)) for word in words}
    return {word: count for word, count in counts.items() if count}


def public_names(modules: list[Source], packages: tuple[str, ...]) -> int:
    """Public classes and module-level functions, and public methods are not counted."""
    return sum(
        not node.name.startswith("_")
        for module in modules
        if module.package in packages and not any(part.startswith("_") for part in module.name.split("."))
        for node in module.tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )


def imports(module: Source, package: str) -> Iterator[str]:
    """Modules of the same package that it imports at run time, dotted, without the package's own name."""
    guarded = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            base = (node.module or "").split(".")[1:]
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == package
            )


def folder_cycles(modules: list[Source], package: str) -> list[list[str]]:
    """Pairs of folders that import each other, at each depth among the children of one folder."""
    edges = set()
    names = {module.name for module in modules}
    for module in modules:
        mine = module.name.split(".")
        for other in imports(module, package):
            target = other if other in names else other.rpartition(".")[0]
            theirs = target.split(".")
            common = 0
            while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
                common += 1
            if common < len(mine) - 1 and common < len(theirs) - 1:  # both lie in folders that differ
                edges.add((".".join(mine[: common + 1]), ".".join(theirs[: common + 1])))
    return sorted([a, b] for a, b in edges if a < b and (b, a) in edges)


def config_keys(package: Path) -> list[str]:
    """`table.key` of the configuration."""
    sys.path.insert(0, str(package.parent))
    name = package.name
    config = __import__(f"{name}.config", fromlist=["Config"]).Config
    found = []
    for table, info in config.model_fields.items():
        fields = getattr(info.annotation, "model_fields", {})
        found += [f"{table}.{key}" for key in fields]
    return sorted(found)


def keys_declared_twice(modules: list[Source], keys: list[str]) -> dict[str, list[str]]:
    """Dataclasses outside of the configuration that share four or more field names with one of its tables."""
    tables = defaultdict(set)
    for key in keys:
        table, _, name = key.partition(".")
        tables[table].add(name)
    found = {}
    for module in modules:
        if module.package == "config":
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            fields = {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
            for table, names in tables.items():
                if len(shared := sorted(fields & names)) >= 4:
                    found[f"{module.name}.{node.name}"] = [f"{table}.{name}" for name in shared]
    return dict(sorted(found.items()))


def facts(package: Path) -> dict[str, Any]:
    modules = sources(package)
    keys = config_keys(package)
    length, where = longest_function(modules)
    prose = [
        *(module.path for module in modules),
        ROOT / "README.md",
        *(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts),
    ]
    lines = lines_per_package(modules)
    return {
        "lines": lines,
        "lines_in_all": sum(lines.values()),
        "files": len(modules),
        "longest_function": {"lines": length, "name": where},
        "classes_used_twice": classes_used_twice(modules),
        "banned_words": banned_words(prose, BANNED),
        "public_names_on_train_path": public_names(modules, TRAIN_PATH),
        "config_keys": len(keys),
        "config_keys_declared_twice": keys_declared_twice(modules, keys),
        "files_that_know_of_engine_downtime": sum(bool(DOWNTIME.search(module.text)) for module in modules),
        "folder_cycles": folder_cycles(modules, package.name),
        "readme_bytes": (ROOT / "README.md").stat().st_size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    found = facts(ROOT / "src" / name)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            shown = len(value) if isinstance(value, dict | list) and key != "longest_function" else value
            print(f"{key:36} {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
