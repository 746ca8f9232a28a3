"""Attacks, runners and sandboxes of one run of the suite, from options and configuration."""

from __future__ import annotations

import itertools
import re

from insitu.config import Config
from insitu.errors import ConfigError
from insitu.progress.base import View
from insitu.runtime.sandboxes import check_tasks, make_backend
from insitu.sandbox.base import SandboxBackend
from insitu_lab.attacks.matrix import ATTACKS, runners
from insitu_lab.attacks.model import Attack
from insitu_lab.attacks.run import AttackReport, run_matrix
from insitu_lab.attacks.runner import NAIVE_WORK_BYTES, Cell
from insitu_lab.attacks.target import target_for
from insitu_lab.attacks.user_tasks import run_user_tasks, user_targets


def chosen_attacks(text: str) -> tuple[Attack, ...]:
    """Return the attacks of `1,4,10-12`; all for "". Raises ConfigError."""
    wanted: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if found is None:
            raise ConfigError(f"--only takes numbers of attacks, like 1,4,10-12; got {part!r}")
        wanted |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    unknown = sorted(wanted - {attack.id for attack in ATTACKS})
    if unknown:
        raise ConfigError(f"no attack {unknown[0]}; there are 1 to {len(ATTACKS)}")
    return tuple(attack for attack in ATTACKS if not wanted or attack.id in wanted)


def chosen_runners(text: str) -> tuple[str, ...]:
    """Return the runners of `a,b`; all for "". Raises ConfigError."""
    known = runners()
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"no runner {unknown[0]} in the matrix; there are: {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def open_backends(config: Config) -> tuple[SandboxBackend, SandboxBackend]:
    """Return the backend, and one for the careless grader; no fallback. Raises ConfigError, SetupError."""
    if config.sandbox.backend == "harbor":
        raise ConfigError(
            "insitu attack needs sandboxes on this machine, where it can look for what is left; not"
            " sandbox.backend = harbor"
        )
    check_tasks(config, [target_for("json_io").task])
    return make_backend(config), make_backend(config, work_bytes=NAIVE_WORK_BYTES)


async def attack_tasks(
    config: Config, view: View, *, only: str, runner: str, tasks: int, own: bool
) -> AttackReport:
    """Run the chosen attacks; `own`: on so many of the configured tasks, not on the reference subject.

    Raises ConfigError, TaskError, SetupError.
    """
    done = itertools.count(1)

    def note(cell: Cell) -> None:
        view.note(f"{cell.runner} {cell.id} {'FAILED' if cell.failures else 'ok'}")
        view.advance(next(done))

    attacks, names = chosen_attacks(only), chosen_runners(runner)
    backend, careless = open_backends(config)
    if not own:
        view.stage("attacking", len(attacks) * len(names))
        return await run_matrix(attacks, names, backend, careless, note)
    source = config.task_set.path or config.task_set.source
    found = user_targets(config, source, tasks, view.note)
    subjects = [one for one in found if one.task.grading.runner in names]
    if not subjects:
        raise ConfigError(f"no task of {source} asks for runner {', '.join(names)}")
    check_tasks(config, [one.task for one in subjects])
    attacks = tuple(attack for attack in attacks if attack.portable)
    if not attacks:
        raise ConfigError(f"attacks {only} know the reference subject; none can be tried on {source}")
    view.stage("attacking", len(attacks) * len(subjects))
    return await run_user_tasks(attacks, subjects, backend, note)
