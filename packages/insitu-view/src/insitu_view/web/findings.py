"""What the pages about trouble and difference show: health, cheats, comparison of runs and rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from insitu.errors import RecordError
from insitu.storage import queries as sql
from insitu.storage.attempts import ENDS
from insitu.storage.pass_at_k import TaskCounts
from insitu.storage.queries import RunReader, ulid_seconds
from insitu.storage.timeline import TIMELINE
from insitu_train.paired import mean_change, sign_flip_p
from insitu_view import evidence
from insitu_view.web.pages import flat_config, heldout, step_columns
from insitu_view.web.runs import RunHandle, open_inside, run_info, summary_of

WAITS = ("queued_s", "agent_s", "engine_s", "grade_s", "total_s")
_ADVICE_S = 30.0
ADVICE_STEPS = 5
MAX_TIMELINE_BYTES = 1 << 20
ONCE_CELLS = ("both", "only_a", "only_b", "neither")
SEVERAL_CELLS = ("better", "worse", "equal")
"""Cells of the same tasks on two sides, with one rollout of each task and with several."""


def health_page(run: RunHandle) -> dict[str, Any]:
    """Return how attempts ended, what was waited for, and advice."""
    with run.reader() as reader:
        ends = reader.attempts_by_end()
        matrix = reader.all(sql.STATUS_OUTCOME)
        rows, lanes = reader.all(sql.WAITS), reader.all(sql.LANES)
        steps = step_columns(reader)
        found = {
            "attempts": {end: ends[end] for end in ENDS},
            "failures": reader.all(sql.FAILURES),
            "status_outcome": matrix,
            "slowest": reader.rows(sql.SLOWEST),
            "running": reader.all(sql.RUNNING),
        }
    timed = [{**row, **orjson.loads(row["timings"])} for row in rows]
    return found | {
        "waits": _waits(timed),
        "lanes": [_lane(row) for row in lanes],
        "timeline": timeline(run),
        "advice": advice(steps, matrix),
    }


def timeline(run: RunHandle) -> dict[str, Any] | None:
    """Return the end of the timeline: gauges as columns, and phases; None where there is none."""
    try:
        raw, size = open_inside(run.path, run.path / TIMELINE, MAX_TIMELINE_BYTES, from_end=True)
    except RecordError:
        return None
    gauges: list[dict[str, Any]] = []
    phases: list[dict[str, Any]] = []
    for text in raw.splitlines()[int(size > len(raw)) :]:
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError:  # the writer is in the middle of it
            continue
        event, time_s = line.pop("event"), line.pop("time_s")
        if event == "gauges":
            gauges.append({"time_s": time_s, **line})
        elif event == "begin":
            phases.append({"phase": line["phase"], "step": line["step"], "began_s": time_s, "ended_s": None})
        elif event == "end" and phases and phases[-1]["phase"] == line["phase"]:
            phases[-1]["ended_s"] = time_s
    names = dict.fromkeys(name for line in gauges for name in line if name != "schema_version")
    return {"gauges": {name: [line.get(name) for line in gauges] for name in names}, "phases": phases}


def _waits(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return p50, p90 and p99 of each wait by phase and step."""
    places: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        places.setdefault((row["step"], row["phase"]), []).append(row)
    found = []
    for (step, phase), members in sorted(places.items()):
        shown: dict[str, Any] = {"phase": phase, "step": step, "n": len(members)}
        for name in WAITS:
            values = np.percentile([row[name] for row in members], (50, 90, 99))
            shown[name] = [round(float(value), 3) for value in values]
        found.append(shown)
    return found


