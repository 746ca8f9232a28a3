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
    from insitu.bridges.api import export_model, export_run, import_run, push
    from insitu.config import Config, load_config
    from insitu.errors import InsituError
    from insitu.storage.store import StepRecord
    from insitu.suites.api import attack, attack_async, conformance, conformance_async
    from insitu.tools import (
        check_machine,
        export_tasks,
        grade,
        grade_async,
        install,
        install_async,
        list_tasks,
        recover,
        show_task,
        track,
        validate,
        validate_async,
    )
    from insitu.training.api import replay, replay_async, sft, sft_async, train, train_async
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
        Trajectory,
        Trust,
        Turn,
        Verdict,
    )

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
    "insitu.bridges.api": "export_model export_run import_run push",
    "insitu.config": "Config load_config",
    "insitu.errors": "InsituError",
    "insitu.storage.store": "StepRecord",
    "insitu.suites.api": "attack attack_async conformance conformance_async",
    "insitu.tools": (
        "check_machine export_tasks grade grade_async install install_async list_tasks recover show_task"
        " track validate validate_async"
    ),
    "insitu.training.api": "replay replay_async sft sft_async train train_async",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import insitu` and `insitu --help` stay fast."""
    if name not in __all__:
        raise AttributeError(f"module 'insitu' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "insitu.types")), name)
