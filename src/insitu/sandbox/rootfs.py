"""The root filesystem of a local sandbox, as a list of steps for both local modes.

An allow-list: system programs and libraries read-only, five generated files of /etc, private tmpfs folders.
No home, run directory, dataset or insitu. Nothing lies on the host's disk, so a killed host leaves no files.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from insitu.errors import PolicyUnsupported, SetupError
from insitu.sandbox.base import SandboxSpec

HOME = "/home/agent"
INSIDE_ID = 1000
SUPERVISOR_AT = "/run/insitu/supervisor.pyc"
OWN_PYTHON = "/opt/python"
SYSTEM_PYTHON = Path("/usr/bin/python3")
OLDEST_PYTHON = (3, 10)
"""Minimum version for insitu's scripts in a sandbox."""

Step = tuple[str, str, str]
"""(kind, argument, inside path): bind source, link target, tmpfs bytes, file text, code as hex digits; proc,
dev, ro and dir have no argument. Binds are read-only."""

_ETC = (
    ("/etc/passwd", f"root:x:0:0:root:/:/bin/sh\nagent:x:{INSIDE_ID}:{INSIDE_ID}::{HOME}:/bin/bash\n"),
    ("/etc/group", f"root:x:0:\nagent:x:{INSIDE_ID}:\n"),
    ("/etc/hosts", "127.0.0.1 localhost sandbox\n"),
    ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
    # TEST-NET, without a route: a name query counts as a network attempt.
    ("/etc/resolv.conf", "nameserver 192.0.2.1\noptions timeout:1 attempts:1\n"),
)


