"""`insitu doctor`: check of this machine for insitu's requirements, one line each."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.agents.install import find, find_node
from insitu.agents.recipe import Recipe, shipped_recipes
from insitu.engines.vllm_weights import SUPPORTED
from insitu.errors import SetupError
from insitu.install_hints import install_extra
from insitu.registry import BUILT_IN_SOURCE, SATELLITES, listing, shipped
from insitu.sandbox import rootfs as layout
from insitu.sandbox.cgroup import find as find_cgroups
from insitu.sandbox.limits import is_root
from insitu.sandbox.local import LocalBackend, Mode
from insitu.sandbox.setup_hints import find_bwrap

_PROBE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """Result of one check; `needed` marks requirements of every run."""

    name: str
    found: bool
    text: str
    needed: bool = True


def examine() -> Iterator[MachineCheck]:
    """Yield every check, in the order in which to fix problems."""
    version = platform.python_version()
    yield MachineCheck(
        name="python", found=sys.version_info >= (3, 11), text=f"{version} at {sys.executable}"
    )
    yield _machine()
    yield _disk()
    yield from _isolation()
    yield _cgroups()
    yield _sandbox_python()
    yield _node()
    yield from (_agent(recipe) for recipe in shipped_recipes().values() if recipe.npm or recipe.pip)
    yield from _entry_points()
    yield from (
        _package(f"insitu-{name}", own.get("verbs", "tasks"), install_extra(name), needed=False)
        for name, own in SATELLITES.items()
    )
    if _version("insitu-train"):
        yield _package("torch", "the learner", install_extra("train"))
        yield from _training()


def report(checks: Sequence[MachineCheck]) -> tuple[str, bool]:
    """Return the text of checks and whether all needed requirements are met; the last line says it."""
    width = max(len(c.name) for c in checks)
    lines = [f"{_mark(c)}  {c.name:<{width}}  {c.text}" for c in checks]
    missing = [c.name for c in checks if c.needed and not c.found]
    lines.append(
        f"needed and missing: {', '.join(missing)}" if missing else "nothing that is needed is missing"
    )
    return "\n".join(lines), not missing


def _mark(check: MachineCheck) -> str:
    return "ok" if check.found else "NO" if check.needed else "--"


def _training() -> Iterator[MachineCheck]:
    """Yield requirements of `policy.kind = "hf"` and of GPU servers."""
    yield _package("transformers", "policy.kind hf", install_extra("hf"), needed=False)
    yield _gpus()
    yield _package("triton", "fast kernels of the head on a GPU", "comes with PyTorch for CUDA", needed=False)
    yield _compiler()
    text = f"as a server {SUPPORTED}; one that you start yourself may use another environment"
    version = _version("vllm")
    yield MachineCheck(
        name="vllm", found=version is not None, text=f"{version or 'not installed'}: {text}", needed=False
    )


def _gpus() -> MachineCheck:
    done = _run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    lines = (
        done.stdout.decode(errors="replace").splitlines() if done is not None and not done.returncode else []
    )
    text = "; ".join(lines) or "none reported by nvidia-smi: models of transformers train on the CPU"
    return MachineCheck(name="gpu", found=bool(lines), text=text, needed=False)


def _compiler() -> MachineCheck:
    """Check for a C compiler, with which Triton compiles a launcher for each kernel."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    parts = (("a C compiler", bool(compiler)), (str(header), header.exists()))
    missing = [name for name, exists in parts if not exists]
    text = (
        f"Triton needs {' and '.join(missing)}; without it the head uses PyTorch"
        if missing
        else f"{compiler}, {header}"
    )
    return MachineCheck(name="compiler", found=not missing, text=text, needed=False)


def _machine() -> MachineCheck:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} cores, {memory:,} MiB memory, {platform.system()} {platform.release()}"
    return MachineCheck(name="machine", found=platform.system() == "Linux", text=text)


