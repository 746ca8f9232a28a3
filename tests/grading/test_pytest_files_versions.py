"""The copy of pytest and the workers, for a sandbox's Python that is older than insitu's."""

from __future__ import annotations

import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from insitu.grading.runners import json_io
from insitu.sandbox import rootfs
from insitu.sandbox.rootfs import OLDEST_PYTHON
from insitu_tasksets.runners import pytest_session
from insitu_tasksets.runners.pytest_files import pytest_folder

OLDEST = "{}.{}".format(*OLDEST_PYTHON)


def needed(name: str) -> set[str]:
    """Return a package and all that it needs with the oldest Python of a sandbox."""
    there = {"python_version": OLDEST, "python_full_version": f"{OLDEST}.0", "extra": ""}
    wants = [Requirement(each) for each in requires(name) or []]
    inner = (needed(each.name) for each in wants if each.marker is None or each.marker.evaluate(there))
    return {name.replace("-", "_").lower()}.union(*inner)


@pytest.mark.slow
def test_all_that_pytest_needs_with_the_oldest_python_is_in_the_folder(tmp_path: Path) -> None:
    folder = pytest_folder(tmp_path)
    missing = [name for name in needed("pytest") if not list(folder.glob(f"{name}*"))]
    assert missing == []


@pytest.mark.slow
def test_it_is_copied_where_the_system_has_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs, "SYSTEM_PYTHON", tmp_path / "none")
    compiled = (pytest_folder(tmp_path / "cache") / "pytest" / "__pycache__").iterdir()
    assert {path.name.split(".")[1] for path in compiled} == {sys.implementation.cache_tag}


@pytest.mark.parametrize("worker", [json_io.WORKER, pytest_session.WORKER], ids=["json_io", "pytest"])
def test_a_worker_names_a_python_that_is_too_old(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit, match=rf"^Python 3\.9 in the sandbox is too old: {OLDEST} or newer$"):
        exec(compile(worker, "worker", "exec"), {"__name__": "worker"})
