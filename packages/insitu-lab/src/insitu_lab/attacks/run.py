"""Run the matrix: every attack and twin under every runner, and the careless grader once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from insitu.sandbox.base import SandboxBackend
from insitu_lab.attacks.matrix import RESIDUAL
from insitu_lab.attacks.model import Attack
from insitu_lab.attacks.runner import AttackRunner, Cell, Failure, fool_the_naive, try_play, try_variants
from insitu_lab.attacks.target import target_for

AT_ONCE = 2
"""Concurrent attacks; each has a few sandboxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackReport:
    """Results of a run of the suite."""

    cells: tuple[Cell, ...]
    naive: tuple[Failure, ...]
    """Attacks that fooled no careless grader."""
    unfit: tuple[Failure, ...] = ()
    """The user's tasks that were not attacked, with id 0."""

    @property
    def attacks(self) -> tuple[int, ...]:
        return tuple(sorted({cell.id for cell in self.cells}))

    @property
    def failures(self) -> tuple[Failure, ...]:
        found = [failure for cell in self.cells for failure in cell.failures]
        found += [*self.naive, *self.unfit]
        return tuple(sorted(found, key=lambda failure: (failure.id, failure.runner)))

    def by_runner(self, runner: str) -> tuple[int, int, int]:
        """Return (defeated, residual, tried) for one runner."""
        mine = [cell for cell in self.cells if cell.runner == runner]
        failed = {cell.id for cell in mine if cell.failures}
        residual = {cell.id for cell in mine if cell.residual} - failed
        defeated = {cell.id for cell in mine if cell.defeated} - failed
        return len(defeated), len(residual), len({cell.id for cell in mine})

    def as_json(self) -> dict[str, object]:
        """Return the counts; an attack is defeated when no cell failed and at least one runner defeats it."""
        failed = {failure.id for failure in self.failures}
        beaten = {cell.id for cell in self.cells if cell.defeated} - failed
        return {
            "attacks": len(self.attacks),
            "defeated": len(beaten),
            "twins": sum(cell.twins for cell in self.cells),
            "twins_ok": sum(cell.twins_ok for cell in self.cells),
            "failed": [
                {"id": f.id, "runner": f.runner, "expected": f.expected, "got": f.got} for f in self.failures
            ],
        }


async def run_matrix(
    attacks: Sequence[Attack],
    runners: Sequence[str],
    backend: SandboxBackend,
    careless: SandboxBackend,
    tell: Callable[[Cell], None] = lambda cell: None,
) -> AttackReport:
    """Run `attacks` on the reference subject, and each once on the careless grader."""
    cells: list[Cell] = []
    naive: list[Failure] = []
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(lab: AttackRunner, attack: Attack, runner: str, *, first: bool) -> None:
        async with gate:
            missed: tuple[Failure, ...]
            if attack.play is not None:
                cell, fooled = await try_play(lab, attack, runner)
                missed = () if fooled else (_harmless(attack),)
            else:
                cell = await try_variants(lab, attack, runner, RESIDUAL[runner].get(attack.id, ""))
                missed = await fool_the_naive(lab, attack) if first else ()
        cells.append(cell)
        naive.extend(missed)
        tell(cell)

    for number, runner in enumerate(runners):
        lab = AttackRunner(backend, careless, target_for(runner))
        async with asyncio.TaskGroup() as tasks:
            for attack in attacks:
                tasks.create_task(one(lab, attack, runner, first=number == 0))
    return AttackReport(
        cells=tuple(sorted(cells, key=lambda cell: (cell.id, cell.runner))), naive=tuple(naive)
    )


def _harmless(attack: Attack) -> Failure:
    wanted = "its careless counterpart is fooled"
    return Failure(id=attack.id, runner="naive", expected=wanted, got="not fooled")
