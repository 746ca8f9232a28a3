"""Plans and results as arrays of the learner's channel; the digest of a plan is verified on arrival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insitu.errors import TrainError, boundary
from insitu.types.codec import Array, Arrays, ValueCodec
from insitu_train.options import StepResult
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.step import PlanRow, StepPlan, plan_digest

_CODEC = ValueCodec(StepPlan, PlanRow, MicroBatch, StepResult)


def encode_plan(plan: StepPlan) -> Arrays:
    """Return a plan as arrays, without the reasons of what is not trained."""
    return _CODEC.pack(replace(plan, exclusion_reasons={}))


def decode_plan(arrays: Mapping[str, Array]) -> StepPlan:
    """Return the plan of a frame. Raises TrainError when its digest differs."""
    with boundary(TrainError, "read a plan"):
        plan = _CODEC.unpack(StepPlan, arrays)
        if plan_digest(plan) != plan.digest:
            raise TrainError(f"the received plan has a wrong checksum ({plan.digest[:12]})")
    return plan


def encode_result(result: StepResult) -> Arrays:
    return _CODEC.pack(result)


def decode_result(arrays: Mapping[str, Array]) -> StepResult:
    """Return the result of a reply. Raises TrainError when a field is missing."""
    with boundary(TrainError, "read a result"):
        return _CODEC.unpack(StepResult, arrays)
