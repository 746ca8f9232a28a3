"""The weights a run begins with lie outside its directory; this makes sure that they are still the same.

Only their checksum is stored. Without the check a resumed run would go on from another model, and a replay
would blame the training for it.
"""

from __future__ import annotations

from insitu.errors import RecordError
from insitu.storage.store import Store
from insitu.training.learner.client import Learner

START_MODEL = "start_model"
"""Fact of a run: checksum of the weights before its first step."""


def keep_start_model(store: Store, learner: Learner) -> None:
    """Remember the weights that a run starts from; `learner` holds them, nothing else yet."""
    if START_MODEL in store.meta():
        check_start_model(store, learner)
    else:
        store.set_meta(START_MODEL, learner.weights)


def check_start_model(store: Store, learner: Learner) -> None:
    """Raises RecordError when a learner that has trained nothing yet holds other weights than the run did."""
    began, found = store.meta().get(START_MODEL), learner.weights
    if began is not None and began != found:
        raise RecordError(
            f"{learner.model} is not the model that the run began with (weights {found[:12]}, not"
            f" {began[:12]}): put the old one there, or name its folder as model.path in config.toml"
        )
