"""A run directory, open for reading: what `insitu.open_run` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from insitu.errors import ConfigError
from insitu.registry import find
from insitu.results.tables import Rollouts, StepTable, Text, html_table
from insitu.storage.open_run import kind_of
from insitu.storage.queries import FILTERS
from insitu.storage.run_dir import check_store, read_config, read_store, read_summary
from insitu.types import Ledger, Outcome, Rollout, Status


class Run:
    """A run directory, open for reading. Needs no live process; reads what is on disk at each call."""

    def __init__(self, path: Path | str) -> None:
        """Open a run directory; raise RecordError when `path` is none or its store cannot be read."""
        self.path = Path(path)
        self.config = read_config(self.path)
        check_store(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        return html_table(("", ""), list(find("parts", "facts")(self.path).items()))

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """Numbers of the finished run, as in summary.json; None before its end."""
        return read_summary(self.path)

    @property
    def kind(self) -> str:
        """`train`, or the verb whose run it is."""
        with read_store(self.path) as store:
            return kind_of(store)

    @property
    def steps(self) -> StepTable:
        """Committed optimizer steps in order, with their metrics and ledger; `column(name)`, `frame()`."""
        with read_store(self.path) as store:
            return StepTable(store.steps())

    @property
    def ledger(self) -> Ledger:
        """Account of all sampled tokens. Raises RecordError when it does not balance."""
        with read_store(self.path) as store:
            return store.ledger()

    def rollouts(
        self,
        *,
        phase: str | None = None,
        step: int | None = None,
        task: str | None = None,
        status: Status | str | None = None,
        outcome: Outcome | str | None = None,
        **filters: str | int | float,
    ) -> Rollouts:
        """Return the stored rollouts that match every given filter, in the order of phase, step and slot.

        `phase` is `train`, `eval_before`, `eval_during` or `eval_after` (with .NAME for any but the first
        evaluation), and `eval` in a run of
        `insitu rollout`; `outcome` is the verdict's; further filters are those of the viewer's lists, such as
        `category`, `min_reward` or `solved` (docs/viewer-api.md). Tokens are read when a rollout is asked
        for; `column(name)` gives numpy, `frame()` a data frame. Raises ConfigError for an unknown filter,
        status or outcome.
        """
        with _known("status or outcome"):
            given = {
                "phase": phase,
                "step": step,
                "task": task,
                "status": None if status is None else Status(status).value,
                "outcome": None if outcome is None else Outcome(outcome).value,
            }
        if unknown := sorted(filters.keys() - FILTERS.keys()):
            raise ConfigError(f"no such filter: {unknown[0]}; there are: {', '.join(FILTERS)}")
        chosen: dict[str, object] = {name: value for name, value in given.items() if value is not None}
        return Rollouts(self.path, {**chosen, **filters})

    def rollout(self, rollout_id: str) -> Rollout:
        """Return one rollout. Raises RecordError when there is none with this id."""
        with read_store(self.path) as store:
            return store.rollout(rollout_id)

    def transcript(self, rollout_id: str) -> Text:
        """Return a rollout as text by turn, its verdict first, as `insitu show` prints it.

        Raises RecordError when there is none with this id.
        """
        return Text("\n".join(find("parts", "transcript")(self.path, rollout_id)))

    def diff(self, rollout_id: str) -> Text:
        """Return the judged changes of a rollout. Raises RecordError when there is none with this id."""
        return Text("\n".join(find("parts", "diff")(self.path, rollout_id)))


@contextlib.contextmanager
def _known(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"unknown {what}: {error}") from error
