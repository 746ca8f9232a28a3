"""A Python bundle for PID 1 in any image: interpreter, loader, libraries and a few modules, some 10 MB.

An image may have no Python, an old one or another C library. The bundle is mounted read-only, and cached per
Python and supervisor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from insitu.errors import SetupError
from insitu.sandbox import rootfs as layout

MOUNT = "/run/insitu/python"
FORMAT = 2
"""Version of the bundle; bump to rebuild it."""
TIMEOUT_S = 30
_SONAME = re.compile(r"^.+?\.so\.\d+(?=\.)")
"""Programs link to libfoo.so.1, the file is libfoo.so.1.2.3."""

_LIST = """
import __future__, _socket, codecs, ctypes, encodings.ascii, encodings.latin_1, encodings.utf_8
import os, resource, select, struct, sys, time, warnings
print(sys.executable)
print(os.path.dirname(os.__file__))
for module in list(sys.modules.values()):
    for name in ("__file__", "__cached__"):
        path = getattr(module, name, None)
        if path and os.path.exists(path):
            print(path)
for line in open("/proc/self/maps"):
    path = line.split()[-1]
    if ".so" in path and path.startswith("/"):
        print(path)
"""


def _command(folder: str, loader: str) -> list[str]:
    library = f"{folder}/lib"
    return [f"{library}/{loader}", "--library-path", library, f"{folder}/bin/python3", "-I", "-S", "-B"]


def command() -> list[str]:
    """Return the command of PID 1, without the supervisor's arguments."""
    return [*_command(MOUNT, "loader"), f"{MOUNT}/supervisor.pyc"]


def stage_python(cache: Path) -> Path:
    """Build the bundle where missing; return its folder, to mount at MOUNT. Raises SetupError."""
    python = Path(layout.python_outside())
    try:
        code = layout.compile_supervisor()
        version = f"{python.resolve()} {python.stat().st_mtime_ns} {platform.machine()}"
        stamp = f"{FORMAT} {_LIST} {version}".encode()
        folder = cache / f"sandbox-python-{hashlib.sha256(stamp + code).hexdigest()[:16]}"
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".sandbox-python-") as scratch:
                _make(Path(scratch, "made"), python, code)
                if not folder.exists():
                    Path(scratch, "made").rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(f"no Python bundle for sandboxes: {error}") from error
    return folder


def _make(folder: Path, python: Path, code: bytes) -> None:
    listed = subprocess.run(
        [python, "-I", "-S", "-c", _LIST], capture_output=True, check=True, timeout=TIMEOUT_S, text=True
    ).stdout.split("\n")
    executable, library = Path(listed[0]).resolve(), Path(listed[1])
    for part in ("bin", "lib"):
        (folder / part).mkdir(parents=True)
    shutil.copy2(executable, folder / "bin" / "python3")
    home = folder / "lib" / library.name
    loader = ""
    for path in {Path(line) for line in listed[2:] if line}:
        if path.is_relative_to(library):
            targets = [home / path.relative_to(library)]
        else:
            loader = path.name if path.name.startswith("ld-") else loader
            targets = [folder / "lib" / name for name in (path.name, *_SONAME.findall(path.name))]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    if not loader:
        raise OSError(f"{python} has no dynamic loader")
    (folder / "lib" / loader).rename(folder / "lib" / "loader")
    (folder / "supervisor.pyc").write_bytes(code)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    done = subprocess.run(
        [*_command(str(folder), "loader"), "-c", _LIST],
        capture_output=True,
        check=True,
        timeout=TIMEOUT_S,
        env={},
    )
    outside = [line for line in done.stdout.decode().split() if ".so" in line and str(folder) not in line]
    if outside:
        raise OSError(f"{python} needs {outside[0]} outside of the bundle")
