"""Registry of extensions: agents, tasks, graders, rewards, losses, engines and what else `Kind` lists.

An extension is named by a built-in name, an entry point of group `insitu.<kind>`, a dotted path
`module:attribute` or a file path `file.py:attribute`, or it is a Python object. Files and modules are looked
up in the installed packages, then in the current folder. The packages beside the core (`SATELLITES`) are
found by their entry points only.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from insitu.errors import ConfigError
from insitu.install_hints import install_extra

Kind = Literal[
    "agents",
    "tasks",
    "rewards",
    "losses",
    "advantages",
    "samplers",
    "sandboxes",
    "engines",
    "models",
    "trackers",
    "hooks",
    "runners",
    "fleets",
    "parts",
    "commands",
    "api",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

BUILT_IN: Mapping[Kind, Mapping[str, str]] = {
    "agents": {
        "pi": "insitu.agents.pi:RECIPE",
        "script": "insitu.agents.script:RECIPE",
        "claude_code": "insitu.agents.claude_code:RECIPE",
        "codex": "insitu.agents.codex:RECIPE",
        "opencode": "insitu.agents.opencode:RECIPE",
        "qwen_code": "insitu.agents.qwen_code:RECIPE",
        "gemini_cli": "insitu.agents.gemini_cli:RECIPE",
        "mini_swe": "insitu.agents.mini_swe:RECIPE",
        "single_turn": "insitu.agents.single_turn:SingleTurn",
    },
    "tasks": {
        "toy": "insitu.tasks.toy:ToySource",
        "jsonl": "insitu.tasks.own_formats:PlainJsonl",
        "folder": "insitu.tasks.own_formats:PlainFolder",
    },
    "models": {"hermes": "insitu.chat.hermes:hermes_folder"},
    "runners": {
        "json_io": "insitu.grading.runners.json_io:JsonIoRunner",
        "command": "insitu.grading.runners.command:CommandRunner",
    },
    "sandboxes": {
        "local": "insitu.runtime.sandboxes:local_backend",
        "docker": "insitu.runtime.sandboxes:docker_backend",
    },
    "engines": {
        "vllm": "insitu.engines.vllm:open_vllm",
        "sglang": "insitu.engines.sglang:open_sglang",
    },
    "commands": {
        "core": "insitu.cli.commands:COMMANDS",
    },
}
"""Dotted paths of the core's extensions, by kind and name; imported at first use."""

SATELLITES: Mapping[str, Mapping[str, str]] = {
    "train": {
        "verbs": "init demo train sft replay ranks",
        "commands": "train",
        "api": "replay replay_async sft sft_async train train_async",
        "engines": "embedded tinker",
        "models": "gguf hub",
        "parts": "hub_rows",
        "samplers": "epochs signal within_limits",
        "losses": "dppo ppo_clip cispo gspo decoupled nll",
        "advantages": "dr_grpo grpo rloo maxrl zero",
    },
    "view": {
        "verbs": "view runs top show compare query digest skills track",
        "commands": "view",
        "api": "track",
        "parts": "facts transcript diff check_trackers start_trackers",
        "trackers": "wandb trackio tensorboard",
    },
    "bridges": {
        "verbs": "export import push",
        "commands": "bridges",
        "api": "export_model export_run import_run push",
        "engines": "external upstream",
        "parts": "fitting_renderer named_renderer",
    },
    "tasksets": {
        "verbs": "tasks",
        "commands": "tasksets",
        "api": "export_tasks list_tasks show_task validate validate_async",
        "agents": "terminus kimi_code continue_cn grok_cli cline gptme aider",
        "tasks": (
            "swe_bench swe_bench_folders swe_bench_live swe_gym swe_rebench swe_pro swe_smith r2e_gym slime"
            " terminus apps taco code_contests live_code_bench humaneval mbpp evalplus bigcodebench"
            " unit_tests polyglot harbor terminal_bench verifiers openenv"
        ),
        "runners": "stdio pytest swebench_log harbor",
        "parts": "open_container tool_hook offer_servers",
        "rewards": "verifiers openenv rubric ranking",
    },
    "fleet": {
        "verbs": "deploy",
        "commands": "fleet",
        "fleets": "processes ray",
        "sandboxes": "harbor",
        "parts": "check_public_url open_public_url",
    },
    "lab": {
        "verbs": "attack conformance gpu-check",
        "commands": "lab",
        "api": "attack attack_async conformance conformance_async",
    },
}
"""Names that the packages `insitu-<key>` declare, by kind or "verbs": what to install for one."""

BUILT_IN_SOURCE = "built in"
OBJECT = "object:"
"""Prefix of the name of a Python object that no other process can import."""
_objects: dict[str, object] = {}
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionInfo:
    """One row of the listing."""

    kind: Kind
    name: str
    source: str
    """BUILT_IN_SOURCE, or distribution and version of an entry point."""
    error: str = ""
    """Why the entry point cannot be used; empty if it can."""


def satellite_of(kind: str, name: str) -> str:
    """Return the package beside the core that declares a name, else "" (`SATELLITES`)."""
    return next((key for key, own in SATELLITES.items() if name in own.get(kind, "").split()), "")


def shipped(kind: Kind) -> list[str]:
    """Return the names of the core and of the packages beside it, installed or not."""
    beside = (name for own in SATELLITES.values() for name in own.get(kind, "").split())
    return list(dict.fromkeys([*BUILT_IN.get(kind, {}), *beside]))


def names(kind: Kind) -> list[str]:
    """Return the names of the core, of insitu's installed packages, and of others, in this order."""
    own, declared = BUILT_IN.get(kind, {}), [point.name for point in _points(kind)]
    return list(dict.fromkeys([*(name for name in shipped(kind) if name in {*own, *declared}), *declared]))


