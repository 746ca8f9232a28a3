"""An agent that is one command: started in its sandbox, watched, stopped, and judged by its exit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from insitu.agents.base import AgentExit, AwayTime, Left, no_time
from insitu.agents.termination import GRACE_S, KILL_S, attend
from insitu.agents.worker import AgentEnd
from insitu.errors import HarnessError
from insitu.sandbox.base import ExecResult, Sandbox

Rule = Callable[[ExecResult], tuple[AgentExit, str]]
"""What an exit means: how the agent ended, and one line on it. Not asked about an agent that was stopped."""
START_S = 60.0
AWAY_MOST_S = 3600.0
"""More than that no session waits for an engine that is away."""
_ASIDE = (
    "export HOME=/tmp/start TMPDIR=/tmp/start; mkdir $HOME && cd $HOME || exit 126; "
    '"$@"; code=$?; cd /; rm -rf /tmp/start; exit $code'
)
"""It must find no trace of this when it starts for the task."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def exit_code_rule(result: ExecResult) -> tuple[AgentExit, str]:
    """Exit code 0 is finished; else failed with the last line the agent complained with."""
    if result.exit_code == 0:
        return "finished", ""
    said = (result.stderr.strip() or result.stdout.strip()).decode("utf-8", "replace")
    lines = _COLOURS.sub("", said).splitlines() or [""]
    return "failed", f"exit code {result.exit_code}: {lines[-1][:300]}"


async def smoke_test(sandbox: Sandbox, argv: Sequence[str], what: str) -> None:
    """That a program starts in the sandbox of an image, whose libraries nobody knows: what an image lacks
    must not be laid on the agent. Raises HarnessError."""
    done = await sandbox.exec(["/bin/sh", "-c", _ASIDE, "sh", *argv], timeout_s=START_S)
    if done.exit_code != 0:
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines() or ["no output"]
        how = "hung" if done.timed_out else f"exit code {done.exit_code}"
        raise HarnessError(
            f"{what} does not start in this image ({how}): {(lines or ['no output'])[-1][:200]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProcess:
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    stdin: bytes = field(repr=False)
    log_bytes: int
    """Kept of standard output and of standard error each; what is beyond is read and forgotten."""

    async def run(
        self, sandbox: Sandbox, wall_s: float, left: Left, rule: Rule, away_s: AwayTime = no_time
    ) -> AgentEnd:
        """Raises SandboxError."""
        running = asyncio.create_task(
            sandbox.exec(
                self.argv,
                # The last resort: `attend` stops it before.
                timeout_s=wall_s + AWAY_MOST_S + GRACE_S + 2 * KILL_S,
                env=self.env,
                stdin=self.stdin,
                max_output_bytes=self.log_bytes,
            )
        )
        result, why = await attend(running, sandbox, wall_s=wall_s, left=left, away_s=away_s)
        log = result.stdout + result.stderr
        if why == "deadline" or result.timed_out:
            return AgentEnd(exit="timeout", detail=f"stopped after {wall_s:g} s", log=log, reusable=False)
        if why == "left":
            return AgentEnd(exit="finished", detail="said that it was done and was stopped", log=log)
        outcome, detail = rule(result)
        return AgentEnd(exit=outcome, detail=detail, log=log)
