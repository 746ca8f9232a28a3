"""Train a language model in situ: inside the coding agent people really use.

The public API is what `__all__` names; everything else may change. Start reading the code at attempt.py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.agents.recipe import Recipe
    from insitu.api import (
        Run,
        RunEvent,
        ServedSession,
        Server,
        open_run,
        rollout,
        rollout_async,
        serve,
    )
    from insitu.config import Config, load_config
    from insitu.errors import InsituError
    from insitu.storage.store import StepRecord
    from insitu.tools import check_machine, grade, grade_async, install, install_async, recover
    from insitu.types import (
        Case,
        FileEntry,
        FinishedRollout,
        GradingPlan,
        Ledger,
        Limits,
        Oracle,
        Outcome,
        Rollout,
        Segment,
        Setup,
        Status,
        Task,
        Tokens,
        ToolEvent,
        Trajectory,
        Trust,
        Turn,
        Verdict,
    )
    from insitu_bridges.api import export_model, export_run, import_run, push
    from insitu_lab.api import attack, attack_async, conformance, conformance_async
    from insitu_tasksets.api import export_tasks, list_tasks, show_task, validate, validate_async
    from insitu_train.api import replay, replay_async, sft, sft_async, train, train_async
    from insitu_view.tracking.start import track

from insitu._version import __version__ as __version__

__all__ = [
    "Case",
    "Config",
    "FileEntry",
    "FinishedRollout",
    "GradingPlan",
    "InsituError",
    "Ledger",
    "Limits",
    "Oracle",
    "Outcome",
    "Recipe",
    "Rollout",
    "Run",
    "RunEvent",
    "Segment",
    "ServedSession",
    "Server",
    "Setup",
    "Status",
    "StepRecord",
    "Task",
    "Tokens",
    "ToolEvent",
    "Trajectory",
    "Trust",
    "Turn",
    "Verdict",
    "attack",
    "attack_async",
    "check_machine",
    "conformance",
    "conformance_async",
    "export_model",
    "export_run",
    "export_tasks",
    "grade",
    "grade_async",
    "import_run",
    "install",
    "install_async",
    "list_tasks",
    "load_config",
    "open_run",
    "push",
    "recover",
    "replay",
    "replay_async",
    "rollout",
    "rollout_async",
    "serve",
    "sft",
    "sft_async",
    "show_task",
    "track",
    "train",
    "train_async",
    "validate",
    "validate_async",
]

_NAMES = {
    "insitu.agents.recipe": "Recipe",
    "insitu.api": "Run RunEvent ServedSession Server open_run rollout rollout_async serve",
    "insitu.config": "Config load_config",
    "insitu.errors": "InsituError",
    "insitu.storage.store": "StepRecord",
    "insitu.tools": "check_machine grade grade_async install install_async recover",
}
_OF_SATELLITES = frozenset(
    "attack attack_async conformance conformance_async export_model export_run export_tasks import_run"
    " list_tasks push replay replay_async sft sft_async show_task track train train_async validate"
    " validate_async".split()
)
"""What packages beside the core declare as entry points of `insitu.api`."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import insitu` and `insitu --help` stay fast."""
    if name not in __all__:
        raise AttributeError(f"module 'insitu' has no attribute {name!r}")
    if name in _OF_SATELLITES:
        return _of_satellite(name)
    return getattr(importlib.import_module(_MODULES.get(name, "insitu.types")), name)


def _of_satellite(name: str) -> Any:
    from insitu.errors import ConfigError
    from insitu.registry import find

    try:
        return find("api", name)
    except ConfigError as error:  # what `from insitu import train` may raise
        raise ImportError(str(error).replace("api: ", "insitu.", 1)) from None