def find(kind: Kind, value: object) -> Any:
    """Return the extension that `value` names, or `value` itself if it is an object; raise ConfigError."""
    found = _find(kind, value)
    if inspect.iscoroutinefunction(found) and kind not in ("rewards", "hooks", "api"):
        raise ConfigError(f"{kind}: {value} is a coroutine function, must be a plain one")
    return found


def _find(kind: Kind, value: object) -> Any:
    if not isinstance(value, str):
        return value
    check(kind, value)
    if value in _objects:
        return _objects[value]
    if value.startswith(OBJECT):
        raise ConfigError(f"{value} was passed as a Python object to another process: pass it again")
    if target := BUILT_IN.get(kind, {}).get(value):
        return load(target)
    if ":" in value:
        return load(value)
    return _load_point(_named(kind, value)[0])


def check(kind: Kind, name: str) -> None:
    """Raise ConfigError for a name that is neither known nor a path; import nothing."""
    if ":" in name or name in BUILT_IN.get(kind, {}):
        return
    owners = [_source(point) for point in _named(kind, name)]
    if len(owners) > 1:
        raise ConfigError(f"{kind}: the name {name!r} is declared by {' and by '.join(owners)}")
    if not owners and (package := satellite_of(kind, name)):
        raise ConfigError(f"{kind}: {name} {not_installed(package)}")
    if not owners:
        known = names(kind)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"unknown name {name!r} of kind {kind}; {hint}known:"
            f" {', '.join([*known, 'module:attribute', 'file.py:attribute'])}"
        )


def reference(kind: Kind, value: object) -> str:
    """Return the name to store in a configuration, which `find` resolves to `value` in this process.

    It is a dotted path that other processes can import, where there is one. Raises ConfigError as `check`.
    """
    if isinstance(value, str):
        check(kind, value)
        target, _, name = value.rpartition(":")
        # Absolute, so that a run can be resumed from any folder.
        return f"{Path(target).expanduser().absolute()}:{name}" if target.endswith(".py") else value
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    path = f"{module}:{name}"
    if module == "__main__" or not name or _attribute(sys.modules.get(module), name) is not value:
        path = f"{OBJECT}{name or type(value).__name__}-{next(_numbers)}"
    _objects[path] = value
    return path


def load(path: str) -> Any:
    """Return the object at `module:attribute` or `file.py:attribute`; raise ConfigError."""
    target, colon, name = path.rpartition(":")
    if not (colon and target and name):
        raise ConfigError(f"{path!r} is not a path like module:attribute or file.py:attribute")
    try:
        module = _import_file(Path(target)) if target.endswith(".py") else _import_module(target)
    except ConfigError:
        raise
    except Exception as error:  # the boundary: it runs the user's module
        missing = isinstance(error, ModuleNotFoundError) and error.name == target.partition(".")[0]
        where = f" (looked in {Path.cwd()} and in the installed packages)" if missing else ""
        raise ConfigError(f"cannot import {target} for {path}: {error!a}{where}") from error
    value = _attribute(module, name)
    if value is None:
        raise ConfigError(f"{path}: {target} ({getattr(module, '__file__', None)}) has no attribute {name}")
    return value


def listing() -> Iterator[ExtensionInfo]:
    """Yield every extension that has a name; those of others are imported, to report what fails."""
    for kind in KINDS:
        for name in BUILT_IN.get(kind, {}):
            yield ExtensionInfo(kind=kind, name=name, source=BUILT_IN_SOURCE)
        for point in _points(kind):
            error = ""
            try:
                check(kind, point.name)
                if not _of_satellite(kind, point):  # insitu's own import torch
                    _load_point(point)
            except ConfigError as failed:
                error = str(failed)
            if point.name in BUILT_IN.get(kind, {}):
                error = "the name is that of a built-in one, which is used"
            elif point not in (used := _named(kind, point.name)):
                error = f"the name is that of one of {_source(used[0])}, which is used"
            yield ExtensionInfo(kind=kind, name=point.name, source=_source(point), error=error)


def not_installed(package: str) -> str:
    """Return "is in the package ..., which is not installed: " and the command that installs it."""
    return f"is in the package insitu-{package}, which is not installed: {install_extra(package)}"


def _points(kind: Kind) -> Sequence[EntryPoint]:
    return _installed_points(f"insitu.{kind}", tuple(sys.path))


@functools.cache
def _installed_points(group: str, path: tuple[str, ...]) -> Sequence[EntryPoint]:
    """Return the entry points of a group, which are those of this `sys.path`."""
    return sorted(entry_points(group=group), key=lambda point: point.name)


def _named(kind: Kind, name: str) -> Sequence[EntryPoint]:
    """Return the entry points of a name: that of insitu's own package alone, where there is one."""
    found = [point for point in _points(kind) if point.name == name]
    return [point for point in found if _of_satellite(kind, point)] or found


def _of_satellite(kind: Kind, point: EntryPoint) -> bool:
    owner = satellite_of(kind, point.name)
    return bool(owner) and point.dist is not None and point.dist.name == f"insitu-{owner}"


def _source(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _load_point(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # the boundary: it runs another package's module
        raise ConfigError(
            f"entry point {point.name} of {_source(point)} cannot be imported: {error!a}"
        ) from error


def _import_module(name: str) -> ModuleType:
    # insitu's own modules need no folder of the user, where a folder `torch` would pass for the package.
    if name.partition(".")[0].partition("_")[0] != "insitu":
        _append_path(Path.cwd())
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a Python file once per process; its folder is searched for the modules that it imports."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    name = f"insitu_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    _append_path(path.parent)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _append_path(folder: Path) -> None:
    # At the end: a user's file must not shadow a module that insitu imports later.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _attribute(value: object, name: str) -> object:
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
