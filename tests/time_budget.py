"""Order and cut the long tests to a time budget: what a change touches first, then a random rest.

A test file is touched directly by its own change and by that of a module or a file that it names, and by way
of others by that of anything these import; what starts `python -m insitu` imports all that its verbs do.
With INSITU_FULL_BUDGET_S set, no test starts after so many seconds, or twice as many where it is touched
directly (a change of names touches everything), and the summary names those left out. One that takes minutes
(`takes`) does not start where it would end later. Continuous integration sets it for the tests marked `full`
or `fuzz`; `make test-full` runs everything.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

CHANGE_HOURS = 6
"""How far before the newest commit the change under test may begin."""
TOUCHED_SHARE = 2.0
"""Times the budget in which a test that is touched directly may start."""
ROOT = Path(__file__).parents[1]
PUBLIC = ROOT / "src" / "insitu" / "__init__.py"
REGISTRY = PUBLIC.with_name("registry.py")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def changed_files() -> set[str]:
    """Return the paths of uncommitted changes, and of the commits of the last hours before the newest one."""
    newest = int(git("log", "-1", "--format=%ct") or 0)
    since = newest - CHANGE_HOURS * 3600
    committed = git("log", f"--since={since}", "--format=", "--name-only").split()
    uncommitted = [line[3:] for line in git("status", "--porcelain").splitlines()]
    return {*committed, *uncommitted}


@cache
def modules() -> Mapping[str, Path]:
    """Files by what tests and modules call them: insitu.x.y, benchmarks.x; helpers of tests by their stem."""
    found = {path.stem: path for path in (ROOT / "tests").rglob("*.py") if not path.stem.startswith("test_")}
    beside = [(path.name, path.parent) for path in (ROOT / "packages").glob("*/src/insitu_*")]
    for top, folder in (("insitu", ROOT / "src"), ("benchmarks", ROOT), *beside):
        for path in (folder / top).rglob("*.py"):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def named(file: Path) -> frozenset[Path]:
    """Files that a Python file imports or names, as in `[sys.executable, "-m", "insitu"]`; what starts a
    package as a program names its __main__."""
    text, known = file.read_text(), modules()
    if file == REGISTRY:  # what the packages beside the core declare is found by name
        text += "".join(path.read_text() for path in sorted((ROOT / "packages").glob("*/pyproject.toml")))
    names = set(re.findall(r"\b(?:insitu\w*|benchmarks)(?:\.\w+)+", text))
    names |= {f"benchmarks.{name}" for name in re.findall(r'"-m", "benchmarks", "(\w+)"', text)}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    longest = {_longest(name, known) for name in names}
    started = re.findall(r'"-m", "([\w.]+)"', text)
    longest |= {f"{name}.__main__" for name in started if f"{name}.__main__" in known}
    paths = {ROOT / path for path in re.findall(r"\bscripts/[\w./-]+\w", text)}
    return frozenset(known[name] for name in longest if name in known) | paths


def _longest(name: str, known: Mapping[str, Path]) -> str:
    """The longest part of a dotted name that is a module."""
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name


@cache
def reached(file: Path) -> Mapping[Path, int]:
    """All that a file names, and what these name, with the number of steps to each."""
    seen: dict[Path, int] = {}
    waiting = deque([(file, 0)])
    while waiting:
        path, steps = waiting.popleft()
        if path in seen:
            continue
        seen[path] = steps
        # The public module loads its names at first use: only a test that names it reaches what they are.
        if path == PUBLIC and PUBLIC not in named(file):
            continue
        if path.suffix == ".py" and path.is_file():
            waiting += ((other, steps + 1) for other in named(path))
            if "src" in path.relative_to(ROOT).parts:
                waiting.append((path.parent / "__init__.py", steps + 1))
    return seen


def distance(test: Path, changed: set[str]) -> int:
    """0 = touched directly, 1 = by way of others, 2 = not touched."""
    paths = {ROOT / path for path in changed}
    if paths & {test, *named(test)}:
        return 0
    return 1 if paths & reached(test).keys() else 2


def order(files: Iterable[Path], changed: set[str], seed: str) -> list[Path]:
    """The nearest files first; of equal ones an order drawn from `seed`."""
    drawn = sorted(files)
    random.Random(seed).shuffle(drawn)
    return sorted(drawn, key=lambda file: distance(file, changed))


class TimeBudget:
    """A pytest plug-in that starts no further test after `seconds`, or later if touched directly."""

    def __init__(self, seconds: float, touched_share: float = TOUCHED_SHARE) -> None:
        self._seconds = seconds
        self._touched_share = touched_share
        self._started = 0.0
        self._distances: dict[Path, int] = {}
        self._left_out: Counter[tuple[int, str]] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        changed = changed_files()
        files = order({item.path for item in items}, changed, git("rev-parse", "HEAD"))
        self._distances = {file: distance(file, changed) for file in files}
        items.sort(key=lambda item: files.index(item.path))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        self._started = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        away = self._distances.get(item.path, 2)
        seconds = self._seconds if away else self._seconds * self._touched_share
        marked = item.get_closest_marker("takes")
        if time.monotonic() - self._started + (marked.args[0] if marked else 0) > seconds:
            self._left_out[away, item.location[0]] += 1
            pytest.skip(f"left out after {seconds:.0f} s: make test-full runs it")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for (away, file), count in sorted(self._left_out.items()):
            touched = "" if away == 2 else ", which the change touches"
            terminalreporter.write_line(f"left out: {count} of {file}{touched}")
