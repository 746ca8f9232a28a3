"""pytest as a folder that any sandbox can show: pure Python, copied once from insitu's own environment.

A sandbox needs neither network nor pip, and what runs the tests is the same everywhere and cannot be written
by what it judges.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from insitu.errors import SetupError, boundary
from insitu.install_hints import install_extra
from insitu.sandbox.rootfs import python_inside

PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
OPTIONAL = ("exceptiongroup", "tomli", "typing_extensions")
"""What pytest needs beside on Pythons before 3.11."""
CONFIG = "[pytest]\n"
"""The grader's own configuration, in place of any that lies in a work folder."""


@functools.cache
def pytest_folder(cache: Path) -> Path:
    """The folder, made where missing. Raises SetupError when pytest is not installed here."""
    versions = [f"{name}-{version}" for name in PACKAGES if (version := _version(name))]
    if len(versions) < len(PACKAGES):
        raise SetupError(f"runner `pytest` needs pytest beside insitu: {install_extra('grade')}")
    folder = cache / "-".join(versions[:2])
    if (folder / "insitu.ini").exists():
        return folder
    with boundary(SetupError, f"copy pytest to {folder}"):
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=cache, prefix="pytest-"))
        try:
            fresh.chmod(0o755)
            for name in (*PACKAGES, *(name for name in OPTIONAL if _version(name))):
                _copy(name, fresh)
            _compile(fresh)
            (fresh / "insitu.ini").write_text(CONFIG)
            if not folder.exists():
                os.rename(fresh, folder)  # noqa: PTH104 - over nothing, or over what another made: see below
        except OSError:
            if not (folder / "insitu.ini").exists():
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


@functools.cache
def forms_key(cache: Path) -> bytes:
    """The secret that the forms of turned tests follow from, made where missing. It outlives this process:
    had a test other forms the next time, the real one would be what both have. Raises SetupError."""
    path = cache / "forms.key"
    with boundary(SetupError, f"read {path}"):
        cache.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=cache, prefix="key-") as fresh:  # readable for nobody else
                fresh.write(secrets.token_bytes(32))
                fresh.flush()
                with contextlib.suppress(FileExistsError):
                    os.link(fresh.name, path)
        return path.read_bytes()


def _version(name: str) -> str:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return ""


def _copy(name: str, folder: Path) -> None:
    for file in distribution(name).files or ():
        if file.suffix == ".py" and ".." not in file.parts:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)


def _compile(folder: Path) -> None:
    """For the Python of plain sandboxes: without it every start would take a second more. Others do
    without."""
    command = [python_inside(), "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*command, str(folder)], capture_output=True, timeout=120, check=False)
