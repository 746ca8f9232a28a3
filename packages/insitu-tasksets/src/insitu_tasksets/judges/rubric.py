"""A judge that scores one rollout by criteria: the reward function `rubric`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from insitu.errors import ConfigError, GradeError
from insitu.types import FinishedRollout
from insitu_tasksets.judges.endpoint import ChatEndpoint, NoVerdict
from insitu_tasksets.judges.material import cut, question, share, verdict_of

CRITERIA: Mapping[str, tuple[float, str]] = {
    "complete": (0.2, "It does what the task asks, all of it."),
    "minimal": (0.1, "It changes nothing that the task does not need."),
    "clear": (0.1, "Its code is easy to read and fits the code around it."),
}
Part = Literal["prompt", "diff", "transcript"]
SOLVED = "solved"
"""Component with the reward of the hidden tests."""


def part_of(rollout: FinishedRollout, name: Part) -> str:
    """Return the text of one part of a rollout."""
    if name == "prompt":
        return rollout.task.prompt
    return rollout.diff if name == "diff" else rollout.transcript


def solved_of(rollout: FinishedRollout, weight: float) -> dict[str, float]:
    """Return the component of the hidden tests; empty where they do not count."""
    return {SOLVED: weight * (rollout.verdict.reward or 0.0)} if weight else {}


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """The reward: hidden tests times `solved`, and each criterion's share of its best times a weight."""

    criteria: Mapping[str, tuple[float, str]] = field(default_factory=lambda: dict(CRITERIA))
    """Name -> (weight, what earns the best score); a weight below 0 makes it a fault."""
    solved: float = 1.0
    """Weight of the verdict's own reward."""
    only_solved: bool = False
    """Ask only about rollouts whose hidden tests passed; the others have their verdict's reward alone."""
    shows: Sequence[Part] = ("prompt", "diff")
    max_chars: int = 40_000
    """Of each part; the middle of a longer one is left out."""
    no_verdict: float | None = 0.0
    """Share of the best for each criterion where no reply is a verdict, which the rollout's text can cause;
    None = an infrastructure failure, and several in a row end the run."""
    endpoint: ChatEndpoint = field(default_factory=ChatEndpoint)

    def __post_init__(self) -> None:
        """Raise ConfigError for criteria that are none."""
        if not self.criteria or SOLVED in self.criteria:
            raise ConfigError(f"a Rubric needs criteria, with other names than {SOLVED!r}")

    async def __call__(self, rollout: FinishedRollout) -> dict[str, float]:
        """Return the components of the reward. Raises GradeError."""
        parts = solved_of(rollout, self.solved)
        if self.only_solved and (rollout.verdict.reward or 0.0) < 1.0:
            return parts or {SOLVED: 0.0}
        shown: dict[str, str] = {name: part_of(rollout, name) for name in self.shows}
        scores = await self.scores(shown, rollout.id)
        return parts | {name: weight * scores[name] for name, (weight, _) in self.criteria.items()}

    async def score(self, shown: Mapping[str, str], about: str = "") -> float:
        """Return the mean share by weight, from 0 to 1; faults count against it. Raises GradeError."""
        scores = await self.scores(shown, about)
        weights = {name: weight for name, (weight, _) in self.criteria.items()}
        best = [
            weight * (scores[name] if weight > 0 else scores[name] - 1.0) for name, weight in weights.items()
        ]
        return sum(best) / (sum(map(abs, weights.values())) or 1.0)

    async def scores(self, shown: Mapping[str, str], about: str = "") -> dict[str, float]:
        """Return the share of the best score, from 0 to 1, by criterion; `shown`: text by part."""
        lines = "\n".join(f"- {name}: {text}" for name, (_, text) in self.criteria.items())
        what = f"Give one score for each of these criteria:\n{lines}"
        form = {"criteria": {name: {"why": "one sentence", "score": 0} for name in self.criteria}}
        messages, mark = question(
            what, form, [(name, cut(text, self.max_chars)) for name, text in shown.items()]
        )
        try:
            return await self.endpoint.ask(messages, lambda reply: self._read(reply, mark), about)
        except NoVerdict as error:
            if self.no_verdict is None:
                raise GradeError(str(error)) from error
            least = self.no_verdict
            return {name: least if w > 0.0 else 1.0 - least for name, (w, _) in self.criteria.items()}

    def _read(self, reply: str, mark: str) -> dict[str, float]:
        given = verdict_of(reply, mark).get("criteria")
        if not isinstance(given, dict) or given.keys() != self.criteria.keys():
            raise NoVerdict("the judge did not score each criterion once")
        found = {name: one.get("score") if isinstance(one, dict) else one for name, one in given.items()}
        return {name: share(score, name) for name, score in found.items()}
