"""The pages name keys and files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from insitu.cli.options import commands
from insitu.config import RENAMED, dotted_keys, table_classes
from insitu_view.tracking.names import table as metrics

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("envs/*/*.md")} - {ROOT / "CHANGELOG.md"}
)
KNOWN = {key.rpartition(".")[2] for key in dotted_keys()} | table_classes().keys()
NO_KEYS = {"reward.txt", "reward.json", "rollout.group"}
"""Files, and an attribute of a Python object."""
FORMER = {key.rpartition(".")[2] for key in RENAMED} - KNOWN - {name for _, name, _ in metrics()}
FORMER -= {"url", "host"}
"""Metrics, and fields of other programs, may have the name that a key had."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_key_by_its_former_name_and_no_file_that_is_missing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    quoted = set(re.findall(r"`(?:\w+\.)?(\w+)(?: = [^`]*)?`", text))
    assert quoted & FORMER == set()
    # A folder that is not here is another project's.
    named = set(re.findall(r"(?<![\w/.])(?:tests|scripts|benchmarks|examples)/[\w./-]*/[\w-]+\.py", text))
    missing = {name for name in named if not (ROOT / name).exists() and (ROOT / name).parent.is_dir()}
    assert missing == set()
    assert "(reference/" in text or not re.search(r"`reference/", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_keys_and_choices_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+\.\w+)(?: = [^`]*)?`", text)) - NO_KEYS
    of_tables = {name for name in named if name.partition(".")[0] in table_classes()}
    assert of_tables - set(dotted_keys()) == set()
    wrong = set()
    for table, key, value in re.findall(r'`(\w+)\.(\w+) = "(\w*)"`', text):
        field = table_classes()[table].model_fields[key].annotation
        if get_origin(field) is Literal and value not in get_args(field):
            wrong.add(f"{table}.{key} = {value}")
    assert wrong == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_commands_that_exist(page: Path) -> None:
    named = set(re.findall(r"`insitu ([a-z][a-z-]*)", page.read_text(encoding="utf-8")))
    assert named - {*commands(), "mine"} == set(), "mine is the reader's own"
