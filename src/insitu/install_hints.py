"""Install commands for missing packages, matching the tool that installed insitu.

`pip install` has no effect on a program that pipx or uv keeps in its own environment, and would replace an
editable install with a copy.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = __name__.partition(".")[0]
"""Name of the distribution."""
WORKSPACE = "requirements/packages.txt"
"""The packages beside the core, of which an extra of a checkout takes some."""


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of insitu."""
    prefix = Path(sys.prefix)
    requirement = f"'{NAME}[{extra}]'"
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx install --force {requirement}"
    if (prefix / "uv-receipt.toml").exists():
        return f"uv tool install {requirement}"
    folder = _editable()
    if folder:
        return f"cd '{folder}' && {_pip()} install -e '.[{extra}]' -r {WORKSPACE}"
    return f"{_pip()} install {requirement}"


def install_package(package: str) -> str:
    """Return the command that installs another package beside insitu."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx inject {NAME} {package}"
    if (prefix / "uv-receipt.toml").exists():
        return f"uv tool install {NAME} --with {package}"
    return f"{_pip()} install {package}"


def _pip() -> str:
    """Return the pip command; uv creates virtual environments without pip and marks them in pyvenv.cfg."""
    try:
        text = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return "pip"
    return "uv pip" if any(line.partition("=")[0].strip() == "uv" for line in text.splitlines()) else "pip"


def _editable() -> str:
    """Return the folder of an editable install, else ""."""
    try:
        origin = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ""
    if not origin.get("dir_info", {}).get("editable"):
        return ""
    return unquote(urlsplit(origin.get("url", "")).path)
