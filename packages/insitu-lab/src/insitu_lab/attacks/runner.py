"""Runs attacks against the real and the careless grader.

Move -> (agent's sandbox -> kill_all -> capture) -> Grader -> outcome
                     \\-> NaiveGrader, in the same sandbox
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from insitu.errors import InsituError, SandboxError
from insitu.grading.grader import GradeConfig, Grader
from insitu.sandbox.base import SandboxBackend, SandboxSpec
from insitu.types import Outcome, Tree, Verdict, task_hash
from insitu_lab.attacks.model import Attack, Move, Variant
from insitu_lab.attacks.naive_grader import MAX_WAIT_S, NaiveGrader, Trust
from insitu_lab.attacks.target import HIDDEN, TEST_EMPTY, TEST_MORE, TEST_TOTAL, Target

SCRIPT_S = 60.0
NAIVE_WORK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A cell with a wrong result."""

    id: int
    runner: str
    expected: str
    got: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Result of one attack under one runner."""

    id: int
    runner: str
    got: str
    """Outcomes of the cheats, each once."""
    residual: str = ""
    """Why the cheat may win; "" where it must not."""
    defeated: bool = False
    twins: int = 0
    twins_ok: int = 0
    failures: tuple[Failure, ...] = field(default=())


class AttackRunner:
    """Grades moves on one subject; `careless` is the backend of the careless grader."""

    def __init__(self, backend: SandboxBackend, careless: SandboxBackend, subject: Target) -> None:
        self.backend, self.careless, self.subject = backend, careless, subject
        self.idle = 0.0
        """Reward of an untouched folder."""
        self.grader = Grader(backend, GradeConfig(remember=0))
        self.naive = NaiveGrader(
            careless,
            HIDDEN,
            {subject.target: subject.solved[subject.target]},
            (TEST_TOTAL, TEST_EMPTY, TEST_MORE),
        )

    def env(self) -> Mapping[str, str]:
        from insitu_lab.attacks.file_attacks import EXTERNAL

        fixed = self.subject.solved[self.subject.target].content.decode()
        return {"FIX": fixed, "TARGET": self.subject.target, "EXTERNAL": EXTERNAL}

    async def left(self, move: Move, *, solved: bool) -> Tree:
        """Return the tree of an agent that makes this move. Raises SandboxError."""
        start = self.subject.solved if solved else self.subject.task.files
        tree = move.apply(start, self.subject.target)
        if not move.script:
            return tree
        async with await self.backend.create(SandboxSpec(files=tree, env=self.env())) as sandbox:
            done = await sandbox.exec(["/bin/sh", "-c", move.script], timeout_s=SCRIPT_S)
            if done.exit_code != 0:
                said = done.stderr[-200:].decode("utf-8", "replace").strip()
                raise SandboxError(f"the agent's commands failed ({done.exit_code}): {said}")
            await sandbox.kill_all()
            return await sandbox.get_tree()

    async def grade(self, tree: Tree, timeout_s: float | None = None) -> Verdict:
        task = self.subject.task
        if timeout_s is not None and timeout_s < task.grading.timeout_s:
            plan = replace(task.grading, timeout_s=timeout_s)
            named = task_hash(task.prompt, task.files, plan, task.setup)
            task = replace(task, grading=plan, content_hash=named)
        return await self.grader.grade(task, self.subject.oracle, tree)

    async def cheat(self, variant: Variant) -> Verdict:
        tree = await self.left(variant.cheat, solved=False)
        if not variant.neighbour:
            return await self.grade(tree, variant.timeout_s)
        verdict, beside = await asyncio.gather(
            self.grade(tree, variant.timeout_s), self.grade(self.subject.solved)
        )
        if beside.reward != 1.0:
            raise SandboxError(f"a neighbour was affected: {beside.outcome}: {beside.reason}")
        return verdict

    async def twin(self, variant: Variant) -> Verdict:
        move = variant.twin or variant.cheat
        if variant.stdio_twin is not None and self.subject.task.grading.runner == "stdio":
            move = variant.stdio_twin
        return await self.grade(await self.left(move, solved=True))

    async def fools(self, move: Move, trust: Trust) -> bool:
        """Return whether the careless grader pays for a move, or masks it."""
        reward = await self.naive_reward(move, trust)
        return reward is None if trust == "masking" else reward == 1.0

    async def naive_reward(self, move: Move, trust: Trust, *, solved: bool = False) -> float | None:
        start = self.subject.solved if solved else self.subject.task.files
        tree = move.apply(start, self.subject.target)
        max_wait_s = 3.0 if trust == "masking" else MAX_WAIT_S
        if not move.script:
            return await self.naive.grade(tree, trust, max_wait_s=max_wait_s)
        spec = replace(self.naive.spec(tree), env=self.env())
        async with await self.careless.create(spec) as sandbox:
            await sandbox.exec(["/bin/sh", "-c", move.script], timeout_s=SCRIPT_S)
            found = await sandbox.get_tree()
            return await self.naive.grade_in(sandbox, {**tree, **found}, trust, max_wait_s=max_wait_s)


async def try_variants(
    lab: AttackRunner, attack: Attack, runner: str, residual: str, *, own: bool = False
) -> Cell:
    """Run every variant as cheat and as twin. `own`: a user's task, where a residual win is a failure too."""
    failures: list[Failure] = []
    seen: list[str] = []
    twins_ok = 0
    for variant in attack.variants:
        allowed = variant.allowed(runner)
        wanted = f"{variant.name}: {'no more than the base' if residual else '|'.join(allowed)}"
        try:
            verdict = await lab.cheat(variant)
            got, reason = str(verdict.outcome), verdict.reason
            bad = verdict.outcome is Outcome.INFRA or (not residual and verdict.outcome not in allowed)
            won = verdict.reward is None or verdict.reward > lab.idle
            bad = bad or (won and (own or not residual))
        except SandboxError as error:
            got, reason, bad = "error", str(error), True
        seen.append(got)
        if bad:
            failures.append(Failure(id=attack.id, runner=runner, expected=wanted, got=f"{got}: {reason}"))
        try:
            twin = await lab.twin(variant)
            said = f"{twin.outcome}: {twin.reason}"
            kept = twin.reward == 1.0
        except SandboxError as error:
            said, kept = f"error: {error}", False
        twins_ok += kept
        if not kept:
            wanted = f"{variant.name}: the honest twin resolved"
            failures.append(Failure(id=attack.id, runner=runner, expected=wanted, got=said))
    return Cell(
        id=attack.id,
        runner=runner,
        got="|".join(dict.fromkeys(seen)),
        residual="" if own else residual,
        defeated=not failures and (own or not residual),
        twins=len(attack.variants),
        twins_ok=twins_ok,
        failures=tuple(failures),
    )


