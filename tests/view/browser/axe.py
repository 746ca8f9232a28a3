"""axe-core, a checker of accessibility (MPL-2.0): `scripts/setup test` fetches it from npm."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from insitu.agents.install import _npm, find_node
from insitu.storage.temp_dirs import cache_folder

PACKAGE = "axe-core@4.14.1"
SCRIPT = cache_folder() / PACKAGE.replace("@", "-") / "node_modules/axe-core/axe.min.js"


def install() -> None:
    """Put axe-core into the cache; nothing where it is there already."""
    if SCRIPT.exists():
        return
    folder = SCRIPT.parents[2]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "axe"
        command = [
            *_npm(find_node()),
            "install",
            "--silent",
            "--ignore-scripts",
            "--prefix",
            str(made),
            PACKAGE,
        ]
        subprocess.run(command, check=True, timeout=300)
        made.rename(folder)


if __name__ == "__main__":
    install()
