"""Each code block of the README and the documentation works, or names why it cannot run.

Python runs, TOML is a valid configuration, JSON parses, and every `insitu` command line parses. A block below
`<!-- test: skip: REASON -->` is only parsed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from insitu.cli.options import parse
from insitu.config import Config, load_config
from sources import SOURCES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- test: skip: (?P<skip>.+?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced code block."""

    place: str
    language: str
    text: str
    skip: str


def blocks(*languages: str) -> list[pytest.param]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
            if match["language"] in languages:
                block = Block(
                    place=place, language=match["language"], text=match["text"], skip=match["skip"] or ""
                )
                # These train and collect rollouts.
                long = page.name in ("python.md", "README.md") and match["language"] == "python"
                found.append(pytest.param(block, id=place, marks=pytest.mark.full if long else ()))
    return found


def test_every_language_is_tested() -> None:
    found = {match["language"] for page in PAGES for match in BLOCK.finditer(page.read_text())}
    assert found <= {"python", "toml", "json", "sh"}


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml_is_a_configuration(block: Block) -> None:
    tables = tomllib.loads(block.text)
    if block.skip or "project" in tables:  # the latter is a pyproject.toml
        return
    assert tables.keys() <= Config.model_fields.keys(), "mark a block that is no configuration"
    load_config(tables=tables)


@pytest.mark.parametrize("block", blocks("json"))
def test_json_parses(block: Block) -> None:
    rest = block.text.strip()
    while rest:  # one value, or several as in JSONL
        _, end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end:].strip()


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_parse(block: Block) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["insitu"]:
            parse(words[1:])
        elif words and words[0].startswith("scripts/"):
            assert os.access(ROOT / words[0], os.X_OK), words[0]


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block: Block, tmp_path: Path) -> None:
    compile(block.text, block.place, "exec")
    if block.skip:
        return
    for name in ("examples", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "block.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "block.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
