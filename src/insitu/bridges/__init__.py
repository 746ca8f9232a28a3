"""Rollouts of insitu under other trainers."""

from insitu.bridges.process import RolloutBatch, SourceProcess, open_source, task_ids

__all__ = ["RolloutBatch", "SourceProcess", "open_source", "task_ids"]