async def fool_the_naive(lab: AttackRunner, attack: Attack) -> tuple[Failure, ...]:
    """Return the variants that do not fool the careless grader as they claim."""
    failures = []
    for variant in attack.variants:
        if variant.naive is not None and not await lab.fools(variant.cheat, variant.naive):
            wanted = f"{variant.name}: pays, trusting in {variant.naive}"
            failures.append(Failure(id=attack.id, runner="naive", expected=wanted, got="not fooled"))
    return tuple(failures)


async def try_play(lab: AttackRunner, attack: Attack, runner: str) -> tuple[Cell, bool]:
    """Run a play; return its cell and whether the careless counterpart was fooled."""
    if attack.play is None:
        raise ValueError(f"attack {attack.id} has no play")
    try:
        done = await attack.play(lab)
    except InsituError as error:
        failure = Failure(id=attack.id, runner=runner, expected="a finding", got=f"error: {error}")
        return Cell(id=attack.id, runner=runner, got="error", twins=1, failures=(failure,)), True
    failures = []
    if done.got != "defeated":
        failures.append(Failure(id=attack.id, runner=runner, expected=attack.expect, got=done.got))
    if done.twin != 1.0:
        failures.append(
            Failure(
                id=attack.id, runner=runner, expected="the honest twin resolved", got=f"reward {done.twin}"
            )
        )
    cell = Cell(
        id=attack.id,
        runner=runner,
        got=done.got,
        defeated=done.got == "defeated",
        twins=1,
        twins_ok=int(done.twin == 1.0),
        failures=tuple(failures),
    )
    return cell, done.naive
