"""Files that several ranks write: names, notes, the index, and what is said of a part that is missing."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from insitu.engines.safetensors_file import (
    StoredTensor,
    read_folder,
    sums_of,
    write_manifest,
    write_tensors,
)
from insitu.errors import TrainError
from insitu_train.part_files import PartNote, leave_note, part_name, parts_in, take_notes, write_index
from insitu_train.weights.delta import apply_delta, write_delta

MODEL = "model.safetensors"


def test_one_part_has_the_files_own_name() -> None:
    assert part_name(MODEL, 0, 1) == MODEL
    assert part_name("trainer/optimizer.safetensors", 1, 3) == "trainer/optimizer-00002-of-00003.safetensors"


def test_the_parts_of_a_file_are_those_that_its_names_ask_for() -> None:
    assert parts_in(MODEL, ["config.json", MODEL]) == [MODEL]
    assert parts_in(MODEL, ["config.json"]) == [MODEL]
    first, second = (part_name(MODEL, part, 2) for part in range(2))
    assert parts_in(MODEL, [second, "optimizer-00001-of-00003.safetensors"]) == [
        first, second, f"{MODEL}.index.json"
    ]  # fmt: skip


def test_the_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    notes = [
        PartNote(
            tensors={
                "model-00001-of-00002.safetensors": {"a": 4},
                "trainer/optimizer-1.safetensors": {"x": 8},
            }
        ),
        PartNote(tensors={"model-00002-of-00002.safetensors": {"b": 6, "c": 1}}),
    ]
    index = json.loads(write_index(tmp_path / MODEL, notes).read_text())
    assert index["metadata"]["total_size"] == 11
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


def test_the_first_rank_waits_for_the_notes_and_removes_them(tmp_path: Path) -> None:
    leave_note(tmp_path, 0, PartNote(sums={"a": "1"}))
    late = threading.Timer(0.1, leave_note, (tmp_path, 1, PartNote(sums={"b": "2"})))
    late.start()
    notes = take_notes(tmp_path, 2, wait_s=20)
    assert [note.sums for note in notes] == [{"a": "1"}, {"b": "2"}]
    assert not list(tmp_path.iterdir())


def test_who_did_not_write_is_named(tmp_path: Path) -> None:
    leave_note(tmp_path, 0, PartNote())
    with pytest.raises(TrainError, match=r"^rank 1 has not written its part within 0 s$"):
        take_notes(tmp_path, 2)
    leave_note(tmp_path, 0, PartNote())
    with pytest.raises(TrainError, match=r"^rank 1 died \(exit status -9\) before it wrote its part$"):
        take_notes(tmp_path, 2, wait_s=20, dead=lambda: "rank 1 died (exit status -9)")
    leave_note(tmp_path, 0, PartNote())
    leave_note(tmp_path, 1, PartNote(error="no space left"))
    with pytest.raises(TrainError, match="^rank 1: no space left$"):
        take_notes(tmp_path, 2)


def test_a_delta_from_a_version_of_several_files_makes_one_file_without_an_index(tmp_path: Path) -> None:
    for version in (1, 2):
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        held = {name: np.full(8, version, np.uint8) for name in ("a", "b")}
        tensors = {n: StoredTensor(dtype="U8", shape=(8,), data=data) for n, data in held.items()}
        files = {n: part_name(MODEL, part, 2) for part, n in enumerate(tensors)}
        for name, file in files.items():
            write_tensors(folder / file, {name: tensors[name]})
        write_index(folder / MODEL, [PartNote(tensors={file: {name: 8} for name, file in files.items()})])
        write_manifest(folder, version, sums_of(tensors))
    write_delta(tmp_path / "delta", tmp_path / "v1", tmp_path / "v2")
    apply_delta(tmp_path / "delta", tmp_path / "v1", tmp_path / "there")
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [MODEL, "weights.json"]
    found = read_folder(tmp_path / "there")
    assert {name: tensor.data.tolist() for name, tensor in found.items()} == {"a": [2] * 8, "b": [2] * 8}
