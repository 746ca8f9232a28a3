"""The view that suits an output stream."""

from __future__ import annotations

from typing import TextIO

from insitu.view.base import View


def open_view(stream: TextIO, *, plain: bool = False) -> View:
    """Return the live view on a capable terminal, else the plain one."""
    if not plain and stream.isatty():
        from rich.console import Console

        from insitu.view.live import LiveView

        console = Console(file=stream)
        # rich prints nothing on a dumb terminal until the end, and the view needs Unicode.
        if not console.is_dumb_terminal and console.encoding.startswith("utf"):
            return LiveView(console)
    from insitu.view.plain import PlainView

    return PlainView(stream)
