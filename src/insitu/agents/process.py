"""Execution of agents that are a single command: start, timeout, stop and exit status."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from insitu.agents.base import AwayTime, FinishedCheck, no_time
from insitu.agents.recipe import Rule
from insitu.agents.termination import GRACE_S, KILL_S, attend
from insitu.agents.worker import AgentEnd
from insitu.errors import HarnessError
from insitu.sandbox.base import Sandbox

START_S = 60.0
AWAY_MOST_S = 3600.0
"""Longest engine downtime that a session waits for."""
# Runs in a temporary home that is removed, so that the agent finds no trace of it at its real start.
_IN_TEMPORARY_HOME = (
    "export HOME=/tmp/start TMPDIR=/tmp/start; mkdir $HOME && cd $HOME || exit 126; "
    '"$@"; code=$?; cd /; rm -rf /tmp/start; exit $code'
)


async def smoke_test(sandbox: Sandbox, argv: Sequence[str], what: str) -> None:
    """Check that a program starts in the sandbox of an image.

    Raises HarnessError.
    """
    # The image may lack libraries; such a failure must not be attributed to the agent.
    done = await sandbox.exec(["/bin/sh", "-c", _IN_TEMPORARY_HOME, "sh", *argv], timeout_s=START_S)
    if done.exit_code != 0:
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines() or ["no output"]
        how = "timeout" if done.timed_out else f"exit code {done.exit_code}"
        raise HarnessError(
            f"{what} does not start in this image ({how}): {(lines or ['no output'])[-1][:200]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProcess:
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    stdin: bytes = field(repr=False)
    log_bytes: int
    """Limit of stdout and of stderr each; output beyond it is discarded."""

    async def run(
        self, sandbox: Sandbox, wall_s: float, finished: FinishedCheck, rule: Rule, away_s: AwayTime = no_time
    ) -> AgentEnd:
        """Run the command and return how it ended.

        Raises SandboxError.
        """
        running = asyncio.create_task(
            sandbox.exec(
                self.argv,
                # Fallback timeout: `attend` stops the process earlier.
                timeout_s=wall_s + AWAY_MOST_S + GRACE_S + 2 * KILL_S,
                env=self.env,
                stdin=self.stdin,
                max_output_bytes=self.log_bytes,
            )
        )
        result, why = await attend(running, sandbox, wall_s=wall_s, finished=finished, away_s=away_s)
        log = result.stdout + result.stderr
        if why == "deadline" or result.timed_out:
            return AgentEnd(exit="timeout", detail=f"stopped after {wall_s:g} s", log=log, reusable=False)
        if why == "finished":
            return AgentEnd(exit="finished", detail="reported completion and was stopped", log=log)
        outcome, detail = rule(result)
        return AgentEnd(exit=outcome, detail=detail, log=log)
