"""Rollouts in Harbor's Agent Trajectory Interchange Format (ATIF 1.7), in the folders of a Harbor job.

    data/RUN/TRIAL/agent/trajectory.json   messages, tool calls, sampled ids and log-probabilities
    data/RUN/TRIAL/result.json             task, reward

The main line is the trajectory; other branches (sub-agents, what compaction left behind) are embedded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from insitu.config import Config
from insitu.grading.reward import main_line
from insitu.types import Turn
from insitu_bridges.records import StoredRollout
from insitu_train.branches import by_index, chain_ends, chain_of
from insitu_train.words import Words

VERSION = "ATIF-v1.7"
_WHOLE = 1 << 40


def to_atif(stored: StoredRollout, words: Words, agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trajectory. agent: `name`, `version` and `model_name`."""
    rollout, item = stored.item.rollout, stored.item
    turns = by_index(rollout.turns)
    line = main_line(rollout.turns)
    done = {turn.index for turn in line}
    others = []
    for number, end in enumerate(chain_ends(turns)):
        own = [turn for turn in chain_of(turns, end) if turn.index not in done]
        done.update(turn.index for turn in own)
        if own:
            others.append(_trajectory(f"{rollout.id}#{number}", own, turns, words, agent))
    made = _trajectory(rollout.id, line, turns, words, agent)
    made["session_id"] = rollout.id
    made["extra"] = {
        "reward": rollout.reward,
        "status": rollout.status.value,
        "task_id": rollout.task_id,
        "group_id": item.group_id,
        "advantage": item.advantage,
        "used": item.reason,
    }
    return made | ({"subagent_trajectories": others} if others else {})


def _trajectory(
    name: str, line: Sequence[Turn], turns: Mapping[int, Turn], words: Words, agent: Mapping[str, Any]
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for turn in line:
        for message in words.messages(turn.context_ids, _WHOLE, turn.spans):
            _add_message(steps, message["role"], message["text"])
        steps.append(_reply(turn, _prompt_tokens(turns, turn), words))
    if not steps:
        steps.append({"source": "system", "message": "no call was made"})
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    return {"schema_version": VERSION, "trajectory_id": name, "agent": dict(agent), "steps": numbered}


def _add_message(steps: list[dict[str, Any]], role: str, text: str) -> None:
    """Add a message of a prompt; results of tools belong to the reply that asked for them."""
    if role == "tool" and steps and steps[-1]["source"] == "agent":
        observation = steps[-1].setdefault("observation", {"results": []})
        observation["results"].append({"content": text})
    elif role == "assistant":
        steps.append({"source": "agent", "message": text, "llm_call_count": 0})
    else:
        steps.append({"source": "system" if role == "system" else "user", "message": text})


def _prompt_tokens(turns: Mapping[int, Turn], turn: Turn) -> int:
    return sum(len(one.context_ids) + len(one.ids) for one in chain_of(turns, turn)) - len(turn.ids)


def _reply(turn: Turn, prompt_tokens: int, words: Words) -> dict[str, Any]:
    reply = words.reply(turn.ids, turn.finish, _WHOLE)
    metrics: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(turn.ids),
        "completion_token_ids": turn.ids.tolist(),
    }
    if turn.logprobs is not None:
        metrics["logprobs"] = turn.logprobs.tolist()
    step: dict[str, Any] = {
        "source": "agent",
        "message": reply["text"]["text"],
        "llm_call_count": 1,
        "metrics": metrics,
        "extra": {"turn": turn.index, "excluded": turn.excluded, "version_runs": turn.version_runs},
    }
    if turn.times.began_s is not None:
        step["timestamp"] = datetime.fromtimestamp(turn.times.began_s, UTC).isoformat()
    if reply["reasoning"]:
        step["reasoning_content"] = reply["reasoning"]["text"]
    calls = [_call(turn.index, number, call) for number, call in enumerate(reply["calls"])]
    return step | ({"tool_calls": calls} if calls else {})


def _call(turn: int, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = orjson.loads(call["text"])
    except orjson.JSONDecodeError:
        arguments = None
    # What is no object stays readable as the text that was sampled.
    arguments = arguments if isinstance(arguments, dict) else {"text": call["text"]}
    return {"tool_call_id": f"call-{turn}-{number}", "function_name": call["name"], "arguments": arguments}


class AtifWriter:
    """Writes a job folder, one trial per rollout."""

    def __init__(self, folder: Path, config: Config, words: Words) -> None:
        self._job, self._words = folder / "data" / Path(config.run.dir).name, words
        self._model = Path(config.model.path).name or "demo"
        self._config, self._arms = config, config.arms

    def add(self, stored: StoredRollout) -> None:
        """Write one rollout."""
        rollout = stored.item.rollout
        trial = self._job / rollout.id.replace("/", "-")
        (trial / "agent").mkdir(parents=True)
        harness = (arm.config if (arm := self._arms.get(rollout.part)) else self._config).harness
        agent = {"name": harness.label, "version": harness.version or "unknown", "model_name": self._model}
        made = to_atif(stored, self._words, agent)
        (trial / "agent" / "trajectory.json").write_bytes(orjson.dumps(made))
        (trial / "result.json").write_bytes(orjson.dumps(dict(self._result(stored, trial, agent))))

    def _result(
        self, stored: StoredRollout, trial: Path, agent: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        rollout = stored.item.rollout
        task = {"path": rollout.task_id}
        checksum = rollout.verdict.task_hash if rollout.verdict else ""
        yield "task_name", rollout.task_id
        yield "trial_name", trial.name
        yield "trial_uri", trial.name
        yield "task_id", task
        yield "task_checksum", checksum
        yield "config", {"task": task, "trial_name": trial.name}
        yield "agent_info", {"name": agent["name"], "version": agent["version"]}
        if rollout.reward is not None:
            yield "verifier_result", {"rewards": {"reward": rollout.reward}}
