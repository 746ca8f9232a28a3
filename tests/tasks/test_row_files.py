"""What `tasks.path` names: files, rows of them, and a data set of the Hub (a stand-in on loopback)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, SetupError, TaskError
from insitu.tasks.row_files import split_selection
from insitu_tasksets.api import list_tasks
from tests.fakes.hub import COMMIT, FakeHub, only_hub

IDS = [f"t{number}" for number in range(6)]


def row(name: str) -> str:
    function = {"function": "add", "args": [1, int(name[1:])], "expected": 1 + int(name[1:])}
    files = {"calc.py": f"def add(a, b):\n    return 0  # {name}\n"}
    return json.dumps(
        {"id": name, "prompt": "Mend add.", "files": files, "entry": "calc.py", "cases": [function]}
    )


def rows(*names: str) -> str:
    return "".join(f"{row(name)}\n" for name in names)


def ids(path: str) -> list[str]:
    config = load_config(None, {"tasks.source": "jsonl", "tasks.path": path})
    return [str(one["id"]) for one in list_tasks(config)[0]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "all.jsonl").write_text(rows(*IDS))
    (tmp_path / "part-a.jsonl").write_text(rows(*IDS[:2]))
    (tmp_path / "part-b.jsonl").write_text(rows(*IDS[2:4]))
    return tmp_path


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("[2:]", IDS[2:]),
        ("[:4:2]", IDS[:4:2]),
        ("[1::3]", IDS[1::3]),  # offset 1, stride 3
        ("[-2:]", IDS[-2:]),
        ("[5, 0, -3]", ["t5", "t0", "t3"]),
        ("[3]", ["t3"]),
    ],
)
def test_rows_of_a_file_are_selected_as_python_writes_it(
    folder: Path, selection: str, expected: list[str]
) -> None:
    assert sorted(ids(f"{folder}/all.jsonl{selection}")) == sorted(expected)


def test_a_pattern_names_several_files_and_a_selection_counts_over_all(folder: Path) -> None:
    assert sorted(ids(f"{folder}/part-*.jsonl")) == IDS[:4]
    assert sorted(ids(f"{folder}/part-*.jsonl[1:3]")) == IDS[1:3]


def test_a_file_may_be_named_with_brackets(folder: Path) -> None:
    (folder / "x[1]").mkdir()
    (folder / "odd.jsonl[1:]").write_text(rows("t5"))
    assert split_selection(f"{folder}/odd.jsonl[1:]")[1].text == ""
    assert split_selection(f"{folder}/x[1]/all.jsonl")[0] == f"{folder}/x[1]/all.jsonl"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("all.jsonl[9]", "there is no row 9, the data set has 6"),
        ("all.jsonl[::0]", "takes every 0th row"),
        ("all.jsonl[6:]", "holds no task"),
        ("none-*.jsonl", "is not a file, nor a folder"),
    ],
)
def test_rows_that_are_not_there_are_one_line(folder: Path, path: str, reason: str) -> None:
    with pytest.raises(TaskError, match=reason) as refused:
        ids(f"{folder}/{path}")
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------- at the Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with only_hub(monkeypatch, tmp_path / "hub") as server:
        server.repos["me/fixes"] = {"name": "fixes", "visibility": "public"}
        server.files = {
            "README.md": b"# Fixes",
            "dataset_infos.json": b"{}",
            "data/test-00000-of-00002.jsonl": rows(*IDS[:2]).encode(),
            "data/test-00001-of-00002.jsonl": rows(*IDS[2:4]).encode(),
        }
        yield server


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
def test_a_data_set_is_taken_by_its_name_at_the_hub_and_then_from_the_cache(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "insitu")
    assert sorted(ids("hub:me/fixes")) == IDS[:4]
    assert f"hub:me/fixes is at revision {COMMIT}" in caplog.text
    assert sorted(ids(f"hub:me/fixes@{COMMIT}:data/test-*[1:3]")) == IDS[1:3]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # offline
    assert sorted(ids("hub:me/fixes:data/test-*")) == IDS[:4]
    assert sorted(ids("hub:me/fixes")) == IDS[:4]
    with pytest.raises(SetupError, match="^cannot fetch hub:me/other: ") as refused:
        ids("hub:me/other")
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
def test_parts_of_a_data_set_are_named_and_a_half_download_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["data/train.jsonl"] = rows("t5").encode()
    hub.files["data/train_extra.json"] = b"{}"
    parts = r"several parts; add one of :data/test-\*-of-\*.jsonl, :data/train.jsonl$"
    with pytest.raises(ConfigError, match=parts):
        ids("hub:me/fixes")
    assert ids("hub:me/fixes:data/train.jsonl") == ["t5"]
    assert sorted(ids("hub:me/fixes:data/test*")) == IDS[:4]
    for shard in (tmp_path / "hub").rglob("test-00001-of-00002.jsonl"):
        shard.unlink()
    assert sorted(ids("hub:me/fixes:data/test*")) == IDS[:4]
    for wrong in ("**/*.jsonl", "/etc/passwd", "a**", "../../etc/pass*", "d*/train.jsonl"):
        with pytest.raises(ConfigError, match="FILES is a file, or a pattern of files of one folder"):
            ids(f"hub:me/fixes:{wrong}")
    for wrong in ("hub:me/none", "hub:fixes", "hub:me/fixes:data/other*"):
        with pytest.raises((ConfigError, SetupError), match=wrong.replace("*", r"\*")):
            ids(wrong)
