"""Format and reward `verifiers`: the tasks of a taskset of verifiers, scored by the taskset's own functions.

`tasks.path` is the id of an installed taskset, or a TOML file with its configuration. The functions run on
the host, on the answer alone: they see it as the model's one reply. Tasks that need a sandbox, tools or
agents of verifiers are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from insitu.errors import ConfigError, TaskError, user_code
from insitu.install_hints import install_package
from insitu.tasks.base import HOST_REWARD, Item
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.objects import location
from insitu.tasks.row_files import RawRow, RowLocation
from insitu.types import FinishedRollout
from insitu_tasksets.answers import answer_of, answer_task, named_or_file

_LIVE = ("setup", "finalize", "stage_verifier")


class Verifiers:
    """Format `verifiers`."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        for number, task in enumerate(_tasks(str(path)), 1):
            data = task.data.model_dump(mode="json", exclude_none=True)
            yield location({**data, "taskset": str(path), "idx": number - 1}, number)

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        data = _task(row).data
        prompt = row.get("prompt")
        if not isinstance(prompt, str):
            prompt = data.prompt_text
        return answer_task(
            str(data.id or data.name or f"{row['taskset']}-{row['idx']}"),
            "\n\n".join(part for part in (row.get("system_prompt"), prompt) if part),
            HOST_REWARD,
            options,
            data.timeout.agent,
        )


async def reward(rollout: FinishedRollout) -> Mapping[str, float]:
    """Return the taskset's rewards, by name and with their weights."""
    vf, task = _sdk(), _task(rollout.row)
    user = vf.UserMessage(content=task.data.prompt_text)
    reply = vf.AssistantMessage(content=answer_of(rollout))
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(parent=None, message=user),
            vf.MessageNode(parent=0, message=reply, sampled=True),
        ],
        is_completed=True,
        ok=True,
    )
    await task.score(trace)
    return {name: one.value for name, one in trace.rewards.items()}


def _sdk() -> Any:
    try:
        return import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigError(f"verifiers is not installed: {install_package('verifiers')}") from error


@lru_cache(maxsize=4)
def _tasks(path: str) -> Sequence[Any]:
    """Return the tasks of a taskset; raise TaskError."""
    vf, keys = _sdk(), named_or_file(path, "id")
    with user_code(TaskError, f"taskset {keys['id']}:"):
        taskset = vf.load_taskset(vf.taskset_config_type(keys["id"]).model_validate(keys))
        if vf.environment_class(keys["id"]) is not vf.SingleAgentEnv:
            raise TaskError(f"taskset {keys['id']}: its environment has agents of its own")
        if not taskset.bounded:
            raise TaskError(f"taskset {keys['id']} has no end: its tasks cannot be split")
        if type(taskset).toolsets(taskset.config):
            raise TaskError(f"taskset {keys['id']}: its tools are not offered to the agent")
        return list(taskset)


def _task(row: RawRow) -> Any:
    """Return the task that a row was made of; raise TaskError for one that insitu cannot run."""
    task = _tasks(row["taskset"])[row["idx"]]
    vf, kind = _sdk(), type(task)
    needs = [
        f"{name}() needs its sandbox" for name in _LIVE if getattr(kind, name) is not getattr(vf.Task, name)
    ]
    scorers = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    needs += [f"reward {one.__name__} needs its sandbox" for one in scorers if _needs_runtime(one)]
    if kind.toolsets(task.config):
        needs.append("its tools are not offered to the agent")
    if task.data.image:
        needs.append("its image is not used")
    if not scorers:
        needs.append("it has no reward")
    if needs:
        raise TaskError(f"verifiers task {kind.__name__}: {needs[0]}")
    return task


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
