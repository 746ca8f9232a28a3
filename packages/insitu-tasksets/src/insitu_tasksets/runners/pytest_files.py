"""pytest as a read-only folder for sandboxes, copied once from insitu's own environment."""

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
from insitu.sandbox.rootfs import python_outside

PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
OPTIONAL = ("exceptiongroup", "tomli", "typing_extensions")
"""What pytest needs in a sandbox with Python 3.10."""
CONFIG = "[pytest]\n"
"""The configuration in use; a file in the work folder is ignored."""


@functools.cache
def pytest_folder(cache: Path) -> Path:
    """Return the folder, made where missing. Raises SetupError without pytest."""
    versions = [f"{name}-{version}" for name in PACKAGES if (version := _version(name))]
    if len(versions) < len(PACKAGES):
        raise SetupError(f"runner `pytest` needs pytest beside insitu: {install_extra('grade')}")
    optional = [f"{name}-{version}" for name in OPTIONAL if (version := _version(name))]
    folder = cache / "-".join([*versions[:2], *optional])
    if (folder / "insitu.ini").exists():
        return folder
    with boundary(SetupError, f"copy pytest to {folder}"):
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=cache, prefix="pytest-"))
        try:
            fresh.chmod(0o755)
            for name in (*PACKAGES, *(each.partition("-")[0] for each in optional)):
                _copy(name, fresh)
            _compile(fresh)
            (fresh / "insitu.ini").write_text(CONFIG)
            if not folder.exists():
                os.rename(fresh, folder)  # noqa: PTH104 - another process may have made it: see below
        except OSError:
            if not (folder / "insitu.ini").exists():
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


@functools.cache
def forms_key(cache: Path) -> bytes:
    """Return the secret seed of test mutations, made where missing. Raises SetupError."""
    # It outlives this process: with other forms in the next process, the real one would be the common one.
    path = cache / "forms.key"
    with boundary(SetupError, f"read {path}"):
        cache.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=cache, prefix="key-") as fresh:  # mode 0600
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
    """Compile for the Python of plain sandboxes, which saves a second per start."""
    command = [python_outside(), "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*command, str(folder)], capture_output=True, timeout=120, check=False)
