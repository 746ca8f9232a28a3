"""Commands that go on when whoever started them has lost the way to the sandbox.

    start -> a session of its own in the sandbox: pid, log and exit files in one folder -> poll by short
    commands

Over any Sandbox, with nothing but `exec` and `spawn`, so a stream that a cloud cuts after some minutes costs
nothing, and another handle, or another process, can `attach` by the id. The files are the sandbox's own and
so the agent's: an exit code read here says how an agent ended, never what a grade is.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence

from insitu.errors import SandboxError, SandboxLost, SandboxTransient
from insitu.sandbox.base import ExecResult, Sandbox
from insitu.storage.ulid import new_ulid

FOLDER = "/tmp/.insitu"
MARK = "INSITU_RUN"
KILLED = -9
CALL_S = 30.0
STUMBLES = 5
"""Calls in a row that may fail for a moment before a wait gives up."""
_ID = re.compile(r"[0-9A-Za-z]{1,64}")

_STARTED = """
started() { { read -r line < "/proc/$1/stat"; } 2> /dev/null || return 1
  set -- ${line##*) }; case $1 in Z | X) return 1 ;; esac; echo "${20}"; }
"""
# The exit file appears only after the command has ended by itself, and takes no space that the command could
# have used up. The log keeps the first bytes; the rest is read and dropped: it neither fills nor blocks.
_RUN = (
    _STARTED
    + """
folder=$1; cwd=$2; blocks=$3; shift 3
echo 000 > "$folder/exit.new" && echo "$$ $(started $$)" > "$folder/pid.new" || exit 1
mv "$folder/pid.new" "$folder/pid"
{ ( cd "$cwd" && exec "$@" ) < "$folder/input" 2>&1
  printf '%03d\\n' $? 1<> "$folder/exit.new"; mv "$folder/exit.new" "$folder/exit"; } | {
  ( ulimit -f "$blocks"; exec cat >> "$folder/log" ) 2> /dev/null; exec cat > /dev/null; }
"""
)
_PREPARE = 'mkdir -p "$1" && cat > "$1/input" && : > "$1/log"'
_LET_GO = """
run=$1; shift
nohup setsid sh -c "$run" run "$@" > /dev/null 2>&1 < /dev/null &
"""
_UP = """
for round in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  [ ! -f "$1/pid" ] || exit 0
  sleep 0.0$round 2> /dev/null || sleep 1
done
exit 1
"""
_POLL = (
    _STARTED
    + """
cd "$1" 2> /dev/null && read -r pid time < pid || { echo missing; exit; }
now=$(started "$pid")
if [ -f exit ]; then echo "exit $(cat exit)"
elif [ "$now" = "$time" ]; then echo running
else echo killed; fi
"""
)
# Every process that came of the run carries its mark, daemons as well. All are stopped before one is killed:
# a shell that saw its child die would go on, and might end with 0.
_KILL = """
for round in 1 2 3 4 5 6 7 8 9 10; do
  found=
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    if [ "$pid" != $$ ] && { tr '\\0' '\\n' < "$folder/environ"; } 2> /dev/null | grep -qx "$1"; then
      found="$found $pid"; kill -STOP "$pid" 2> /dev/null
    fi
  done
  [ -n "$found" ] || exit 0
  kill -9 $found 2> /dev/null
done
exit 1
"""


class Detached:
    """A detached run, seen from outside; made by `start` and `attach`."""

    def __init__(self, sandbox: Sandbox, run_id: str, looks: asyncio.Lock | None = None) -> None:
        """looks: held by whoever looks at the run, and by whoever ends other commands of the sandbox: a look
        that is killed half way says what is not true."""
        self._sandbox = sandbox
        self.id = run_id
        self._looks = looks or asyncio.Lock()
        self._folder = f"{FOLDER}/{run_id}"
        self._killed = False

    async def poll(self) -> int | None:
        """Exit code; KILLED for what was killed, None while it runs. Raises SandboxLost with the sandbox."""
        async with self._looks:
            said = (await _sh(self._sandbox, _POLL, self._folder)).stdout.decode("ascii", "replace").split()
        match said:
            case ["exit", code] if code.isdigit():
                return KILLED if self._killed and int(code) == 0 else int(code)
            case ["running"]:
                return None
            case ["killed"]:
                return KILLED
            case ["missing"]:
                raise SandboxError(f"the sandbox knows no run {self.id}")
        raise SandboxError(f"run {self.id}: its files were changed in the sandbox")

    async def wait(self, timeout_s: float, *, poll_s: float = 1.0) -> int:
        """Poll until it ends, at first often; a call that stumbles is made again. Raises TimeoutError."""
        until, pause, stumbled = time.monotonic() + timeout_s, 0.05, 0
        while True:
            try:
                code = await self.poll()
                stumbled = 0
            except SandboxTransient:
                stumbled, code = stumbled + 1, None
                if stumbled == STUMBLES:
                    raise
            if code is not None:
                return code
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"run {self.id} has not ended within {timeout_s:g} s")
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, poll_s)

    async def kill(self) -> None:
        """Kill the run with everything it started; what escapes that takes everything in the sandbox
        along."""
        self._killed = True
        result = await _sh(self._sandbox, _KILL, f"{MARK}={self.id}", check=False)
        if result.exit_code != 0:
            await self._sandbox.kill_all()

    async def read_log(self, offset: int = 0, *, max_bytes: int = 1 << 20) -> bytes:
        """Output and complaints from `offset` on, as they came."""
        script = 'tail -c "+$2" "$1/log" | head -c "$3"'
        place = (self._folder, str(offset + 1), str(max_bytes))
        async with self._looks:
            return (await _sh(self._sandbox, script, *place, output=max_bytes)).stdout


async def start(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: bytes = b"",
    max_log_bytes: int = 16 << 20,
    hold: bool = True,
    looks: asyncio.Lock | None = None,
) -> Detached:
    """Start a command that needs no connection. Raises SandboxError when it did not start.

    `hold`: start it as a process of `spawn`, so that a sandbox which ends stray processes with a command that
    timed out spares this one. Without, it is left to itself at once. `looks`: see Detached.
    """
    if not argv:
        raise SandboxError("an empty command")
    run = Detached(sandbox, new_ulid(), looks)
    blocks = str(-(-max_log_bytes // 512))
    place = (f"{FOLDER}/{run.id}", cwd or sandbox.workdir, blocks)
    marked = {**(env or {}), MARK: run.id}
    await _sh(sandbox, _PREPARE, place[0], stdin=stdin)
    if hold:
        await sandbox.spawn(
            ["sh", "-c", f"exec > /dev/null 2>&1 < /dev/null\n{_RUN}", "run", *place, *argv], env=marked
        )
    else:
        await _sh(sandbox, _LET_GO, _RUN, *place, *argv, env=marked)
    await _sh(sandbox, _UP, place[0])
    return run


def attach(sandbox: Sandbox, run_id: str) -> Detached:
    """A handle on a run that somebody else started. Raises SandboxError for what is no id."""
    if not _ID.fullmatch(run_id):
        raise SandboxError(f"{run_id!r} is no id of a run")
    return Detached(sandbox, run_id)


async def _sh(
    sandbox: Sandbox,
    script: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    output: int = 1 << 16,
    check: bool = True,
) -> ExecResult:
    argv = ["sh", "-c", script, "insitu", *arguments]
    result = await sandbox.exec(argv, timeout_s=CALL_S, env=env, stdin=stdin, max_output_bytes=output)
    if result.exit_code is None:
        raise SandboxLost("the sandbox is gone")
    if check and result.exit_code != 0:
        said = result.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[-1] if said else f"exit code {result.exit_code}"
        raise SandboxError(f"a detached run: {why}")
    return result
