"""TRL: rollouts for GRPOTrainer, AsyncGRPOTrainer and its harness worker; pairs for DPOTrainer.

    worker = trl.RolloutWorker("insitu.toml", args)
    AsyncGRPOTrainer(..., args=args, rollout_worker=worker, weight_transfer=trl.Transfer(worker))
    GRPOTrainer(..., reward_funcs=trl.reward, rollout_func=trl.rollout_func("insitu.toml"))
    HarnessRolloutWorker(..., harness_session_factory=partial(trl.SessionFactory, "insitu.toml"))
    DPOTrainer(..., **trl.preferences("export"))

The trainer's weights reach the engine as a model folder in the run directory, which the engine's machine must
see. Neither trl nor torch is imported with this package.
"""

from insitu_bridges.trl.asynchronous import RolloutWorker, Transfer, check_async, to_samples
from insitu_bridges.trl.preferences import preferences
from insitu_bridges.trl.rollout_func import RolloutFunc, reward, rollout_func, to_outputs
from insitu_bridges.trl.sessions import HarnessSession, SessionFactory

__all__ = [
    "HarnessSession",
    "RolloutFunc",
    "RolloutWorker",
    "SessionFactory",
    "Transfer",
    "check_async",
    "preferences",
    "reward",
    "rollout_func",
    "to_outputs",
    "to_samples",
]  # fmt: skip
