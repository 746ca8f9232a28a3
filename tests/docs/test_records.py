"""Decision records are short, dated, and exist where they are cited; internals name files that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = {path.name[:4]: path for path in (ROOT / "docs" / "decisions").glob("*.md")}
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
HEADER = re.compile(r"# (\d{4}): .+\n\n\*\*Status\*\*: .+\. \*\*Date\*\*: \d{4}-\d\d-\d\d\.(.*)\n")
CITED = re.compile(
    r"(?i)\b(?:decision|record)s?[ \n]\[?\d{4}(?:(?:, | and )\d{4})*\b|decisions/\d{4}|\[\d{4}\]\("
)
ALONE = re.compile(r"\((0\d{3})(?:, (0\d{3}))*\)")
WORDS = 450


def cited(text: str) -> set[str]:
    """Return the numbers of records that a text cites, e.g. by "decision 0003" or, in a page, "(0003)"."""
    found = [*CITED.finditer(text), *ALONE.finditer(text)]
    return {number for match in found for number in re.findall(r"\b\d{4}\b", match[0])}


def texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [
        name for name in listed.stdout.split("\n") if name.endswith((".py", ".md", ".toml", ".sh", ".js"))
    ]
    own = Path(__file__).relative_to(ROOT).as_posix()
    return [ROOT / name for name in names if name != own and not name.startswith("tests/data/")]


def test_citations_are_recognised() -> None:
    text = (
        "decision 0001, (0002), decisions 0003, 0004 [0005](decisions/0005-x.md) docs/decisions/0006 (2026)"
    )
    assert cited(text) == {f"000{n}" for n in range(1, 7)}
    assert cited("Decision\n0007 [decision 0008](x)") == {"0007", "0008"}


@pytest.mark.slow
def test_every_citation_has_its_record() -> None:
    dead = {
        f"{path.relative_to(ROOT)}: {number}"
        for path in texts()
        if path.is_file()
        for number in cited(path.read_text(encoding="utf-8")) - RECORDS.keys()
    }
    assert dead == set()


@pytest.mark.parametrize("path", RECORDS.values(), ids=lambda path: path.name)
def test_a_record_is_one_page_with_its_state(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    header = HEADER.match(text)
    assert header
    assert header[1] == path.name[:4]
    assert re.fullmatch(r"( \*\*Supersede(s|d by)\*\*: \d{4}(, \d{4})*\.)*", header[2])
    assert len(text.split()) <= WORDS


@pytest.mark.parametrize("page", [*INTERNALS, *RECORDS.values()], ids=lambda page: page.name)
def test_a_page_of_internals_names_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w-]+(?:/[\w.-]+)*/[\w.-]+\.(?:py|js|md)|\w+\.py)`", text)) - {"app.py"}
    known = [ROOT, ROOT / "src", ROOT / "src" / "insitu", *(ROOT / "packages").glob("*/src")]
    assert {name for name in named if not any((folder / name).exists() for folder in known)} == set()
