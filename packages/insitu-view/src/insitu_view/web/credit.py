"""Proven advantages: the plan of a committed step, computed again from its stored rollouts.

The digest equals the one that the step was committed with exactly when the plan is the one that was trained.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import orjson

from insitu.errors import InsituError
from insitu.storage.queries import ONE_STEP, RunReader
from insitu_train.plan.digest import is_plan
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.recovery import stored_groups
from insitu_view.web.runs import RunHandle

PLAN_S = 30.0
MAX_TOKENS = 30_000_000
"""Most captured tokens of a step whose plan is computed."""
KEPT = 32
"""Steps whose plans are kept."""


@dataclass(slots=True)
class StepCredit:
    """Advantages and weights of the rollouts of one step."""

    proof: str
    """`identical`: the plan is the one that was trained; `differs`; `unknown`: not computed, see problem."""
    problem: str = ""
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rollout id -> its trained rows: segment, advantage, weight, tokens."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Rollout id -> why it is not trained, or empty."""

    def of(self, rollout_id: str) -> dict[str, Any]:
        """Return the credit of one rollout as JSON."""
        rows = self.rows.get(rollout_id, [])
        return {
            "proof": self.proof,
            "problem": self.problem,
            "advantage": rows[0]["advantage"] if rows else None,
            "weight": rows[0]["weight"] if rows else None,
            "trained": sum(row["tokens"] for row in rows),
            "reason": self.reasons.get(rollout_id),
            "rows": rows,
        }


class Credits:
    """Cache of the newest plans; called from one worker thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], StepCredit] = OrderedDict()

    def known(self, run: RunHandle, step: int) -> StepCredit | None:
        """Return a plan that was computed before, else None."""
        return self._kept.get((str(run.path), step))

    def of(self, run: RunHandle, step: int) -> StepCredit:
        """Return the plan of a committed step; a failure is a `problem`, never an error."""
        key = (str(run.path), step)
        if key not in self._kept:
            try:
                self._kept[key] = _credit(run, step)
            except InsituError as error:
                return StepCredit(proof="unknown", problem=" ".join(str(error).split()))
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]


def _credit(run: RunHandle, step: int) -> StepCredit:
    with RunReader(run.path, query_s=PLAN_S) as reader:
        record = reader.one(ONE_STEP, step=step)
        if record is None:
            return StepCredit(proof="unknown", problem="the step is not committed")
        if record["captured"] > MAX_TOKENS:
            return StepCredit(proof="unknown", problem="the step is too large to be planned here")
        groups = stored_groups(reader, step)
    plan = plan_step(groups, PlanConfig.of(run.config()))
    credit = StepCredit(proof="identical" if is_plan(plan, record["plan_hash"]) else "differs")
    bad = orjson.loads(record["metrics"]).get("bad")
    reasons = plan.exclusion_reasons
    credit.reasons.update({name: why or "bad_step" for name, why in reasons.items()} if bad else reasons)
    for row in () if bad else plan.rows:
        shown = {
            "segment": row.segment,
            "advantage": row.advantage,
            "weight": row.weight,
            "tokens": int(row.mask.sum()),
            "length": len(row.ids),
        }
        credit.rows.setdefault(row.rollout_id, []).append(shown)
    return credit
