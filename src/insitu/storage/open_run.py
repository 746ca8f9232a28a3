"""The one way in which a verb makes its run directory or continues one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from insitu.config import Config
from insitu.errors import RecordError
from insitu.storage.logs import log_to
from insitu.storage.run_dir import KIND, RunDir
from insitu.storage.store import Store

RunKind = Literal["train", "rollout", "sft", "serve", "bridge"]
"""Who writes a run: the verb, or a bridge."""


def kind_of(store: Store) -> str:
    """Return the kind of a run; `train` stores none."""
    return store.meta().get(KIND, "") or "train"


@contextmanager
def open_run(kind: RunKind, config: Config, resume: Path | None = None) -> Iterator[tuple[RunDir, Store]]:
    """Make the run directory of a configuration, or continue `resume`; log into it inside the context.

    A new one that stays unused is removed if the start fails. Raises RecordError for a run of another kind or
    one in use, SetupError when the disk is nearly full.
    """
    with ExitStack() as stack:
        run = stack.enter_context(RunDir.open(resume) if resume else RunDir.create(config))
        stack.push(run.drop_unused)
        stack.enter_context(log_to(run.logs / "insitu.log"))
        store = stack.enter_context(run.store())
        if resume and kind_of(store) != kind:
            raise RecordError(f"{run.path} holds a run of `insitu {kind_of(store)}`, not of `insitu {kind}`")
        if kind != "train":
            store.set_meta(KIND, kind)
        yield run, store
