"""Console output of `insitu serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import orjson

from insitu.gateway.backend import CallReport


class Console:
    """Prints events as text or as one JSON object per line."""

    def __init__(self, stream: TextIO | None, *, json: bool = False) -> None:
        """Print to `stream`; None prints nothing."""
        self._stream, self._json = stream, json

    def event(self, name: str, fields: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Print an event: `fields` with JSON output, else `lines`."""
        if self._json:
            lines = [orjson.dumps({"event": name, **fields}).decode()]
        if self._stream is not None:
            print("\n".join(lines), file=self._stream, flush=True)

    def wait(self, line: str) -> None:
        """Print what the engine's start is waiting for."""
        self.event("waiting", {"line": line}, [line])

    def note(self, line: str) -> None:
        """Print a message of the gateway."""
        self.event("note", {"line": line}, [line])

    def call(self, report: CallReport) -> None:
        what = report.outcome + (f", {report.tool_calls} tool calls" if report.tool_calls else "")
        if report.turn < 0:
            times = f", {report.count} calls" if report.count > 1 else ""
            line = f"{report.rollout_id or 'no session'} {report.dialect:<9} refused: {what}{times}"
        else:
            line = (
                f"{report.rollout_id} #{report.turn} {report.dialect:<9} "
                f"prompt {report.prompt_tokens:>6} (new {report.fresh_tokens}) "
                f"sampled {report.sampled_tokens:>4} {report.drift or '-'} | {what} | {report.ms:.0f} ms"
            )
        if report.cost:
            line += f", cost {report.cost:.4g}"
        if report.dead:
            line += f" | session failed: {' '.join(report.dead.split())}"
        self.event("call", asdict(report), [line])
