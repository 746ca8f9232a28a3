"""When a run writes checkpoints, and which of them stay."""

from __future__ import annotations

import time
from collections.abc import Callable

from insitu.errors import TrainError
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu_train.learner.supervisor import LearnerSupervisor
from insitu_train.recovery import best_step, checkpoint_folder, prune, written_steps


class Checkpoints:
    """Checkpoints of a run, one at a time in the background."""

    def __init__(
        self, run: RunDir, store: Store, supervisor: LearnerSupervisor, note: Callable[[str], None]
    ) -> None:
        """Set up. note: receives warnings."""
        self._run, self._store, self._supervisor, self._note = run, store, supervisor, note

    def name(self, step: int) -> str:
        """Return the folder of a step's checkpoint in the run directory; empty without one."""
        folder = checkpoint_folder(self._run, step)
        return str(folder.relative_to(self._run.path)) if self._run.config.saved_after(step) else ""

    async def after(self, step: int) -> float:
        """Begin the checkpoint of a published step if one is due; return the seconds that took."""
        began = time.monotonic()
        if self._run.config.saved_after(step):
            # a failure is no error: later steps are trained again from an earlier checkpoint
            if failed := await self._supervisor.save(checkpoint_folder(self._run, step)):
                self._note(f"step {step}: {failed}; an earlier checkpoint stays")
            self._prune()
            if step < self._run.config.run.steps:
                await self._supervisor.take_in()
        return time.monotonic() - began

    async def finish(self) -> None:
        """Wait for the last checkpoint; begin it again if a dead process did not write it.

        Raises TrainError when it cannot be written.
        """
        last = self._store.last_step()
        failed = await self._supervisor.written()
        if last is not None and not checkpoint_folder(self._run, last.step).exists():
            await self._supervisor.save(checkpoint_folder(self._run, last.step))
            failed = await self._supervisor.written()
        if failed:
            raise TrainError(failed)
        self._prune()

    def _prune(self) -> None:
        folder = self._run.checkpoints
        prune(folder, self._run.config.run.keep_checkpoints, best_step(self._store, written_steps(folder)))
