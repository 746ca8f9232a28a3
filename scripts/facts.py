#!/usr/bin/env python3
"""Measure size, names and words of the source; `--check` compares them with the budgets in pyproject.toml."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
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
    "attempt", "collect", "runtime", "storage", "plan",
)  # fmt: skip
"""Folders and modules of the core from a task to a step's plan; all of `train` follows."""
DOWNTIME = re.compile(r"\b(away_s|AwayTime|away_since|no_time|engine_downtime\w*|Downtime)\b")
"""Names for the time in which an engine is down."""
BANNED = (
    "told", "retold", "anew", "lent", "lends", "hears", "woke", "nobody", "means nothing with", "of no use",
    "as it is there", "what is left of",
)  # fmt: skip
"""Words that an engineer would not write or search for, in code, docs and messages."""
WHOLE = ("benchmarks", "contract", "docs", "e2e", "faults", "frozen", "full", "scripts", "suites")
"""Folders of tests of the whole program: the others are found by the name of the module they test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One parsed module."""

    path: Path
    name: str
    """Dotted: `insitu.config.load`."""
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """Short name of its package: `core`, or `train` of insitu_train."""
        return self.name.split(".")[0].partition("_")[2] or "core"

    @property
    def folder(self) -> str:
        """Folder or module right below its package."""
        return (*self.name.split("."), "")[1]


def packages(root: Path = ROOT) -> list[Path]:
    """Return the folders of the import packages, that of the core first."""
    return [root / "src" / "insitu", *sorted((root / "packages").glob("insitu-*/src/insitu_*"))]


def sources(folders: list[Path]) -> list[Source]:
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            text = path.read_text(encoding="utf-8")
            found.append(Source(path=path, name=name, text=text, tree=ast.parse(text)))
    return found


def required(package: str, root: Path = ROOT) -> set[str]:
    """Return the packages that one may import: those that its pyproject.toml requires."""
    folder = root if package == "core" else root / "packages" / f"insitu-{package}"
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = (re.split(r"[=<>~!;\[ ]", text)[0] for text in project["dependencies"])
    return {name.partition("-")[2] or "core" for name in names if name.partition("-")[0] == "insitu"}


def lines_per_package(modules: list[Source]) -> dict[str, int]:
    lines: Counter[str] = Counter()
    for module in modules:
        lines[module.package] += module.text.count("\n")
    return dict(sorted(lines.items()))


def arrows(modules: list[Source]) -> dict[str, dict[str, list[str]]]:
    """Return which package imports which, and by which imports."""
    found: dict[str, dict[str, list[str]]] = {module.package: {} for module in modules}
    by_name = {module.name: module for module in modules}
    for module in modules:
        for other in sorted(set(imports(module))):
            target = by_name.get(other) or by_name.get(other.rpartition(".")[0])
            if target and target.package != module.package:
                found[module.package].setdefault(target.package, []).append(f"{module.name} -> {target.name}")
    return found


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


