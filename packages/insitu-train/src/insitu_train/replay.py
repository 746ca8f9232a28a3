"""`insitu replay RUN`: train again from the stored turns and compare every step's weights bit for bit.

No agent, gateway or sampler runs, and only the run directory is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from insitu.config import model_folder
from insitu.config.training import split_ranks
from insitu.errors import RecordError
from insitu.progress.base import View
from insitu.storage.open_run import kind_of
from insitu.storage.run_dir import read_config, read_store
from insitu.storage.temp_dirs import scratch_folder
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec, require_learner
from insitu_train.loop import check_start_model
from insitu_train.plan.digest import is_plan
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.recovery import stored_groups


async def replay_run(run_dir: Path, view: View) -> Mapping[str, Any]:
    """Repeat the training of a stored run. Raises InsituError."""
    config = read_config(run_dir)
    async with AsyncExitStack() as stack:
        store = stack.enter_context(read_store(run_dir))
        steps = store.steps()
        if (kind := kind_of(store)) != "train":
            raise RecordError(
                f"{run_dir} holds a run of `insitu {kind}`: there are no training rollouts to replay"
            )
        if not steps:
            raise RecordError(f"{run_dir} has no committed step to replay")
        require_learner(config)
        scratch = stack.enter_context(scratch_folder())
        # here, also where other hosts took part
        config = config.changed(train=config.train.changed(ranks=split_ranks(config.train.ranks)[1]))
        spec = LearnerSpec.of(config, model=model_folder(config), log=scratch / "learner.log")
        learner = await stack.enter_async_context(Learner.start(replace(spec, samples=False)))
        check_start_model(store, learner)
        plan_config, differing = PlanConfig.of(config), []
        view.stage("replay", len(steps))
        for record in steps:
            plan = plan_step(stored_groups(store, record.step), plan_config)
            if not record.metrics["skipped"]:
                await learner.step(plan)
            same_plan = is_plan(plan, record.plan_hash)
            if not same_plan or learner.weights != record.metrics["weights"]:
                differing.append(record.step)
                view.note(f"step {record.step}: the {'weights differ' if same_plan else 'plan differs'}")
            view.advance(record.step)
        return {
            "run_dir": str(run_dir),
            "steps": len(steps),
            "identical": not differing,
            "differing_steps": differing,
            "weights": learner.weights,
        }
