"""Folders for sockets have short paths whatever the system's temporary folder is."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from insitu.storage.temp_dirs import scratch_folder, socket_parent


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