def banned_words(files: list[Path], words: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the places of each word in `files` as path:line; words without a place are omitted.

    A quoted word is a name, e.g. the user "nobody".
    """
    pattern = re.compile(rf"(?<![\w\"'`-])({'|'.join(map(re.escape, words))})(?![\w\"'`-])", re.I)
    places = defaultdict(list)
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for word in pattern.findall(line):
                places[word.lower()].append(f"{path.relative_to(ROOT)}:{number}")
    return dict(sorted(places.items()))


def public_names(modules: list[Source], folders: tuple[str, ...]) -> int:
    """Return the number of public classes and module-level functions; methods are not counted."""
    return sum(
        not node.name.startswith("_")
        for module in modules
        if (module.package == "train" or (module.package == "core" and module.folder in folders))
        and not any(part.startswith("_") for part in module.name.split("."))
        for node in module.tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )


def imports(module: Source) -> Iterator[str]:
    """Yield the modules, or names in them, that it imports at run time."""
    guarded = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def folder_cycles(modules: list[Source]) -> list[list[str]]:
    """Return pairs of folders that import each other, at each depth among the children of one folder."""
    edges = set()
    names = {module.name for module in modules}
    for module in modules:
        mine = module.name.split(".")
        for other in imports(module):
            target = other if other in names else other.rpartition(".")[0]
            theirs = target.split(".")
            if theirs[0] != mine[0]:
                continue  # arrows between packages
            common = 0
            while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
                common += 1
            if common < len(mine) - 1 and common < len(theirs) - 1:  # both lie in folders that differ
                edges.add((".".join(mine[: common + 1]), ".".join(theirs[: common + 1])))
    return sorted([a, b] for a, b in edges if a < b and (b, a) in edges)


def evaluation_systems(modules: list[Source]) -> int:
    """Return how many ways lead to rollouts that a resumed run takes up again.

    Counted by shape: classes that keep and give back a phase (`collect.options.ResumableSink`), and callers
    of `open_groups`, which alone takes such a class; whichever are more.
    """
    sinks = callers = 0
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
                sinks += {"put", "held", "tried"} <= {getattr(item, "name", "") for item in node.body}
            callers += isinstance(node, ast.Call) and ast.unparse(node.func).endswith("open_groups")
    return max(sinks, callers)


def config_keys(package: Path) -> list[str]:
    """Return the keys of the configuration as `table.key`."""
    return sorted(
        f"{name}.{key}" for name, table in config_tables(package).items() for key in table.model_fields
    )


def undocumented_keys(keys: list[str]) -> list[str]:
    """Return the keys that no example or profile sets and no page written by hand names.

    A page names `table.key`, sets it in a TOML block, or has `key` alone where one table has that name.
    """
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "internals").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in pages if path.name != "results.md"]
    files = [*(ROOT / "examples").rglob("*.toml"), *(ROOT / "src").rglob("profiles/*.toml")]
    blocks = [block for text in texts for block in re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)]
    found = {key for text in (*blocks, *(path.read_text() for path in files)) for key in keys_set(text)}
    found |= {name for text in texts for name in re.findall(r"(?<![\w.])[a-z]+\.\w+", text)}
    alone = {name for text in texts for name in re.findall(r"`(\w+)(?: = [^`]*)?`", text)}
    often = Counter(key.rpartition(".")[2] for key in keys)
    return [
        key
        for key in keys
        if key not in found and not ((name := key.rpartition(".")[2]) in alone and often[name] == 1)
    ]


def keys_set(text: str) -> Iterator[str]:
    """Yield what a TOML text sets, as table.key; in tables of tables the innermost, e.g. limits.wall_s."""
    levels = [tomllib.loads(text)]
    while levels:
        for name, value in levels.pop().items():
            for table in value if isinstance(value, list) else [value]:
                if isinstance(table, dict):
                    yield from (f"{name}.{key}" for key in table)
                    levels.append(table)


def config_tables(package: Path) -> dict[str, Any]:
    """Return the class of each table of the configuration."""
    sys.path.insert(0, str(package.parent))
    tables: dict[str, Any] = __import__(f"{package.name}.config", fromlist=["table_classes"]).table_classes()
    return tables


def keys_declared_twice(modules: list[Source], declared: dict[str, Any]) -> dict[str, list[str]]:
    """Return classes with four or more fields of a table which they do not share by inheritance.

    Results of a step are not options, whatever their names.
    """
    bases = {base.__name__ for table in declared.values() for base in table.__mro__}
    tables = {name: set(table.model_fields) for name, table in declared.items()}
    found = {}
    for module in modules:
        if (module.package, module.folder) == ("core", "config"):
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef) or node.name in bases or node.name.endswith("Result"):
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


def callers(modules: list[Source], function: str) -> list[str]:
    """Return the modules that call a function by its bare name."""
    return sorted(
        module.name
        for module in modules
        if any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
            for node in ast.walk(module.tree)
        )
    )


def first_import_cpu_s() -> float:
    """Return the CPU seconds of a new Python that asks for `insitu.train` (bytecode compiled before)."""
    code = "import insitu, os; insitu.train; t = os.times(); print(t.user + t.system)"
    command = [sys.executable, "-c", code]
    return float([subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)][1])


def python_examples() -> int:
    """Return the number of Python blocks in README and docs that a test runs (tests/docs)."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    block = re.compile(r"^(<!-- test: skip: .+? -->\n)?```python$", re.M)
    return sum(not match[1] for page in pages for match in block.finditer(page.read_text(encoding="utf-8")))


def tests_without_a_module(modules: list[Source], tests: Path) -> list[str]:
    """Return the test files that are not named test_MODULE[_WHAT].py after a module or package."""
    names = {name for module in modules for name in module.name.split(".")}
    found = []
    for path in tests.rglob("test_*.py"):
        parts = path.stem.split("_")[1:]
        begins = {"_".join(parts[:end]) for end in range(1, len(parts) + 1)}
        if path.relative_to(tests).parts[0] not in WHOLE and not begins & names:
            found.append(path.relative_to(tests).as_posix())
    return sorted(found)


def upward(found: dict[str, dict[str, list[str]]], allowed: dict[str, set[str]]) -> list[str]:
    """Return the imports that lead to a package which the importing one may not know."""
    return [
        line
        for name, others in found.items()
        for other, lines in others.items()
        if other not in allowed[name]
        for line in lines
    ]


def facts(root: Path = ROOT) -> dict[str, Any]:
    folders = packages(root)
    modules = sources(folders)
    keys = config_keys(folders[0])
    length, where = longest_function(modules)
    prose = [
        *(module.path for module in modules),
        root / "README.md",
        *(root / "docs").rglob("*.md"),
        *(path for folder in ("tests", "benchmarks", "examples") for path in (root / folder).rglob("*.py")),
    ]
    lines = lines_per_package(modules)
    found = arrows(modules)
    return {
        "lines": lines,
        "arrows": {name: sorted(others) for name, others in found.items()},
        "upward": upward(found, {name: required(name, root) for name in found}),
        "lines_in_all": sum(lines.values()),
        "files": len(modules),
        "longest_function": {"lines": length, "name": where},
        "classes_used_twice": classes_used_twice(modules),
        "banned_words": banned_words(prose, BANNED),
        "public_names_on_train_path": public_names(modules, TRAIN_PATH),
        "config_keys": len(keys),
        "undocumented_keys": undocumented_keys(keys),
        "config_keys_declared_twice": keys_declared_twice(modules, config_tables(folders[0])),
        "files_that_know_of_engine_downtime": sum(bool(DOWNTIME.search(module.text)) for module in modules),
        "evaluation_systems": evaluation_systems(modules),
        "folder_cycles": folder_cycles(modules),
        "run_openers": callers(modules, "log_to"),
        "tests_without_a_module": tests_without_a_module(modules, root / "tests"),
        "python_examples": python_examples(),
        "records": len(list((root / "docs" / "decisions").glob("*.md"))),
        "readme_bytes": (root / "README.md").stat().st_size,
    }


def over_budget(found: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """Return one line for each fact that exceeds its budget, the table `tool.insitu` of pyproject.toml."""
    problems = [
        f"{package}: {count} lines, at most {budget['lines'][package]} (tool.insitu.lines in pyproject.toml)"
        for package, count in found["lines"].items()
        if count > budget["lines"][package]
    ]
    problems += [f"not required by its package: {line}" for line in found["upward"]]
    for name, places in found["classes_used_twice"].items():
        problems.append(f"class {name} is defined in {', '.join(places)}")
    for word, places in found["banned_words"].items():
        problems += [f"{place}: banned word: {word}" for place in places]
    problems += [f"folders {a} and {b} import each other" for a, b in found["folder_cycles"]]
    if found["evaluation_systems"] > 1:
        problems.append(f"{found['evaluation_systems']} ways to collect an evaluation, at most 1")
    if len(found["run_openers"]) > 1:
        problems.append(f"runs are opened in {', '.join(found['run_openers'])}: use storage.open_run")
    problems += [f"{key}: in no example and on no page of docs/" for key in found["undocumented_keys"]]
    if found["config_keys"] > budget["config_keys"]:
        problems.append(f"configuration: {found['config_keys']} keys, at most {budget['config_keys']}")
    problems += [f"tests/{path}: no module of this name" for path in found["tests_without_a_module"]]
    if found["records"] > budget["records"]:
        problems.append(f"docs/decisions: {found['records']} records, at most {budget['records']}")
    if found["readme_bytes"] > budget["readme_bytes"]:
        problems.append(f"README.md: {found['readme_bytes']} bytes, at most {budget['readme_bytes']}")
    return problems


def wrong_extras(project: dict[str, Any]) -> list[str]:
    """Return one line for each extra that is no list: tool.insitu.lines has keys of the same names."""
    extras = project["project"]["optional-dependencies"]
    return [
        f"pyproject.toml: extra {name} is no list" for name, held in extras.items() if type(held) is not list
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a budget is exceeded")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = facts()
    if arguments.check:
        problems = [*over_budget(found, project["tool"]["insitu"]), *wrong_extras(project)]
        print("\n".join(problems))
        return int(bool(problems))
    found["first_import_cpu_s"] = first_import_cpu_s()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            shown = len(value) if isinstance(value, dict | list) and key != "longest_function" else value
            print(f"{key:36} {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
