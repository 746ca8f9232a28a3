"""What `insitu serve` says, call by call. Caller: run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import orjson

from insitu.gateway.server import CallReport


class Console:
    """Says what happens, as lines for a person or as one JSON object per line."""

    def __init__(self, stream: TextIO, *, json: bool) -> None:
        self._stream, self._json = stream, json

    def say(self, event: str, told: Mapping[str, Any], lines: Sequence[str]) -> None:
        """`told` for machines, `lines` for people."""
        if self._json:
            lines = [orjson.dumps({"event": event, **told}).decode()]
        print("\n".join(lines), file=self._stream, flush=True)

    def wait(self, line: str) -> None:
        """What an engine waits for before it can serve."""
        self.say("waiting", {"line": line}, [line])

    def note(self, line: str) -> None:
        """What the gateway has to say to the operator."""
        self.say("note", {"line": line}, [line])

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
        if report.dead:
            line += f" | the session is dead: {' '.join(report.dead.split())}"
        self.say("call", asdict(report), [line])