def writable(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the writable places; the work folder first, the home second."""
    return (spec.workdir, HOME, "/tmp", "/dev/shm", *spec.places, *spec.roots)


def root_trouble(roots: Sequence[str], workdir: str) -> str:
    """Return why one of `roots` cannot be written in a local sandbox; empty if all can."""
    taken = (workdir, HOME, "/tmp", "/var/tmp", "/dev", "/proc", "/run", *(f"/{name}" for name in _SYSTEM))
    for root in map(Path, roots):
        for place in map(Path, taken):
            below = root.is_relative_to(place) or str(root) in dict(_ETC)
            if below or place.is_relative_to(root):
                return f"{root} cannot be one of a task's roots, since {place} is this machine's or its own"
    return ""


def python_inside() -> str:
    """Return the system's Python if it is recent enough, else insitu's own, mounted at OWN_PYTHON."""
    if python_version(SYSTEM_PYTHON) >= OLDEST_PYTHON:
        return str(SYSTEM_PYTHON)
    return f"{OWN_PYTHON}/bin/python3"


def python_outside() -> str:
    """Return the Python on this machine that a sandbox has as `python_inside()`."""
    inside = python_inside()
    return str(Path(sys.base_prefix, "bin", "python3")) if inside.startswith(OWN_PYTHON) else inside


@functools.cache
def python_version(program: Path) -> tuple[int, int]:
    """Return (major, minor); (0, 0) for a missing program."""
    command = [str(program), "-I", "-S", "-c", "import sys; print(sys.version_info[0], sys.version_info[1])"]
    try:
        major, minor = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.split()
        return int(major), int(minor)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0, 0


def _own_library() -> dict[str, str]:
    # A Python built as a shared library has an absolute path to it, which does not exist in the sandbox.
    if python_inside().startswith(OWN_PYTHON) and sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return {"LD_LIBRARY_PATH": f"{OWN_PYTHON}/lib"}
    return {}


def supervisor(arguments: Sequence[str]) -> list[str]:
    """Return the command of PID 1."""
    settings = [f"{name}={value}" for name, value in _own_library().items()]
    start = ["/usr/bin/env", *settings] if settings else []
    return [*start, python_inside(), "-I", "-S", "-B", SUPERVISOR_AT, *arguments]


def compile_supervisor() -> bytes:
    """Return supervisor.py compiled by the sandbox's Python. Raises OSError, subprocess.SubprocessError."""
    source = Path(__file__).with_name("supervisor.py").read_bytes()
    command = [python_outside(), "-I", "-S", "-B", "-c", _COMPILE]
    return subprocess.run(command, input=source, capture_output=True, check=True, timeout=30).stdout


_COMPILE = """
import importlib.util, marshal, sys
code = compile(sys.stdin.buffer.read(), "supervisor.py", "exec")
sys.stdout.buffer.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""


def environment(spec: SandboxSpec) -> dict[str, str]:
    """Return the environment of a sandbox; hash seed and time zone are fixed, since output is prompt text."""
    # /usr/bin first: a version-manager shim for python3 costs 90 ms per start.
    path = "/usr/bin:/bin:/usr/local/bin:/usr/sbin:/sbin"
    if python_inside().startswith(OWN_PYTHON):
        path = f"{OWN_PYTHON}/bin:{path}"
    base = {"PATH": path, "HOME": HOME, "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/bash"}
    base |= {"TERM": "dumb", "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
    return base | _own_library() | dict(spec.env)


def search_path() -> str:
    """Return the PATH by which this machine finds the programs that a sandbox finds."""
    return environment(SandboxSpec())["PATH"].replace(OWN_PYTHON, sys.base_prefix)


def _system(hidden: Sequence[Path]) -> list[Step]:
    steps: list[Step] = []
    for name in _SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            steps.append(("link", str(path.readlink()), str(path)))
        elif path.is_dir():
            steps.append(("bind", str(path), str(path)))
    steps += _covers(hidden, Path("/usr"), Path("/usr"))
    if python_inside().startswith(OWN_PYTHON):
        prefix = Path(sys.base_prefix).resolve()
        steps.append(("bind", str(prefix), OWN_PYTHON))
        library = prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages = [library / name for name in ("site-packages", "dist-packages")]
        steps += _covers([*packages, *hidden], prefix, Path(OWN_PYTHON))
    for path in (Path("/etc/ld.so.cache"), Path("/etc/alternatives")):
        if path.exists():
            steps.append(("bind", str(path), str(path)))
    return steps


_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_NEEDED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "share", "local")


def hidden_folders(asked: Iterable[Path]) -> tuple[Path, ...]:
    """Return folders that no sandbox shows: insitu with its checkout, the current folder, and `asked`.

    None lies within another. Raises SetupError for a folder that sandboxes need.
    """
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent.parent
    own = [package, *package.parent.glob("insitu_*")]
    own += [checkout] if (checkout / "pyproject.toml").exists() else []
    found = {path.resolve() for path in (*own, Path(), *asked)} - {Path("/")}
    for path in found:
        inner = path.parts[2:]
        needed = len(inner) == 0 or (inner[-1] in _NEEDED and set(inner[:-1]) <= {"local"})
        if path.is_relative_to("/usr") and needed:
            raise SetupError(f"every sandbox shows {path}, so runs cannot lie there: work in another folder")
    return tuple(sorted(path for path in found if not found & set(path.parents)))


def _covers(hidden: Iterable[Path], shown: Path, target: Path) -> Iterator[Step]:
    """Yield steps that cover each hidden folder below `shown`, which is mounted at `target`."""
    covered = set[Path]()
    for path in sorted(hidden):
        if path.is_relative_to(shown) and path.is_dir() and not covered & {path, *path.parents}:
            covered.add(path)
            place = str(target / path.relative_to(shown))
            yield ("tmpfs", "4096", place)
            yield ("ro", "", place)


def plan(
    spec: SandboxSpec, code: bytes, work_bytes: int, scratch_bytes: int, hidden: Sequence[Path] = ()
) -> list[Step]:
    """Return the steps in order. `code`: see `compile_supervisor`; `hidden`: see `hidden_folders`.

    Raises PolicyUnsupported for a bind that is missing or covers a writable place.
    """
    # before the files of /etc, which may be one of them
    steps: list[Step] = [("tmpfs", str(scratch_bytes), path) for path in spec.roots]
    steps += _system(hidden) + [("file", text, path) for path, text in _ETC]
    steps += [("proc", "", "/proc"), ("dev", "", "/dev")]
    steps.append(("code", code.hex(), SUPERVISOR_AT))
    places = writable(spec)
    steps.append(("tmpfs", str(work_bytes), places[0]))
    steps += [("tmpfs", str(scratch_bytes), path) for path in places[1:] if path not in spec.roots]
    steps.append(("link", "/tmp", "/var/tmp"))
    for bind in spec.binds:
        source = bind.source.resolve()
        if not source.exists():
            raise PolicyUnsupported(f"bind of {bind.source}: no such file or folder")
        covers = any(Path(place).is_relative_to(bind.target) for place in places)
        if covers or not bind.target.startswith("/"):
            raise PolicyUnsupported(f"bind at {bind.target}: would cover a writable folder of the sandbox")
        steps.append(("bind", str(source), bind.target))
    return [*_with_folders(steps), ("ro", "", "/dev"), ("ro", "", "/")]


def _with_folders(steps: list[Step]) -> list[Step]:
    """Add a step for every parent folder: those that bubblewrap makes itself only root can enter."""
    made, mounted, result = {Path("/")}, set[Path](), list[Step]()
    for kind, argument, path in steps:
        for parent in reversed(Path(path).parents):
            if parent not in made and not any(parent.is_relative_to(place) for place in mounted):
                made.add(parent)
                result.append(("dir", "", str(parent)))
        result.append((kind, argument, path))
        if kind not in ("file", "code", "link"):
            mounted.add(Path(path))
    return result
