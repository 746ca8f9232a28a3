"""Turn a collection of exercises with tests into Harbor folders, rows of `unit_tests` and rows of `jsonl`.

    python scripts/exercises.py SOURCE OUT [--package NAME] [--image IMAGE] [--limit N]

SOURCE is a checkout of a track of Exercism (folders with .meta/config.json), or, with --package, a repository
whose package NAME has its tests in tests/test_<topic>.py: of what each imports one module becomes a task, in
which the bodies of its functions are to be written again. OUT gets harbor/<id>/, unit_tests.jsonl and
rows.jsonl. IMAGE, with Python 3 and what the tests import (pytest), is what the Dockerfiles start from.
Nothing of SOURCE belongs in this repository.
"""

from __future__ import annotations

import argparse
import ast
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TEST_SH = """\
#!/bin/bash
cd /work
export PYTHONPATH=/work:/tests
python3 -m unittest -q {modules} && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""
TASK_TOML = 'version = "1.0"\n\n[agent]\ntimeout_sec = 300.0\n\n[verifier]\ntimeout_sec = 120.0\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """Files of the base, of the solution that differ, and hidden ones, as texts by path."""

    id: str
    prompt: str
    files: Mapping[str, str]
    gold: Mapping[str, str]
    tests: Mapping[str, str]


def exercism(source: Path) -> Iterator[Exercise]:
    for mark in sorted(source.glob("exercises/practice/*/.meta/config.json")):
        folder = mark.parent.parent
        named = json.loads(mark.read_text())["files"]
        docs = [
            folder / ".docs" / name
            for name in ("introduction.md", "instructions.md", "instructions.append.md")
        ]
        yield Exercise(
            id=folder.name,
            prompt="\n".join(path.read_text() for path in docs if path.is_file()),
            files={name: (folder / name).read_text() for name in named["solution"]},
            gold=dict(
                zip(
                    named["solution"],
                    ((folder / name).read_text() for name in named["example"]),
                    strict=False,
                )
            ),
            tests={
                path.name: path.read_text()
                for path in sorted(folder.glob("*.py"))
                if path.name not in named["solution"]
            },
        )


def package(source: Path, name: str) -> Iterator[Exercise]:
    """Of each test file the first module that it imports, or imports from, and whose functions it uses."""
    files = {
        path.relative_to(source).as_posix(): path.read_text()
        for path in sorted((source / name).rglob("*.py"))
    }
    for test in sorted(source.glob("tests/test_*.py")):
        text = test.read_text()
        imported, used = names_in(text)
        for path, code in files.items():
            module = path.removesuffix(".py").replace("/", ".")
            if path.endswith("__init__.py") or not imported & {module, module.rpartition(".")[0]}:
                continue
            blank = blanked(code, used)
            if blank:
                yield Exercise(
                    id=f"{test.stem.removeprefix('test_')}-{Path(path).stem}",
                    prompt=f"The functions of {path} have lost their bodies. Write them by their docstrings.",
                    files={**files, path: blank},
                    gold={path: code},
                    tests={f"tests/{test.name}": text},
                )
                break


def names_in(code: str) -> tuple[set[str], set[str]]:
    """Dotted names that a file imports or imports from, and all the names in it."""
    imported, used = set(), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
    return imported, used


def blanked(code: str, used: set[str]) -> str:
    """`code` with functions that raise; empty where none of them is among `used`."""
    tree = ast.parse(code)
    found = False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found = found or node.name in used
            head = node.body[:1] if ast.get_docstring(node) else []
            node.body = [*head, *ast.parse("raise NotImplementedError").body]
    return ast.unparse(tree) + "\n" if found else ""


def write(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def harbor(out: Path, one: Exercise, image: str) -> None:
    modules = [Path(name).stem for name in one.tests]
    solve = "".join(f"cp {shlex.quote(f'/solution/gold/{name}')} {shlex.quote(name)}\n" for name in one.gold)
    write(
        out / "harbor" / one.id,
        {
            "task.toml": TASK_TOML,
            "instruction.md": one.prompt,
            "environment/Dockerfile": f"FROM {image}\nWORKDIR /work\nCOPY files/ /work/\n",
            **{f"environment/files/{name}": text for name, text in one.files.items()},
            "tests/test.sh": TEST_SH.format(modules=" ".join(modules)),
            **{f"tests/{Path(name).name}": text for name, text in one.tests.items()},
            "solution/solve.sh": solve,
            **{f"solution/gold/{name}": text for name, text in one.gold.items()},
        },
    )


def rows(one: Exercise) -> tuple[dict[str, object], dict[str, object]]:
    """A row of `unit_tests` and one of `jsonl`."""
    entry, *more = one.gold
    unit = {
        "id": one.id,
        "prompt": one.prompt,
        "entry": entry,
        "starter": one.files[entry],
        "files": {name: text for name, text in one.files.items() if name != entry},
        "solution": one.gold[entry],
        "gold": {name: one.gold[name] for name in more},
        "tests": dict(one.tests),
        "timeout_s": 60.0,
    }
    plain = {
        "id": one.id,
        "prompt": one.prompt,
        "files": dict(one.files),
        "gold": dict(one.gold),
        "tests": dict(one.tests),
        "fail_to_pass": list(one.tests),
        "timeout_s": 60.0,
    }
    return unit, plain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--package", default="")
    parser.add_argument("--image", default="python:3.12-slim")
    parser.add_argument("--limit", type=int, default=0)
    given = parser.parse_args()
    found = list(package(given.source, given.package) if given.package else exercism(given.source))
    chosen = found[: given.limit or None]
    if not chosen:
        parser.error(f"{given.source} holds no exercise")
    given.out.mkdir(parents=True, exist_ok=True)
    both = [rows(one) for one in chosen]
    for name, place in (("unit_tests.jsonl", 0), ("rows.jsonl", 1)):
        (given.out / name).write_text("".join(json.dumps(pair[place]) + "\n" for pair in both))
    for one in chosen:
        harbor(given.out, one, given.image)
    print(f"{len(chosen)} of {len(found)} exercises in {given.out}")


if __name__ == "__main__":
    main()
