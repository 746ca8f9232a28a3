"""Checks that a run's start model, which is outside its directory, is unchanged.

The run stores its checksum. Otherwise a resumed run would continue from another model, and a replay would
show wrong differences.
"""

from __future__ import annotations

from insitu.errors import RecordError
from insitu.storage.store import Store
from insitu.training.learner.client import Learner

START_MODEL = "start_model"
"""Metadata key: checksum of the weights before the first step."""


def keep_start_model(store: Store, learner: Learner) -> None:
    """Store the checksum of the start weights, which `learner` holds, or check it."""
    if START_MODEL in store.meta():
        check_start_model(store, learner)
    else:
        store.set_meta(START_MODEL, learner.weights)


def check_start_model(store: Store, learner: Learner) -> None:
    """Raise RecordError when an untrained learner holds other weights than the run began with."""
    began, found = store.meta().get(START_MODEL), learner.weights
    if began is not None and began != found:
        raise RecordError(
            f"{learner.model} is not the start model of the run (checksum {found[:12]}, expected"
            f" {began[:12]}): restore it, or set model.path in config.toml to its folder"
        )
