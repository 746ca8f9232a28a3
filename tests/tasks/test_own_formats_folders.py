"""Tasks as folders in insitu's own format."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.errors import TaskError
from insitu.tasks.dataset import RowSource
from insitu.tasks.own_formats import PlainFolder


def made(root: Path, name: str = "one", toml: str = 'fail_to_pass = ["tests/test_m.py::test_f"]\n') -> Path:
    for path, text in {
        "task.toml": toml,
        "prompt.md": "Fix m.\n",
        "files/m.py": "def f(): return 0\n",
        "files/bin/run.sh": "echo\n",
        "tests/tests/test_m.py": "from m import f\ndef test_f(): assert f() == 1\n",
        "gold/m.py": "def f(): return 1\n",
    }.items():
        file = root / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / name / "files/bin/run.sh").chmod(0o755)
    return root / name


def test_a_folder_of_folders(tmp_path: Path) -> None:
    made(tmp_path)
    made(tmp_path, "two", 'prompt = "Other."\n[[checks]]\ncommand = "python3 m.py"\n')
    (tmp_path / "notes").mkdir()
    one, two = RowSource("folder", PlainFolder(), tmp_path).every()
    assert (one.task.id, one.task.prompt, one.task.grading.runner) == ("one", "Fix m.", "pytest")
    assert one.task.files["bin/run.sh"].executable
    assert set(one.task.files) == {"m.py", "bin/run.sh"}
    assert set(one.oracle.tests.files) == {"tests/test_m.py"}
    assert one.oracle.gold["m.py"].content == b"def f(): return 1\n"
    assert (two.task.id, two.task.prompt, two.task.grading.runner) == ("two", "Other.", "command")


def test_one_folder(tmp_path: Path) -> None:
    (item,) = RowSource("folder", PlainFolder(), made(tmp_path)).every()
    assert item.task.id == "one"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is not a folder"):
        RowSource("folder", PlainFolder(), tmp_path / "none")
    with pytest.raises(TaskError, match=r"holds no folder with a task\.toml"):
        RowSource("folder", PlainFolder(), tmp_path)
    folder = made(tmp_path, toml="cases = [\n")
    with pytest.raises(TaskError, match=r"task\.toml"):
        RowSource("folder", PlainFolder(), tmp_path)
    (folder / "task.toml").write_text("")
    with pytest.raises(TaskError, match=r"one: row .*: needs exactly one of cases"):
        RowSource("folder", PlainFolder(), tmp_path)
    (folder / "task.toml").write_text('fail_to_pass = ["t::a"]\n')
    (folder / "files/link").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="link is a link"):
        RowSource("folder", PlainFolder(), tmp_path)
