"""How a person installs what is missing, in the words of the tool that installed insitu.

`pip install` does nothing for a program that pipx or uv keeps in an environment of its own, and would replace
an editable install by a copy.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = __name__.partition(".")[0]
"""Of the distribution."""


def install_extra(extra: str) -> str:
    """The command for an extra of insitu itself."""
    prefix = Path(sys.prefix)
    wanted = f"'{NAME}[{extra}]'"
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx install --force {wanted}"
    if (prefix / "uv-receipt.toml").exists():
        return f"uv tool install {wanted}"
    folder = _editable()
    return f"{_pip()} install -e '{folder}[{extra}]'" if folder else f"{_pip()} install {wanted}"


def install_package(package: str) -> str:
    """The command for another package beside insitu."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx inject {NAME} {package}"
    if (prefix / "uv-receipt.toml").exists():
        return f"uv tool install {NAME} --with {package}"
    return f"{_pip()} install {package}"


def _pip() -> str:
    """uv makes virtual environments without pip, and says so in their pyvenv.cfg."""
    try:
        text = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return "pip"
    return "uv pip" if any(line.partition("=")[0].strip() == "uv" for line in text.splitlines()) else "pip"


def _editable() -> str:
    """The folder of an editable install; "" for any other."""
    try:
        origin = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ""
    if not origin.get("dir_info", {}).get("editable"):
        return ""
    return unquote(urlsplit(origin.get("url", "")).path)
