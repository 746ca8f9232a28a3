"""The pages' modules as one script, for an exported file."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

from insitu_view.web.serve import STATIC

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "(\.{1,2}/[\w/.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class|let) (\w+))", re.MULTILINE)
_NAMES = re.compile(r"export\{([\w $,]+)\};?\s*$")


def icon() -> str:
    return "data:image/svg+xml;base64," + base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()


def bundle() -> str:
    """Return the modules as one script: each a function that returns its exports, after those it imports."""
    order: list[Path] = []
    for name in ("embedded.js", "main.js"):  # main.js draws at once, so the data comes first
        _visit(STATIC / name, order)
    parts = ['"use strict";', *(_module(path) for path in order)]
    return "\n".join(parts).replace('src="icon.svg"', f'src="{icon()}"')


def _imports(path: Path) -> Iterator[Path]:
    for match in _IMPORT.finditer(path.read_text("utf-8")):
        yield (path.parent / match[2]).resolve()


def _visit(path: Path, order: list[Path]) -> None:
    if path in order:
        return
    for needed in _imports(path):
        _visit(needed, order)
    order.append(path)


def _module(path: Path) -> str:
    text = path.read_text("utf-8")
    if named := _NAMES.search(text):  # vendored: export{a as h,b as html}
        pairs = [pair.split(" as ") for pair in named[1].split(",")]
        exported = ", ".join(f"{shown}: {held}" for held, shown in pairs)
        text = text[: named.start()]
    else:
        exported = ", ".join(match[2] for match in _EXPORT.finditer(text))
    text = _EXPORT.sub(r"\1", text)
    text = _IMPORT.sub(
        lambda match: f"const {{ {match[1]} }} = {_name((path.parent / match[2]).resolve())};", text
    )
    return f"const {_name(path)} = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();"


def _name(path: Path) -> str:
    return "m_" + re.sub(r"\W", "_", path.relative_to(STATIC.resolve()).as_posix())
