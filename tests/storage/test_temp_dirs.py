"""Folders for sockets have short paths whatever the system's temporary folder is."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from insitu.storage.temp_dirs import keep, part_folder, scratch_folder, socket_parent


def test_a_socket_fits_into_a_scratch_folder_below_a_long_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("t" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with scratch_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "gateway-socket"))
        assert folder.parent == socket_parent() == Path("/tmp")


def test_a_short_temporary_folder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert socket_parent() == Path("/var/tmp")


def test_of_two_that_make_a_folder_the_first_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for content in ("first", "second"):
        with part_folder(folder) as part:
            (part / "file").write_text(content)
            keep(part, folder)
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    with part_folder(tmp_path / "model") as part, pytest.raises(NotADirectoryError):
        keep(part, tmp_path / "model")