def _disk() -> MachineCheck:
    free = shutil.disk_usage(Path.cwd()).free >> 20
    return MachineCheck(
        name="disk", found=free >= 1024, text=f"{free:,} MiB free in {Path.cwd()}", needed=False
    )


def _isolation() -> Iterator[MachineCheck]:
    """Start a sandbox in each mode that this user could use; one that works is needed."""
    bwrap, root = find_bwrap(), is_root()
    why = _mode_fault("bubblewrap")
    text = f"{_first_line([bwrap, '--version'])} at {bwrap}" if bwrap else ""
    text = "; ".join(filter(None, (text, why)))
    yield MachineCheck(name="bubblewrap", found=not why, text=text, needed=not root)
    if root:
        why_not = _mode_fault("namespaces")
        text = why_not or "root: insitu creates namespaces itself"
        yield MachineCheck(name="namespaces", found=not why_not, text=text, needed=bool(why))


def _mode_fault(mode: Mode) -> str:
    try:
        LocalBackend(mode)
    except SetupError as error:
        return str(error)
    return ""


def _cgroups() -> MachineCheck:
    found = find_cgroups()
    if found.cgroups is None:
        text = (
            f"none ({found.why}); local sandboxes limit the memory of each process, not of the whole sandbox"
        )
        return MachineCheck(name="cgroups", found=False, text=text, needed=False)
    text = f"v{found.cgroups.version}; memory and processes of each local sandbox are limited as a whole"
    return MachineCheck(name="cgroups", found=True, text=text, needed=False)


def _sandbox_python() -> MachineCheck:
    """Check the Python that graders and agents use in their sandboxes."""
    major, minor = layout.python_version(layout.SYSTEM_PYTHON)
    if layout.python_inside() == str(layout.SYSTEM_PYTHON):
        return MachineCheck(
            name="sandbox python", found=True, text=f"{major}.{minor} at {layout.SYSTEM_PYTHON}"
        )
    why = f"{layout.SYSTEM_PYTHON} is {major}.{minor}" if major else f"no {layout.SYSTEM_PYTHON}"
    own = Path(sys.base_prefix, "bin", "python3")
    return MachineCheck(name="sandbox python", found=own.exists(), text=f"{why}; sandboxes use {own}")


def _node() -> MachineCheck:
    try:
        node = find_node()
    except SetupError as error:
        return MachineCheck(name="node", found=False, text=str(error), needed=False)
    return MachineCheck(name="node", found=True, text=f"{_first_line([str(node), '--version'])} at {node}")


def _agent(recipe: Recipe) -> MachineCheck:
    """Check an agent that is installed at its first use."""
    try:
        installed = find(recipe)
    except SetupError as error:
        return MachineCheck(name=recipe.name, found=False, text=str(error), needed=False)
    if installed is None:
        hint = f"{recipe.version} is not installed; run: insitu install {recipe.name}"
        return MachineCheck(name=recipe.name, found=False, text=hint, needed=False)
    return MachineCheck(
        name=recipe.name, found=True, text=f"{recipe.version} in {installed.folder}", needed=False
    )


def _entry_points() -> Iterator[MachineCheck]:
    """Yield the extensions that other packages declare by entry points; a broken one is not found."""
    for info in listing():
        if info.source != BUILT_IN_SOURCE and (info.error or info.name not in shipped(info.kind)):
            text = f"{info.kind}, from {info.source}" + (f": {info.error}" if info.error else "")
            yield MachineCheck(name=info.name, found=not info.error, text=text, needed=False)


def _package(name: str, use: str, hint: str, *, needed: bool = True) -> MachineCheck:
    version = _version(name)
    text = version or f"not installed ({use}); {hint}"
    return MachineCheck(name=name, found=version is not None, text=text, needed=needed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(argv: list[str]) -> str:
    done = _run(argv)
    return "" if done is None else done.stdout.decode(errors="replace").partition("\n")[0].strip()


def _run(argv: list[str]) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(argv, capture_output=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
