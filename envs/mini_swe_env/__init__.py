"""Rollouts of coding agents as an OpenEnv environment, graded in a clean sandbox."""

from .client import MiniSWEEnv, SWERolloutResult

__all__ = ["MiniSWEEnv", "SWERolloutResult"]
