"""Runner `harbor`: a task folder's tests/test.sh runs in the grading sandbox and writes a reward file.

Weak: the script runs the candidate. The file is read after every process is dead, as a regular file of
bounded size and through no link. It must hold exactly a number from 0 to 1; of several by name in reward.json
`reward` counts, or else their mean. reward.json takes precedence over reward.txt, as in Harbor.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from insitu.errors import SandboxError, TaskError
from insitu.grading.candidate import Candidate
from insitu.grading.runners.base import RunLimits, RunReport
from insitu.grading.runners.common import (
    LIMIT_CPU,
    RunnerBase,
    control_task,
    out_of_cpu,
    run_in,
    text_tail,
    unique_pairs,
)
from insitu.sandbox.base import Sandbox
from insitu.types import FailingCheck, FileEntry, GradingPlan, HiddenTests, Oracle, Outcome, Task, Trust

TESTS, LOGS = "/tests", "/logs"
SCRIPT = "tests/test.sh"
REWARDS = (f"{LOGS}/verifier/reward.json", f"{LOGS}/verifier/reward.txt")
MAX_REWARD_BYTES = 4096
RUN = (
    f"{LIMIT_CPU}; rm -rf {LOGS}/verifier; mkdir -p {LOGS}/verifier {LOGS}/agent {LOGS}/artifacts"
    f" && exec {TESTS}/test.sh"
)
"""Runs the script by its shebang; bash runs one without. A reward that the agent left is not the script's."""
NUMBER = re.compile(r"\+?([0-9]{1,20}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?")


class HarborRunner(RunnerBase):
    """Runner `harbor`; trust weak."""

    name = "harbor"
    trust: Trust = "weak"
    places: tuple[str, ...] = (TESTS, LOGS)

    def check(self, task: Task, oracle: Oracle) -> None:
        if SCRIPT not in oracle.tests.files:
            raise TaskError(f"task {task.id}: the hidden files have no {SCRIPT}")
        other = [path for path in oracle.tests.files if not path.startswith("tests/")]
        if other:
            raise TaskError(f"task {task.id}: hidden file {other[0]} is not below tests/")

    def control(self) -> tuple[Task, Oracle]:
        task = control_task({"one": FileEntry(content=b"1\n")}, GradingPlan(runner=self.name))
        script = FileEntry(content=b"cat one > /logs/verifier/reward.txt\n")
        return task, Oracle(task_id="control", tests=HiddenTests(files={SCRIPT: script}))

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        tests = oracle.tests
        if not tests.image:
            return await self._judged(sandbox, oracle, candidate, limits)
        if limits.another is None:
            raise TaskError(f"task {task.id}: tests with an image of their own, and setup commands")
        await sandbox.close()
        async with await limits.another(image=tests.image, container="", cpus=0.0) as own:
            return await self._judged(own, oracle, replace(candidate, base={}), limits)

    async def _judged(
        self, sandbox: Sandbox, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        await carry(candidate, oracle.tests.carried, sandbox)
        for path, entry in oracle.tests.files.items():
            await sandbox.put(f"/{path}", entry.content, executable=entry.executable or path == SCRIPT)
        argv = ["bash", "-c", RUN, "tests", str(limits.cpu_s)]
        result = await run_in(sandbox, argv, limits, env=oracle.tests.env)
        if result.timed_out or out_of_cpu(result, limits.cpu_s):
            return _report(Outcome.TEST_TIMEOUT, "out of time", complete=not result.timed_out)
        await sandbox.kill_all()
        found = await self._read(sandbox)
        if found.outcome is not Outcome.RESOLVED and result.out_of_memory:
            found = replace(found, reason=f"{found.reason}; a process was out of memory")
        if found.outcome is Outcome.RESOLVED:
            return found
        last = FailingCheck(
            name=SCRIPT, outcome="end of the output", tail=text_tail(result.stdout, result.stderr)
        )
        return replace(found, failing=(last,))

    async def _read(self, sandbox: Sandbox) -> RunReport:
        for path in REWARDS:
            try:
                content = await sandbox.get(path, max_bytes=MAX_REWARD_BYTES)
            except SandboxError as error:
                if error.infra:
                    raise
                return _report(Outcome.REFUSED, "the reward file is too large")
            if content is None:
                continue
            try:
                reward = read_reward(content, is_json=path.endswith(".json"))
            except ValueError as error:
                return _report(Outcome.REFUSED, f"the reward file holds no reward: {error}")
            outcome = Outcome.RESOLVED if reward == 1.0 else Outcome.UNRESOLVED
            return _report(outcome, f"the tests gave {reward:g}", score=reward, complete=True)
        return _report(Outcome.UNRESOLVED, "the tests left no reward file", complete=True)


async def carry(candidate: Candidate, carried: Sequence[str], sandbox: Sandbox) -> None:
    """Write the files of a candidate that lie at or below one of `carried`; all without any."""
    if not carried:
        await candidate.lay(sandbox)
        return

    def lies(path: str) -> bool:
        return any(
            path == place or path.startswith(f"{place}/") or (place == "." and not path.startswith("/"))
            for place in carried
        )

    tree, base = candidate.tree, candidate.base
    files = {path: entry for path, entry in tree.items() if lies(path) and base.get(path) != entry}
    await sandbox.lay(files, remove=[path for path in base if lies(path) and path not in tree])


def _report(outcome: Outcome, reason: str, *, score: float = 0.0, complete: bool = False) -> RunReport:
    passed = int(outcome is Outcome.RESOLVED)
    return RunReport(outcome=outcome, passed=passed, total=1, reason=reason, complete=complete, score=score)


def read_reward(content: bytes, *, is_json: bool) -> float:
    """Return the number in a reward file. Raises ValueError for anything but a plain number from 0 to 1.

    In reward.json it may also be the `reward` of an object, or the mean of the values of one without that.
    """
    try:
        text = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ValueError("it is not ASCII") from None
    if not is_json:
        if NUMBER.fullmatch(text) is None:
            raise ValueError("not a plain number from 0 to 1")
        return _bounded(float(text))
    try:
        value = json.loads(text, parse_constant=_refused, object_pairs_hook=unique_pairs)
    except RecursionError:
        raise ValueError("not JSON") from None
    if isinstance(value, bool):
        raise ValueError("a bool is no number")  # as a value of an object Harbor accepts it
    if not isinstance(value, Mapping):
        return _bounded(value)
    if not value:
        raise ValueError("an object without a value")
    if "reward" in value:
        return _bounded(value["reward"])
    return statistics.fmean([_bounded(one) for one in value.values()])


def _bounded(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"a {type(value).__name__} is no number")
    if not (0 <= value <= 1) or not math.isfinite(value):
        raise ValueError("not a number from 0 to 1")
    return float(value)


def _refused(text: str) -> object:
    raise ValueError(f"{text} is no number")
