"""What the pages about a whole run show: overview, step, group, tasks, configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson

from insitu.config import tables_of
from insitu.errors import RecordError
from insitu.storage import queries as sql
from insitu.storage.attempts import ENDS
from insitu.storage.pass_at_k import wilson_interval
from insitu.storage.queries import RunReader
from insitu.storage.store import EmptyStore
from insitu.types.keys import description
from insitu_train.words import Words, message_spans, prompt_of
from insitu_view import evidence
from insitu_view.web.credit import Credits, StepCredit
from insitu_view.web.runs import RunHandle, evaluation_scores, run_info, summary_of
from insitu_view.web.token_page import head_turns

ALARMS = "_alarm"
MAX_TELLING = 12


def overview(run: RunHandle, after: int) -> dict[str, Any]:
    """Return the overview; `after` leaves out steps up to that one."""
    found: dict[str, Any] = {"summary": summary_of(run), "empty": ""}
    try:
        with run.reader() as reader:
            return {"run": run_info(run, reader)} | found | _stored_overview(reader, after)
    except EmptyStore as error:
        return {"run": run_info(run)} | found | {"empty": str(error)}


def _stored_overview(reader: RunReader, after: int) -> dict[str, Any]:
    steps = step_columns(reader, after)
    ends = reader.attempts_by_end()
    why = reader.all(sql.WHY)
    return {
        "steps": steps,
        "heldout": heldout(reader),
        "states": reader.all(sql.STATES),
        "attempts": {end: ends[end] for end in ENDS},
        "running": reader.all(sql.RUNNING),
        "why": why,
        "alarms": _alarms(steps),
        "telling": telling(reader, why),
    }


def step_columns(reader: RunReader, after: int = -1) -> dict[str, Any]:
    """Return committed steps as columns: one list per metric and per entry of the ledger."""
    rows = reader.all(sql.STEPS, after=after)
    metrics = [orjson.loads(row["metrics"]) for row in rows]
    names = {name: None for found in metrics for name, v in found.items() if isinstance(v, int | float)}
    ledger = {
        row["entry"]: dict(zip(orjson.loads(row["steps"]), orjson.loads(row["tokens"]), strict=True))
        for row in reader.all(sql.LEDGER, after=after)
    }
    scores = {row["step"]: row for row in reader.step_scores()}
    steps = [row["step"] for row in rows]
    return {
        "step": steps,
        "committed_s": [round(row["committed_s"], 1) for row in rows],
        "solved": [scores[step]["solved"] if step in scores else 0 for step in steps],
        "total": [scores[step]["total"] if step in scores else 0 for step in steps],
        "reward_sum": [_number(scores[step]["reward_sum"]) if step in scores else 0 for step in steps],
        "ledger": {entry: [held.get(step, 0) for step in steps] for entry, held in ledger.items()},
        "metrics": {name: [_number(found.get(name)) for found in metrics] for name in sorted(names)},
    }


def heldout(reader: RunReader) -> list[dict[str, Any]]:
    """Return the scores outside of training by phase, step and category; category "" is the total."""
    return [
        {"phase": phase, "step": step, "category": category, **asdict(score)}
        for (phase, step), scores in evaluation_scores(reader).items()
        for category, score in scores.items()
    ]


def _alarms(steps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the alarms of the run: name, number of steps, first and last step."""
    found = []
    for name, values in steps["metrics"].items():
        at = [step for step, value in zip(steps["step"], values, strict=True) if value]
        if name.endswith(ALARMS) and at:
            found.append({"name": name, "steps": len(at), "first": at[0], "last": at[-1]})
    return found


