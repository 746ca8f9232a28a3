"""The view that suits an output stream."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from insitu.progress.base import View


def open_view(stream: TextIO, *, plain: bool = False, run_dir: Path | None = None) -> View:
    """Return the live view on a capable terminal, else the plain one; `run_dir`: of the run to show."""
    if not plain and stream.isatty():
        from rich.console import Console

        from insitu.progress.live import LiveView, agent_line

        console = Console(file=stream)
        # rich prints nothing on a dumb terminal until the end, and the view needs Unicode.
        if not console.is_dumb_terminal and console.encoding.startswith("utf"):
            return LiveView(console, agent=agent_line(run_dir)) if run_dir else LiveView(console)
    from insitu.progress.plain import PlainView

    return PlainView(stream)
