"""Terminus rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import swe_rows as rows

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowSource
from insitu.tasks.factory import format_of
from insitu.types import Limits


def load(tmp_path: Path, *given: dict[str, Any]) -> list[Item]:
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    limits = LoadOptions(limits=Limits(wall_s=9, max_calls=99))
    return list(RowSource("terminus", format_of("terminus"), path, limits).every())


def test_a_row_brings_commands_and_limits(tmp_path: Path) -> None:
    (item,) = load(tmp_path, rows.terminus())
    task = item.task
    assert task.setup.commands == ("printf 'a b c' > in.txt",)
    assert (task.limits.wall_s, task.limits.max_calls, task.limits.max_call_tokens) == (45.0, 6, 256)
    assert (task.grading.runner, task.grading.reward) == ("command", "fraction")
    assert [c.command for c in item.oracle.tests.checks] == ["test -f out.txt", 'grep -q "^3$" out.txt']
    assert b"wc -w" in item.oracle.solve["solve.sh"].content
    assert "grep" not in repr(task)
    assert "wc -w" not in repr(task)


def test_other_spellings(tmp_path: Path) -> None:
    verify = [{"command": "true", "weight": 3.0, "name": "easy"}, "false"]
    row = rows.terminus(verify=verify, setup="mkdir a", solution=[])
    del row["id"]
    other = rows.terminus(verify='["true"]', prompt="Other.", setup=[])
    first, second = load(tmp_path, row, other)
    assert first.task.id == "words-1"
    assert [(c.name, c.weight) for c in first.oracle.tests.checks] == [("easy", 3.0), ("verify 2", 1.0)]
    assert first.task.setup.commands == ("mkdir a",)
    assert first.oracle.solve == {}
    assert second.oracle.tests.checks[0].command == "true"


def test_what_a_row_has_outside_of_the_work_folder_is_graded(tmp_path: Path) -> None:
    named, home, other, inside = load(
        tmp_path,
        rows.terminus(id="1", roots=["/srv/www", "/etc"]),
        rows.terminus(id="2", verify=["grep -qx 42 /home/user/work/answer.txt"]),
        rows.terminus(id="3", verify=["test -f /home/user-2/answer.txt"]),
        rows.terminus(id="4", verify=["test -f /home/user/work/answer.txt"], workdir="/home/user/work"),
    )
    assert named.task.setup.roots == ("/srv/www", "/etc")
    assert home.task.setup.roots == ("/home/user",)
    assert other.task.setup.roots == inside.task.setup.roots == ()
    assert len({item.task.content_hash for item in (named, home, other)}) == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"roots": ["etc"]}, "root 'etc' is not an absolute folder in normal form"),
        ({"roots": ["/"]}, "root '/' is not an absolute folder"),
        ({"roots": ["//etc"]}, "root '//etc' is not an absolute folder"),
        ({"roots": ["/etc:/host"]}, "root '/etc:/host' is not an absolute folder"),
        ({"roots": ["/srv", "/srv"]}, "root /srv lies in another one"),
        ({"roots": ["/etc", "/etc/app"]}, "root /etc/app lies in another one"),
        ({"verify": []}, "row words: verify is empty"),
        ({"verify": [3]}, "row words: verify: must be a text or a list of texts"),
        ({"verify": [{"command": "x", "weight": 0}]}, "verify.0.weight: Input should be greater than 0"),
        ({"max_turns": 0}, "max_turns: Input should be greater than or equal to 1"),
        ({"max_turns": "6"}, "max_turns: Input should be a valid integer"),
        ({"workdir": "work"}, "is not an absolute path"),
        ({"sandbox_image": "a b"}, "is not an image reference"),
    ],
)
def test_rows_that_cannot_be_graded(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(tmp_path, rows.terminus(**more))
    assert message in str(caught.value)
