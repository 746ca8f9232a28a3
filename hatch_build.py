"""Hatch's metadata hook: the README for a package index, where links to files of the repository lead nowhere.

A relative link becomes an address below the project URL `Source`, or its text alone where there is none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def for_index(readme: str, source: str = "") -> str:
    """Return the text with its relative links resolved or removed; images without an address are dropped."""

    def resolved(link: re.Match[str]) -> str:
        mark, text, path = link.groups()
        if source:
            return f"{mark}[{text}]({source.rstrip('/')}/{'raw' if mark else 'blob'}/main/{path})"
        return "" if mark else text

    return LINK.sub(resolved, readme)


class ReadmeHook(MetadataHookInterface):
    """Called by hatchling for every build, editable ones too."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, source)}
