"""Each Python block of docs/bridges.md that this file is named for runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from insitu_bridges.targets import TARGETS

PAGE = Path(__file__).parents[2] / "docs" / "bridges.md"
BLOCK = re.compile(
    r"^<!-- test: skip: ([^\n]*tests/bridges/test_targets_page.py[^\n]*) -->\n```python\n(.*?)^```$",
    re.M | re.S,
)
BLOCKS = BLOCK.findall(PAGE.read_text())


def _run(text: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    exec(compile(text, "docs/bridges.md", "exec"), {})


@pytest.mark.parametrize("text", [text for why, text in BLOCKS if "scripts/test-bridges" not in why])
def test_blocks_run(text: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(text, run, tmp_path, monkeypatch)


@pytest.mark.bridge
@pytest.mark.parametrize("text", [text for why, text in BLOCKS if "scripts/test-bridges" in why])
def test_blocks_with_packages_run(
    text: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(text, run, tmp_path, monkeypatch)


def test_the_page_names_every_target() -> None:
    assert [name for name in TARGETS if f"`{name}`" not in PAGE.read_text()] == []


def test_there_are_blocks_of_both_kinds() -> None:
    assert len(BLOCKS) == 6