def _lane(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return when a rollout began and ended; without recorded times, by when it was stored."""
    timings = orjson.loads(row["timings"])
    ended_s = row["ended_s"] or ulid_seconds(row["ulid"])
    began_s = row["began_s"] or ended_s - timings["total_s"]
    found = {name: row[name] for name in ("id", "phase", "step")}
    return {**found, "began_s": began_s, "ended_s": ended_s, **{name: timings[name] for name in WAITS}}


def advice(steps: Mapping[str, Any], matrix: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return alarms, and hints for tuning only where there are none."""
    metrics = steps["metrics"]
    recent = {name: [v for v in values[-ADVICE_STEPS:] if v is not None] for name, values in metrics.items()}
    found = [
        {"level": "alarm", "text": f"{name.removesuffix('_alarm').replace('_', ' ')}: alarm in the last step"}
        for name, values in metrics.items()
        if name.endswith("_alarm") and values and values[-1]
    ]
    by_status: Counter[str] = Counter()
    for row in matrix:
        by_status[row["status"]] += row["n"]
    total = sum(by_status.values()) or 1
    for status, share, what in (
        ("infra_failed", 0.05, "failed by infrastructure"),
        ("truncated", 0.25, "cut off"),
    ):
        if by_status[status] > share * total:
            text = f"{by_status[status]} of {total} rollouts were {what}"
            found.append({"level": "alarm" if status == "infra_failed" else "warning", "text": text})
    if sum(recent.get("learner_restarts", [])):
        found.append({"level": "alarm", "text": "the learner was restarted"})
    if any(item["level"] == "alarm" for item in found):
        return found
    groups, useful = sum(recent.get("groups", [])), sum(recent.get("effective_groups", []))
    if groups and useful < groups / 2:
        text = f"{groups - useful:g} of the last {groups:g} groups had equal rewards: no gradient"
        found.append({"level": "hint", "text": text})
    waited = recent.get("waited_s", [])
    if waited and max(waited) > _ADVICE_S:
        found.append({"level": "hint", "text": f"the trainer waited up to {max(waited):.0f} s for rollouts"})
    return found


def checks_page(run: RunHandle) -> dict[str, Any]:
    """Return what the overview says of the pages cheats and health: counts of evidence, and advice."""
    with run.reader() as reader:
        kinds = [
            {"evidence": name} | (reader.one(count) or {}) for name, count in evidence.SUSPECT_COUNTS.items()
        ]
        last = (reader.one(sql.WATCH) or {})["steps"] or 0
        return {
            "kinds": kinds,
            "advice": advice(step_columns(reader, last - ADVICE_STEPS), reader.all(sql.STATUS_OUTCOME)),
        }


def cheats_page(run: RunHandle) -> dict[str, Any]:
    """Return evidence of cheating; none of it is a verdict on its own."""
    with run.reader() as reader:
        kinds = []
        for name, query in evidence.SUSPECTS.items():
            counted = reader.one(evidence.SUSPECT_COUNTS[name]) or {"n": 0}
            kinds.append({"evidence": name, "n": counted["n"], "rollouts": reader.rows(query)})
        steps = step_columns(reader)
        shared = reader.all(evidence.SHARED_DIFFS)
    alarms = {
        name: [step for step, value in zip(steps["step"], values, strict=True) if value]
        for name, values in steps["metrics"].items()
        if name in ("reward_alarm", "tamper_alarm", "tokens_lost_alarm")
    }
    return {"kinds": kinds, "shared_diffs": shared, "alarms": alarms}


def compare_runs(runs: Sequence[RunHandle]) -> dict[str, Any]:
    """Return runs side by side: scores and metrics of each, and the keys in which they differ."""
    found = []
    for run in runs:
        with run.reader() as reader:
            shown = {"info": run_info(run), "summary": summary_of(run), "steps": step_columns(reader)}
            found.append({**shown, "heldout": heldout(reader)})
    flat = [flat_config(run) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    differences = [
        {"key": key, "values": [config.get(key) for config in flat]}
        for key in keys
        if key != "run.dir" and any(config.get(key) != flat[0].get(key) for config in flat)
    ]
    return {"runs": found, "differences": differences}


def compare_tasks(a: RunHandle, b: RunHandle, of_a: tuple[str, int], of_b: tuple[str, int]) -> dict[str, Any]:
    """Return the change of the solve rates of the same tasks between two sides, and the pairs of tasks.

    A side is (phase, step) of a run. Tasks are paired by task set and id; where each side has one task set,
    by id alone. `table` counts the pairs: with one rollout of each task, by the sides that solved it (2 x 2),
    otherwise by whether the second side has the better or worse rate.
    """
    sides = [_task_rewards(a, of_a), _task_rewards(b, of_b)]
    if all(len({task_set for task_set, _ in side}) == 1 for side in sides):
        sides = [{("", task): found for (_, task), found in side.items()} for side in sides]
    shared = [place for place in sides[0] if place in sides[1]]
    counts = [(_counts(sides[0][place]), _counts(sides[1][place])) for place in shared]
    once = all(a.graded == b.graded == 1 for a, b in counts)
    cells = ONCE_CELLS if once else SEVERAL_CELLS
    found = [_cell(a.rate, b.rate, once=once) for a, b in counts]
    change = mean_change(counts)
    return {
        "table": {cell: found.count(cell) for cell in cells},
        "change": None if change is None else change.rounded(),
        "p": sign_flip_p(counts),
        "pairs": [
            {
                "task_set": place[0],
                "task": place[1],
                "cell": cell,
                "rates": [a.rate, b.rate],
                "a": list(sides[0][place]),
                "b": list(sides[1][place]),
            }
            for place, cell, (a, b) in zip(shared, found, counts, strict=True)
        ],
    }


def _cell(a: float, b: float, *, once: bool) -> str:
    if once:
        return ONCE_CELLS[2 * (not a) + (not b)]
    return "better" if b > a else "worse" if b < a else "equal"


def _counts(rewards: Mapping[str, float]) -> TaskCounts:
    return TaskCounts.of(rewards.values())


def _task_rewards(run: RunHandle, place: tuple[str, int]) -> dict[tuple[str, str], dict[str, float]]:
    """Return rollout -> reward of one evaluation by task set and id of the task."""
    with run.reader() as reader:
        rows = reader.all(sql.PAIRS, phase=place[0], step=place[1])
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["task_set"], row["task"]), {})[row["id"]] = row["reward"]
    return found


def align(a: RunHandle, b: RunHandle, first: str, second: str) -> dict[str, Any]:
    """Return how many first replies two rollouts share token by token, and the turns of each main line."""
    with a.reader() as reader:
        mine = _replies(reader, first)
    with b.reader() as reader:
        other = _replies(reader, second)
    equal = [x["ids"] == y["ids"] for x, y in zip(mine, other, strict=False)]
    shared = equal.index(False) if False in equal else len(equal)
    return {"shared_turns": shared, "a": [t["turn"] for t in mine], "b": [t["turn"] for t in other]}


def _replies(reader: RunReader, rollout_id: str) -> list[dict[str, Any]]:
    return reader.all(sql.TURN_IDS, id=rollout_id, start=0, count=1000)
