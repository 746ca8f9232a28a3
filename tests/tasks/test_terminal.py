"""Terminus rows and Harbor folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import swe_rows as rows

from whet.errors import TaskError
from whet.tasks.base import Item
from whet.tasks.dataset import LoadOptions, RowSource
from whet.tasks.open import FORMATS
from whet.types import Limits


def load(tmp_path: Path, *given: dict[str, Any]) -> list[Item]:
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    limits = LoadOptions(limits=Limits(wall_s=9, max_calls=99))
    return list(RowSource("terminus", FORMATS["terminus"], path, limits).every())


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


@pytest.mark.parametrize(
    ("more", "message"),
    [
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


TOML = """\
version = "1.4"
[task]
name = "made/words"
[environment]
docker_image = "registry.example/words:1"
cpus = 1
[agent]
timeout_sec = 33.0
[verifier]
timeout_sec = 44.0
env = { WHO = "it's us" }
"""


def harbor(root: Path, **files: str | None) -> Path:
    made = root / "words"
    texts: dict[str, str | None] = {
        "task.toml": TOML,
        "instruction.md": "Count the words.\n",
        "environment/Dockerfile": "FROM debian\nWORKDIR /data\nWORKDIR rel\n",
        "tests/test.sh": "grep -q 3 out.txt && echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo 3 > out.txt\n",
    }
    for name, text in (texts | {key.replace("__", "/"): text for key, text in files.items()}).items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)
    return made


def test_a_harbor_folder(tmp_path: Path) -> None:
    harbor(tmp_path)
    (item,) = RowSource("harbor", FORMATS["harbor"], tmp_path).every()
    task, oracle = item.task, item.oracle
    assert (task.id, task.prompt) == ("words", "Count the words.")
    assert (task.setup.image, task.setup.workdir) == ("registry.example/words:1", "/data")
    assert (task.limits.wall_s, task.grading.timeout_s) == (33.0, 44.0)
    assert task.grading.runner == "harbor"
    assert set(oracle.tests.files) == {"test.sh"}
    assert oracle.tests.script == "export WHO='it'\"'\"'s us'\nbash /tests/test.sh\n"
    assert set(oracle.solve) == {"solve.sh"}
    assert task.files == {}


def test_an_image_built_by_hand(tmp_path: Path) -> None:
    harbor(tmp_path, **{"task.toml": "[task]\nname = 'x'\n"})
    with pytest.raises(TaskError, match=r"words: row .*: the task has a Dockerfile and no docker_image"):
        RowSource("harbor", FORMATS["harbor"], tmp_path)
    options = LoadOptions(images={"words": "local/words:1"})
    (item,) = RowSource("harbor", FORMATS["harbor"], tmp_path, options).every()
    assert item.task.setup.image == "local/words:1"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"task.toml": "["}, "words"),
        ({"instruction.md": None}, "instruction.md is missing"),
        ({"instruction.md": " \n"}, "the prompt is empty"),
        ({"tests/test.sh": None}, "tests/test.sh is missing: nothing can be graded"),
        ({"task.toml": TOML + "[[steps]]\nname = 'a'\n"}, "several steps"),
        ({"task.toml": TOML.replace("cpus = 1", "mcp_servers = [{}]")}, "MCP servers"),
        ({"environment/docker-compose.yaml": "services: {}\n"}, "several services"),
        ({"task.toml": TOML.replace("33.0", "-1.0")}, "agent.timeout_sec: Input should be greater than 0"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    harbor(tmp_path, **files)
    with pytest.raises(TaskError) as caught:
        RowSource("harbor", FORMATS["harbor"], tmp_path)
    assert message in str(caught.value)
