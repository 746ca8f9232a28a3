"""The example rows of docs/tasks.md load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from insitu.registry import shipped
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import format_of

DOCS = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
MARKS = {
    "entry_point": "humaneval",
    "test_code": "unit_tests",
    "verify": "terminus",
    "cases": "jsonl",
    "input_output": "apps",
}


def examples() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in re.findall(r"```json\n(.*?)```", DOCS, re.DOTALL):
        text = block.strip()
        while text:
            row, end = json.JSONDecoder().raw_decode(text)
            text = text[end:].lstrip()
            found += [(name, row) for mark, name in MARKS.items() if mark in row]
    return found


@pytest.mark.parametrize(("name", "row"), examples())
def test_an_example_row_loads(tmp_path: Path, name: str, row: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (item,) = RowSource(name, format_of(name), path).every()
    assert item.oracle.gold or item.oracle.solve


def test_every_source_is_described() -> None:
    assert {name for name, _ in examples()} == set(MARKS.values())
    assert not [name for name in shipped("tasks") if f"| `{name}` |" not in DOCS]
