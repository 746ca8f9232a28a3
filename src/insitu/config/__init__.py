"""Typed configuration: TOML with one table per folder plus [run] and [model]."""

from insitu.config.load import (
    WARM_START,
    demo_preset,
    dotted_keys,
    dump_toml,
    load_config,
    model_folder,
    read_toml,
)
from insitu.config.tables import Config, HarnessTable, ToyKind
from insitu.config.training import TrainTable

__all__ = [
    "WARM_START",
    "Config",
    "HarnessTable",
    "ToyKind",
    "TrainTable",
    "demo_preset",
    "dotted_keys",
    "dump_toml",
    "load_config",
    "model_folder",
    "read_toml",
]
