"""Rollouts of a run directory with the planner's decisions, one step or group at a time.

A committed optimizer step is planned from all rollouts that it counted, which gives the advantages and
weights that were trained. Sessions of `insitu serve` are planned task by task, each as a step of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from insitu.config import Config
from insitu.errors import RecordError
from insitu.evaluate.summary import PHASE as ROLLOUT
from insitu.grading.reward import main_line
from insitu.storage.lifecycle import SERVE
from insitu.storage.queries import ATTEMPTS, ONE_ROW, STATE, UNCOUNTED, RunReader, read_attempt
from insitu.storage.run_dir import read_config
from insitu.types import Group, Rollout, Turn
from insitu_bridges.records import StoredRollout
from insitu_bridges.rows import GroupRows, RolloutRows, rows_of
from insitu_train.plan.step import PlanConfig
from insitu_train.recovery import stored_groups
from insitu_train.words import Words

PLACE = {
    "rowid": "row",
    "ulid": "ulid",
    "phase": "phase",
    "step": "step",
    "group_no": "group",
    "slot": "slot",
}
"""Column of the table `rollouts` -> column of the query. Row numbers are the order of storing."""
READ_S = 600.0
"""Most CPU time of one query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """Groups that are planned together."""

    phase: str
    step: int
    """Optimizer step that counts them; of rollouts that none counts, the step they were drawn for."""
    committed: bool
    groups: tuple[GroupRows, ...]

    def leaving_out(self, ids: Collection[str]) -> RunPart:
        """Return the part without some rollouts; the others keep the advantages of the whole group."""
        kept = (
            replace(group, rollouts=tuple(item for item in group.rollouts if item.rollout.id not in ids))
            for group in self.groups
        )
        return replace(self, groups=tuple(group for group in kept if group.rollouts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts of a run are read."""

    phase: str = ""
    """Empty = all."""
    first: int = 0
    end: int | None = None
    """Steps from `first` on, up to and without `end`."""

    def has(self, phase: str, step: int) -> bool:
        return self.phase in ("", phase) and self.first <= step and (self.end is None or step < self.end)


def run_parts(
    reader: RunReader, config: Config, chosen: RolloutFilter, *, sampled: bool = False
) -> Iterator[RunPart]:
    """Yield all decided rollouts once, in the order of their phases. Raises InsituError.

    sampled: those of `insitu rollout` on training tasks are planned as sessions are, not as an evaluation.
    """
    plan = PlanConfig.rules_of(config)
    alone = plan.changed(min_groups=1)
    trained = False
    for phase, step in reader.phases():
        if phase == "train":
            if not trained:
                yield from _train_parts(reader, plan, alone, chosen)
            trained = True
        elif chosen.has(phase, step):
            counted = phase == SERVE or (sampled and phase == ROLLOUT and config.rollout.split == "train")
            for group in _groups(reader, phase, step):
                reasons = {} if counted else dict.fromkeys((r.id for r in group.rollouts), "evaluation")
                yield _part(phase, step, _counted(group) if counted else group, alone, reasons)


def _train_parts(
    reader: RunReader, plan: PlanConfig, alone: PlanConfig, chosen: RolloutFilter
) -> Iterator[RunPart]:
    for record in reader.steps():
        if chosen.has("train", record.step):
            groups = rows_of(stored_groups(reader, record.step), plan)
            if record.metrics.get("bad"):
                groups = tuple(replace(g, rollouts=tuple(map(_dropped, g.rollouts))) for g in groups)
            yield RunPart(phase="train", step=record.step, committed=True, groups=groups)
    left = reader.all(UNCOUNTED)
    for (step, _), rows in groupby(left, key=lambda row: (row["step"], row["group"])):
        if not chosen.has("train", step):
            continue
        found = list(rows)
        reasons = {row["id"]: row["reason"] or "unused" for row in found}
        group = _group_of([reader.rollout(name) for name in reasons], found[0]["id"].rpartition("/")[0])
        yield _part("train", step, group, alone, reasons)


def _counted(group: Group) -> Group:
    """Return the group with the tokens that only its storing as an evaluation excluded."""
    made = []
    for rollout in group.rollouts:
        ledger = rollout.trajectory.ledger
        excluded = dict(ledger.excluded)
        ledger = replace(ledger, trained=ledger.trained + excluded.pop("evaluation", 0), excluded=excluded)
        made.append(replace(rollout, trajectory=replace(rollout.trajectory, ledger=ledger)))
    return replace(group, rollouts=tuple(made))


def _part(phase: str, step: int, group: Group, plan: PlanConfig, reasons: Mapping[str, str]) -> RunPart:
    """Return one group as a part. reasons: rollouts that are not trained, whatever the planner decides."""
    (made,) = rows_of([group], plan)
    items = tuple(_left_out(item, reasons.get(item.rollout.id, "")) for item in made.rollouts)
    return RunPart(phase=phase, step=step, committed=False, groups=(replace(made, rollouts=items),))


def _left_out(item: RolloutRows, reason: str) -> RolloutRows:
    return replace(item, reason=reason, advantage=None, weight=0.0, rows=()) if reason else item


def _dropped(item: RolloutRows) -> RolloutRows:
    return _left_out(item, "" if item.reason else "bad_step")


def _groups(reader: RunReader, phase: str, step: int) -> Iterator[Group]:
    """Yield the groups of a phase; sessions of one task are a group."""
    if phase == SERVE:
        places = [(one.task_id, one.rollout_id) for one in reader.outcomes(phase, step)]
    else:
        named = reader.places(phase, step).values()
        places = [(name.rpartition("/")[0], name) for name in named]
    for name, members in groupby(sorted(places, key=lambda place: place[0]), key=lambda place: place[0]):
        yield _group_of([reader.rollout(rollout_id) for _, rollout_id in members], name)


def _group_of(rollouts: Sequence[Rollout], name: str) -> Group:
    return Group(id=name, task_id=rollouts[0].task_id, rollouts=tuple(rollouts))


def step_rows(run: Path | str, step: int) -> tuple[GroupRows, ...]:
    """Return the groups that a committed step of a run counts. Raises RecordError when there is none."""
    path = Path(run)
    config = read_config(path)
    with RunReader(path, query_s=READ_S) as reader:
        for part in run_parts(reader, config, RolloutFilter(phase="train", first=step, end=step + 1)):
            if part.committed:
                return part.groups
    raise RecordError(f"{path} has no committed step {step}")


def stored_rollouts(
    reader: RunReader, parts: Iterable[RunPart], words: Words | None
) -> Iterator[StoredRollout]:
    """Yield the rollouts of `parts` with their place and state. words: decoder for their messages."""
    for part in parts:
        for item in (item for group in part.groups for item in group.rollouts):
            row = reader.one(ONE_ROW, id=item.rollout.id) or {}
            state = reader.one(STATE, id=item.rollout.id) or {}
            yield StoredRollout(
                item=item,
                step=part.step,
                place={name: row[column] for name, column in PLACE.items()} | {"part": item.rollout.part},
                state={
                    name: state[name]
                    for name in ("state", "reason", "attempt", "version", "oldest", "account")
                },
                attempts=[
                    read_attempt(found)
                    for found in reader.all(ATTEMPTS, id=item.rollout.id)
                    if found["attempt"] != item.rollout.attempt
                ],
                messages=None if words is None else messages_of(item.rollout.turns, words),
            )


def messages_of(turns: Sequence[Turn], words: Words) -> list[dict[str, str]]:
    """Return role and content of the main line; a reply is the text as sampled."""
    found: list[dict[str, str]] = []
    for turn in main_line(turns):
        for message in words.messages(turn.context_ids, limit=1 << 40, spans=turn.spans):
            found.append({"role": message["role"], "content": message["text"]})
        found.append({"role": "assistant", "content": words.bare_text(turn.ids)})
    return found
