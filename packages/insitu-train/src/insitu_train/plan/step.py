"""The planner of a step is `insitu.plan.step`."""

from insitu.plan.step import PlanConfig as PlanConfig
from insitu.plan.step import StepPlan as StepPlan
from insitu.plan.step import plan_step as plan_step