def telling(reader: RunReader, why: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rollouts most worth reading, each once, with the reason. why: rows of `WHY`."""
    found: dict[str, dict[str, Any]] = {}
    total = sum(cause["n"] for cause in why)
    for cause in why[:1]:
        for row in reader.rows(sql.ONE_ROW, id=cause["example"]):
            share = f"the most frequent cause: {cause['n']} of {total} unsolved"
            found[row["id"]] = {**row, "telling": share}
    for reason, query in evidence.TELLING.items():
        for row in reader.rows(query):
            found.setdefault(row["id"], {**row, "telling": reason})
    return list(found.values())[:MAX_TELLING]


def step_page(run: RunHandle, credits: Credits, step: int) -> dict[str, Any]:
    """Return the account of one committed step, group by group; raise RecordError when there is none."""
    with run.reader() as reader:
        record = reader.one(sql.ONE_STEP, step=step)
        if record is None:
            raise RecordError(f"step {step} is not committed")
        rows = reader.rows(sql.STEP_ROWS, step=step)
        ledger = {row["entry"]: row["tokens"] for row in reader.all(sql.STEP_LEDGER, step=step)}
        context = {row["id"]: row["context"] for row in reader.all(evidence.STEP_CONTEXT, step=step)}
    credit = credits.of(run, step)
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["phase"], row["step"], row["group"]), []).append(
            {**with_credit(row, credit), "context": context.get(row["id"], 0)}
        )
    return {
        "step": step,
        "committed_s": record["committed_s"],
        "checkpoint": record["checkpoint"],
        "plan_hash": record["plan_hash"],
        "metrics": orjson.loads(record["metrics"]),
        "ledger": ledger,
        "proof": credit.proof,
        "problem": credit.problem,
        "groups": [_group_row(place, members) for place, members in groups.items()],
    }


def with_credit(row: dict[str, Any], credit: StepCredit | None) -> dict[str, Any]:
    """Return a list row with advantage, weight, the plan's reason and tokens; null where not known."""
    found = None if credit is None or credit.proof == "unknown" else credit.of(row["id"])
    named = {"advantage": "advantage", "weight": "weight", "untrained": "reason", "planned": "trained"}
    return row | {name: None if found is None else found[key] for name, key in named.items()}


def _group_row(place: tuple[str, int, int], members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in members if row["reward"] is not None]
    reasons = {row["untrained"] for row in members}
    return {
        "phase": place[0], "step": place[1], "group": place[2],
        "task_set": members[0]["task_set"], "task": members[0]["task"],
        "category": members[0]["category"], "graded": len(rewards),
        "solved": sum(reward >= 1.0 for reward in rewards),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "untrained": reasons.pop() if len(reasons) == 1 else None,
        "rollouts": list(members),
    }  # fmt: skip


def group_page(
    run: RunHandle, credits: Credits, words: Words | None, phase: str, step: int, group: int
) -> dict[str, Any]:
    """Return the rollouts of one group side by side; raise RecordError when it does not exist."""
    place = {"phase": phase, "step": step, "group": group}
    with run.reader() as reader:
        states = reader.all(sql.GROUP_STATES, **place)
        rows = reader.rows(sql.GROUP_ROWS, **place)
        if not states and not rows:
            raise RecordError(f"there is no group {group} of {phase} step {step}")
        prompt = "" if not rows else task_prompt(reader, words, rows[0]["id"])
        last = [last_words(reader, words, row["id"]) for row in rows]
        same = shared_turns(reader, [row["id"] for row in rows], _reference(rows))
    account = next((row["account"] for row in rows if row["account"] is not None), None)
    credit = None if account is None else credits.of(run, account)
    members = [
        {**with_credit(row, credit), "last_words": text, "same_turns": turns}
        for row, text, turns in zip(rows, last, same, strict=True)
    ]
    return {
        **place,
        "task_set": rows[0]["task_set"] if rows else None,
        "task": rows[0]["task"] if rows else None,
        "account": account,
        "prompt": prompt,
        "proof": None if credit is None else credit.proof,
        "problem": "" if credit is None else credit.problem,
        "reference": rows[_reference(rows)]["id"] if rows else None,
        "rollouts": members,
        "states": states,
    }


def _reference(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the member that the others are compared with: the first solved one, else the first."""
    return next((number for number, row in enumerate(rows) if (row["reward"] or 0) >= 1.0), 0)


def shared_turns(reader: RunReader, ids: Sequence[str], reference: int) -> list[int]:
    """Return for each rollout how many first replies it shares with the reference, token by token."""
    replies = [
        [turn["ids"] for turn in reader.all(sql.TURN_IDS, id=name, start=0, count=200)] for name in ids
    ]
    found = []
    for mine in replies:
        equal = [a == b for a, b in zip(mine, replies[reference], strict=False)]
        found.append(equal.index(False) if False in equal else len(equal))
    return found


def task_prompt(reader: RunReader, words: Words | None, rollout_id: str) -> str:
    """Return the prompt of a rollout's task as text; empty when it cannot be decoded."""
    turns = reader.all(sql.TURN_IDS, id=rollout_id, start=0, count=1)
    if words is None or not turns:
        return ""
    context = np.frombuffer(turns[0]["context_ids"], dtype="<i4")
    return prompt_of(words.messages(context, spans=message_spans(turns[0])))


def last_words(reader: RunReader, words: Words | None, rollout_id: str) -> str:
    """Return the beginning of the text of a rollout's last reply."""
    heads = head_turns(reader.all(sql.TURN_HEADS, id=rollout_id))
    turns = reader.all(sql.TURN_IDS, id=rollout_id, start=max(0, len(heads) - 1), count=1)
    if words is None or not turns:
        return ""
    reply = words.reply(np.frombuffer(turns[0]["ids"], dtype="<i4"), turns[0]["finish"], 600)
    calls = [f"{call['name']} {call['text']}" for call in reply["calls"]]
    return "\n".join([text for text in (reply["text"]["text"], *calls) if text])


def tasks_page(run: RunHandle, phase: str) -> dict[str, Any]:
    """Return every task of a phase with its tries, by step and in parts of the run.

    Parts are thirds of the steps; of held-out tasks, the evaluations, whose places are in `places` too.
    """
    held = phase.startswith("eval")
    with run.reader() as reader:
        span = reader.one(sql.STEP_SPAN, phase=phase) or {}
        first, last = span.get("first") or 0, span.get("last") or 0
        rows = reader.all(sql.TASKS, phase=phase)
        found = reader.all(sql.PHASES)
        # Of the steps of training one is enough to name the phase.
        phases = [row for row in found if row["phase"] != "train"]
        phases += [row for row in found if row["phase"] == "train"][:1]
        cells = reader.all(sql.TASK_CELLS, phase=phase, held=held)
    if held:
        places = [(row["phase"], row["step"]) for row in phases if row["phase"].startswith("eval")]
        names = [name if name != "eval_during" else f"step {step}" for name, step in places]
        part_of = list(range(len(places)))
    else:
        places = sorted({(row["phase"], row["step"]) for row in cells})
        names = ["first third", "middle third", "last third"]
        part_of = [min(2, (step - first) * 3 // (last - first + 1)) for _, step in places]
    drawn = _drawn(cells, places)
    for row in rows:
        row["cells"] = drawn.get((row["task_set"], row["task"]), [])
        row["parts"] = [[0, 0] for _ in names]
        for place, _, _, graded, solved in row["cells"]:
            part = row["parts"][part_of[place]]
            part[0], part[1] = part[0] + solved, part[1] + graded
        graded = row["n"] - row["failed"]
        row["rate"] = row["solved"] / graded if graded else None
        row["low"], row["high"] = wilson_interval(row["rate"] or 0.0, graded)
    return {
        "phase": phase, "first_step": first, "last_step": last, "parts": names, "phases": phases,
        "places": [{"phase": phase, "step": step} for phase, step in places], "tasks": rows,
    }  # fmt: skip


def _drawn(
    cells: Sequence[Mapping[str, Any]], places: Sequence[tuple[str, int]]
) -> dict[tuple[str, str], list[list[int]]]:
    """Return task set and task -> place, group, rollouts, graded and solved ones where it was drawn."""
    at = {place: number for number, place in enumerate(places)}
    found: dict[tuple[str, str], list[list[int]]] = {}
    for row in cells:
        place = at.get((row["phase"], row["step"]))
        if place is not None:  # else an evaluation that began meanwhile
            counts = [row[name] for name in ("group", "n", "graded", "solved")]
            found.setdefault((row["task_set"], row["task"]), []).append([place, *counts])
    return {task: sorted(own) for task, own in found.items()}


def task_page(run: RunHandle, words: Words | None, task: str) -> dict[str, Any]:
    """Return one task's rollouts over the whole run; raise RecordError when it has none."""
    with run.reader() as reader:
        rows = reader.rows(sql.TASK_ROWS, task=task)
        if not rows:
            raise RecordError("the run has no rollout of this task")
        return {
            "task": task,
            "category": rows[0]["category"],
            "prompt": task_prompt(reader, words, rows[-1]["id"]),
            "rollouts": rows,
        }


def config_page(run: RunHandle) -> dict[str, Any]:
    """Return the resolved configuration: each key with value, default and meaning."""
    config = run.config()
    tables = []
    for table, values in tables_of(config):
        keys = [
            {
                "key": key,
                "value": plain(values.__dict__[key]),
                "default": None if info.is_required() else plain(info.get_default(call_default_factory=True)),
                "changed": key in values.model_fields_set and not _is_default(values.__dict__[key], info),
                "meaning": description(info),
            }
            for key, info in type(values).model_fields.items()
        ]
        tables.append({"table": table, "keys": keys})
    return {
        "tables": tables,
        "resume": "" if run.state() == "finished" else f"insitu train --resume {run.path}",
    }


def _is_default(value: Any, info: Any) -> bool:
    return bool(value == info.get_default(call_default_factory=True))


def flat_config(run: RunHandle) -> dict[str, Any]:
    """Return the configuration as `table.key` -> value."""
    config = run.config()
    seen = Counter[str]()
    flat: dict[str, Any] = {}
    for name, values in tables_of(config):
        seen[name] += 1
        prefix = f"{name}.{seen[name]}" if seen[name] > 1 else name
        flat |= {f"{prefix}.{key}": plain(value) for key, value in values.__dict__.items()}
    return flat


def plain(value: Any) -> Any:
    """Return a value as JSON."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _number(value: Any) -> float | int | None:
    """Return a number with 6 digits, more than a chart shows; None for anything else."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value if isinstance(value, int) else None
