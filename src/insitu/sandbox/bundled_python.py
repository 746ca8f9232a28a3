"""A Python to lend to sandboxes made of foreign images: loader, libraries and the few modules PID 1 needs.

An image may hold no Python, an old one, another C library, or one that an earlier layer tampered with; this
folder, shown read-only, starts in any of them. Made once per Python and supervisor in insitu's cache, some
ten megabytes. Blocking: called when a backend is made.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from insitu.errors import SetupError
from insitu.sandbox import rootfs as layout

LENT_AT = "/run/insitu/python"
RECIPE = 2
"""Of this module; another one makes the folder anew."""
TRY_S = 30
_SONAME = re.compile(r"^.+?\.so\.\d+(?=\.)")
"""Programs ask for libfoo.so.1 where the file is libfoo.so.1.2.3."""

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
    return [
        f"{folder}/lib/{loader}",
        "--library-path",
        f"{folder}/lib",
        f"{folder}/bin/python3",
        "-I",
        "-S",
        "-B",
    ]


def command() -> list[str]:
    """How a sandbox starts its PID 1; the supervisor's arguments follow."""
    return [*_command(LENT_AT, "loader"), f"{LENT_AT}/supervisor.pyc"]


def stage_python(cache: Path) -> Path:
    """The folder to show at LENT_AT. Raises SetupError."""
    inside = layout.python_inside()
    python = Path(sys.base_prefix, "bin", "python3") if inside.startswith(layout.OWN_PYTHON) else Path(inside)
    try:
        code = layout.compile_supervisor()
        version = f"{python.resolve()} {python.stat().st_mtime_ns} {platform.machine()}"
        stamp = f"{RECIPE} {_LIST} {version}".encode()
        folder = cache / f"sandbox-python-{hashlib.sha256(stamp + code).hexdigest()[:16]}"
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".sandbox-python-") as scratch:
                _make(Path(scratch, "made"), python, code)
                if not folder.exists():
                    Path(scratch, "made").rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(f"no Python to lend to sandboxes: {error}") from error
    return folder


def _make(folder: Path, python: Path, code: bytes) -> None:
    said = subprocess.run(
        [python, "-I", "-S", "-c", _LIST], capture_output=True, check=True, timeout=TRY_S, text=True
    ).stdout.split("\n")
    executable, library = Path(said[0]).resolve(), Path(said[1])
    for part in ("bin", "lib"):
        (folder / part).mkdir(parents=True)
    shutil.copy2(executable, folder / "bin" / "python3")
    home = folder / "lib" / library.name
    loader = ""
    for path in {Path(line) for line in said[2:] if line}:
        if path.is_relative_to(library):
            targets = [home / path.relative_to(library)]
        else:
            loader = path.name if path.name.startswith("ld-") else loader
            targets = [folder / "lib" / name for name in (path.name, *_SONAME.findall(path.name))]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    if not loader:
        raise OSError(f"{python} has no loader of its own")
    (folder / "lib" / loader).rename(folder / "lib" / "loader")
    (folder / "supervisor.pyc").write_bytes(code)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    done = subprocess.run(
        [*_command(str(folder), "loader"), "-c", _LIST],
        capture_output=True,
        check=True,
        timeout=TRY_S,
        env={},
    )
    strangers = [line for line in done.stdout.decode().split() if ".so" in line and str(folder) not in line]
    if strangers:
        raise OSError(f"{python} cannot do without {strangers[0]}")
