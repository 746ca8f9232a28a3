"""Rollouts as verifiers `Trace`s: one tree of message nodes each, whose branches are the rollout's rows.

A node has the ids that it adds; a call that several rows share is trained in the first, which is verifiers'
own rule. A token's weight is `loss_weights["rl"]`, multiplied by the step's trained tokens, since prime-rl
divides by them. Rollouts without a reward are kept with `rewards["reward"] = None`. Versions have no place in
a node: they are in `info["insitu"]`, per node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from insitu.types import IntArray, Turn
from insitu_bridges.calls import RowCall, row_calls
from insitu_bridges.rows import Conversion, GroupRows, RolloutRows, convert, step_tokens
from insitu_bridges.target_rows import TargetRow, first_trained, target_row, unscaled

Text = Callable[[IntArray], str]
"""Decoder of ids."""


def no_text(ids: IntArray) -> str:
    """Return no text: nodes then hold ids only."""
    return ""


def to_verifiers(groups: Sequence[GroupRows], *, text: Text = no_text) -> Conversion[list[dict[str, Any]]]:
    """Return a `Trace` per rollout with rows, as verifiers' `model_dump` writes it."""
    items = [item for group in groups for item in group.rollouts if item.segments]
    taken = [(row.rollout_id, row.segment) for item in items for row in item.rows]
    tokens = step_tokens(groups)
    return convert([_trace(item, text, tokens) for item in items], groups, taken)


def _trace(item: RolloutRows, text: Text, step_tokens: int) -> dict[str, Any]:
    rollout = item.rollout
    tree = _NodeTree(item, text, item.weight * step_tokens if item.rows else 0.0)
    for _, calls in row_calls(item):
        parent: int | None = None
        for call in calls:
            parent = tree.add(call, parent)
    reward = None if rollout.reward is None else {"score": rollout.reward, "weight": 1.0}
    return {
        "id": rollout.id,
        "task": {"type": "Task", "data": {"prompt": tree.prompt}, "key": rollout.task_id},
        "agent": {"config": {}},
        "nodes": tree.nodes,
        "rewards": {"reward": reward},
        "metrics": dict(rollout.reward_components),
        "is_completed": True,
        "ok": rollout.reward is not None,
        "stop_condition": rollout.status.value,
        "info": {
            "insitu": {
                "group_id": item.group_id,
                "used": item.reason,
                "attempt": rollout.attempt,
                "versions": tree.versions,
            }
        },
    }


@dataclass(slots=True)
class _NodeTree:
    """Nodes of one rollout."""

    item: RolloutRows
    text: Text
    weight: float
    """Of each of its trained tokens."""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, list[list[int]]] = field(default_factory=dict)
    """Number of a node -> version runs of its sampled ids."""
    prompt: str = ""
    known: dict[int, int] = field(default_factory=dict)
    """Turn -> its node."""

    def add(self, call: RowCall, parent: int | None) -> int:
        """Return the node of a call; its prompt's nodes and its own are made at the first row that has it."""
        turn = call.turn
        if turn.index in self.known:
            return self.known[turn.index]
        framed = 0
        for role, start, stop, name in turn.spans or (("user", 0, len(turn.context_ids), ""),):
            ids = turn.context_ids[framed:stop]
            framed = stop
            content = self.text(turn.context_ids[start:stop])
            self.prompt = self.prompt or (content if role == "user" else "")
            parent = self._node(parent, _message(role, content, name), ids)
        parent = self._sampled(parent, turn, framed, trained=call.trained)
        self.known[turn.index] = parent
        return parent

    def _node(self, parent: int | None, message: dict[str, Any], ids: IntArray) -> int:
        mask = [False] * len(ids)
        self.nodes.append({"parent": parent, "message": message, "token_ids": ids.tolist(), "mask": mask})
        return len(self.nodes) - 1

    def _sampled(self, parent: int | None, turn: Turn, framed: int, *, trained: bool) -> int:
        """Add the reply; the ids that open it are not sampled."""
        opening = turn.context_ids[framed:]
        ids = np.concatenate([opening, turn.ids])
        node = self._node(parent, _message("assistant", self.text(turn.ids), ""), ids)
        self.versions[str(node)] = [list(run) for run in turn.version_runs]
        if not trained or turn.logprobs is None:
            return node
        count, mask = len(turn.ids), [False] * len(opening) + [True] * len(turn.ids)
        weights = [0.0] * len(opening) + [self.weight] * count
        self.nodes[node] |= {
            "sampled": True,
            "mask": mask,
            "logprobs": turn.logprobs.astype(np.float64).tolist(),
            "advantages": None if self.item.advantage is None else [self.item.advantage] * count,
            "loss_weights": {"rl": weights},
        }
        return node


def _message(role: str, content: str, name: str) -> dict[str, Any]:
    if role == "tool":
        return {"role": "tool", "content": content, "tool_call_id": name}
    return {"role": role if role in ("system", "user", "assistant") else "user", "content": content}


def read_verifiers(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the branches of traces; the first with a sampled node trains it. Raises RecordError.

    payload: the traces of one step.
    """
    return unscaled([row for trace in payload for row in _branches(trace)])


def _branches(trace: Mapping[str, Any]) -> Iterator[TargetRow]:
    nodes, reward = trace["nodes"], trace["rewards"]["reward"]
    runs = trace["info"]["insitu"]["versions"]
    inner, seen = {node["parent"] for node in nodes}, set[int]()
    for leaf in (number for number in range(len(nodes)) if number not in inner):
        path, at = list[int](), leaf
        while at is not None:
            path.insert(0, at)
            at = nodes[at]["parent"]
        lists: dict[str, list[Any]] = {name: [] for name in ("ids", "mask", "logprobs", "versions")}
        advantages, weights = list[float](), list[float]()
        for number in path:
            node = nodes[number]
            count = len(node["token_ids"])
            trained = bool(node.get("sampled")) and number not in seen
            sampled = sum(node["mask"]) if trained else 0
            before = [0] * (count - sampled)
            lists["ids"] += node["token_ids"]
            lists["mask"] += node["mask"] if trained else before
            lists["logprobs"] += [*before, *(node["logprobs"] if trained else ())]
            lists["versions"] += [*before, *_versions(runs.get(str(number), ()), sampled)]
            advantages += [*before, *((node["advantages"] or [0.0] * sampled) if trained else ())]
            weights += node["loss_weights"]["rl"] if trained else before
        seen.update(path)
        yield target_row(
            **lists,
            advantage=first_trained(advantages, lists["mask"]),
            weight=first_trained(weights, lists["mask"]),
            reward=None if reward is None else reward["score"],
        )


def _versions(runs: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return the version of each of `count` sampled ids."""
    ends = [*(start for start, _ in runs[1:]), count]
    return [
        version for (start, version), end in zip(runs, ends, strict=bool(runs)) for _ in range(start, end)
    ]
