#!/usr/bin/env python3
"""Write what is needed to run insitu from a checkout, uninstalled: `entry_points.py DIR` prints a PYTHONPATH.

DIR gets the names of all packages with their entry points, which `pip install` would write.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [ROOT / "src", *sorted((ROOT / "packages").glob("*/src"))]


def write_entry_points(folder: Path) -> str:
    """Return the PYTHONPATH of the checkout and the folder, which is made."""
    for file in [ROOT / "pyproject.toml", *(ROOT / "packages").glob("*/pyproject.toml")]:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        name, version = project["name"], project.get("version", "0")
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(header, encoding="utf-8")
        lines = []
        for group, points in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return os.pathsep.join(map(str, [*SOURCES, folder.resolve()]))


if __name__ == "__main__":
    print(write_entry_points(Path(sys.argv[1])))
