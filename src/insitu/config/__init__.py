"""Typed configuration: TOML with one table per folder plus [run] and [model]."""

from insitu.config.arms import Arm
from insitu.config.harness import HarnessTable
from insitu.config.load import (
    RENAMED,
    WARM_START,
    demo_preset,
    dotted_keys,
    dump_toml,
    key_of,
    known_keys,
    load_config,
    model_folder,
    model_kind,
    read_toml,
    table_classes,
    tables_of,
)
from insitu.config.sandbox import SandboxTable
from insitu.config.tables import Config
from insitu.config.tasks import EvalTable, TaskSetTable, ToyKind
from insitu.config.training import TrainTable

__all__ = [
    "RENAMED",
    "WARM_START",
    "Arm",
    "Config",
    "EvalTable",
    "HarnessTable",
    "SandboxTable",
    "TaskSetTable",
    "ToyKind",
    "TrainTable",
    "demo_preset",
    "dotted_keys",
    "dump_toml",
    "key_of",
    "known_keys",
    "load_config",
    "model_folder",
    "model_kind",
    "read_toml",
    "table_classes",
    "tables_of",
]
