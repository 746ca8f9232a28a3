"""Data sets of a Harbor registry by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.errors import TaskError
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import format_of

SETS = [
    {
        "name": "made",
        "version": "1.0",
        "description": "x",
        "tasks": [
            {"name": "a", "path": "tasks/a"},
            {"name": "b", "path": "b", "git_url": "https://example.com/x/words.git", "git_commit_id": "0af"},
        ],
    },
    {"name": "made", "version": "2.0", "description": "x", "tasks": [{"name": "a", "path": "tasks/a"}]},
    {"name": "org/other", "version": "head", "description": "x", "tasks": [{"name": "c", "path": "gone/c"}]},
]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("INSITU_HARBOR_REGISTRY", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "registry"
    for place in ("tasks/a", "words/b"):
        (folder / place / "tests").mkdir(parents=True)
        (folder / place / "task.toml").write_text("[environment]\ndocker_image = 'x'\n")
        (folder / place / "instruction.md").write_text(f"Do {place}.\n")
        (folder / place / "tests" / "test.sh").write_text("true\n")
    (folder / "registry.json").write_text(json.dumps(SETS))
    return folder


def ids(path: str | Path) -> list[str]:
    return [item.task.id for item in RowSource("harbor", format_of("harbor"), Path(path)).every()]


def test_a_data_set_has_a_name_and_a_version(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ids(registry / "made@1.0") == ["a", "b"]
    assert ids("registry/made@2.0") == ["a"]
    assert ids(registry / "tasks") == ["a"]
    monkeypatch.setenv("INSITU_HARBOR_REGISTRY", str(registry))
    assert ids("made@1.0") == ids("/anywhere/made@1.0") == ["a", "b"]


@pytest.mark.parametrize(
    ("named", "path", "message"),
    [
        ("", "made@1.0", "for a data set of a Harbor registry set INSITU_HARBOR_REGISTRY to the folder of"),
        ("no", "made@1.0", "for a data set of a Harbor registry set INSITU_HARBOR_REGISTRY to the folder of"),
        ("registry", "made@3.0", "has no made@3.0; it has made@1.0, made@2.0"),
        ("registry", "new@1.0", "has no new@1.0; it has made, org/other"),
        ("registry", "org/other@head", "1 of 1 task folders of other@head are not in registry"),
        ("", "made", "made is not a folder"),
    ],
)
def test_what_is_not_there_is_one_line(
    registry: Path, monkeypatch: pytest.MonkeyPatch, named: str, path: str, message: str
) -> None:
    if named:
        monkeypatch.setenv("INSITU_HARBOR_REGISTRY", named)
    with pytest.raises(TaskError) as caught:
        ids(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["https://example.com/..", "https://example.com/...git", ".."])
def test_a_repository_is_a_folder_of_the_registry(registry: Path, url: str) -> None:
    (registry.parent / "a").mkdir()
    (registry.parent / "a" / "task.toml").write_text("")
    (registry / "registry.json").write_text(
        json.dumps([SETS[0] | {"tasks": [{"path": "a", "git_url": url}]}])
    )
    with pytest.raises(TaskError, match="names no repository"):
        ids(registry / "made@1.0")


def test_only_the_data_set_that_is_asked_for_must_be_one(registry: Path) -> None:
    rows = [5, {"name": "bad"}, {"name": 1, "version": 2, "tasks": 3}, *SETS]
    (registry / "registry.json").write_text(json.dumps(rows))
    assert ids(registry / "made@1.0") == ["a", "b"]
    with pytest.raises(TaskError, match="tasks: Field required"):
        ids(registry / "bad@")
    for whole in (5, {"a": 1}):
        (registry / "registry.json").write_text(json.dumps(whole))
        with pytest.raises(TaskError, match="is no list of data sets"):
            ids(registry / "made@1.0")


def test_a_registry_that_leaves_its_folder_is_refused(registry: Path) -> None:
    (registry / "registry.json").write_text(json.dumps([SETS[0] | {"tasks": [{"path": "../x"}]}]))
    with pytest.raises(TaskError, match=r"'\.\./x' is no path below it"):
        ids(registry / "made@1.0")
