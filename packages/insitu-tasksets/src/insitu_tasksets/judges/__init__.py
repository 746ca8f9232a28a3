"""Judges: reward functions that ask a language model at any chat-completions endpoint.

    from insitu_tasksets.judges import ChatEndpoint, Ranking, Rubric

    judge = Rubric(criteria={"clear": (0.3, "The change is easy to read.")})

`Rubric` scores one rollout by criteria, `Ranking` compares those of a group; `agreement` compares either with
labels of people. A judge that cannot be asked, or gives no verdict, raises: that is never a reward of 0.
"""

from __future__ import annotations

from insitu_tasksets.judges.agreement import Agreement, agreement
from insitu_tasksets.judges.endpoint import ChatEndpoint
from insitu_tasksets.judges.ranking import Ranking
from insitu_tasksets.judges.rubric import Rubric

__all__ = ["Agreement", "ChatEndpoint", "Ranking", "Rubric", "agreement"]

RUBRIC, RANKING = Rubric(), Ranking()
"""The reward functions `rubric` and `ranking`: general criteria, and the endpoint of the environment."""
