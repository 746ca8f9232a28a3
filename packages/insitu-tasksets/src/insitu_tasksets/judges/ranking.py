"""A judge that compares the rollouts of a group: the reward function `ranking`, with reward.group = true.

One question has all of them, in an order that depends on their texts and not on who made them first; equal
ones are shown once. What is compared side by side needs no scale that holds for all tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from insitu.errors import GradeError
from insitu.types import FinishedRollout
from insitu_tasksets.judges.endpoint import ChatEndpoint, NoVerdict
from insitu_tasksets.judges.material import cut, question, share, verdict_of
from insitu_tasksets.judges.rubric import Part, part_of, solved_of

BETTER = (
    "One that does what the task asks is better than one that does not; of two that do, the one that needed"
    " less and is easier to read."
)
JUDGED = "judged"
"""Component with the judge's score."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The reward: hidden tests times `solved`, and the share of the best score beside the group's others."""

    better: str = BETTER
    """What makes one better than another."""
    weight: float = 1.0
    """Of the judge's score."""
    solved: float = 0.0
    """Weight of the verdict's own reward."""
    shows: Sequence[Part] = ("diff",)
    """Of each rollout; the task is always shown."""
    max_chars: int = 60_000
    """Of all rollouts together; the middle of a longer one is left out."""
    no_verdict: float | None = 0.0
    """Share of the best score for one that the judge gave no score; a group of which it scored none has no
    reward. None = an infrastructure failure, and several in a row end the run."""
    endpoint: ChatEndpoint = field(default_factory=ChatEndpoint)
    needs_group: bool = True
    """Tells the configuration that it needs reward.group."""

    async def __call__(self, rollout: FinishedRollout) -> dict[str, float] | None:
        """Return the components of the reward, None if the judge scored none. Raises GradeError."""
        group = rollout.group or (rollout,)
        texts = {one.id: self._text(one) for one in group}
        scores = await self.scores(rollout.task.prompt, list(texts.values()), rollout.id.rpartition("/")[0])
        if not scores:
            return None
        return solved_of(rollout, self.solved) | {JUDGED: self.weight * scores[texts[rollout.id]]}

    async def scores(self, prompt: str, texts: Sequence[str], about: str = "") -> dict[str, float]:
        """Return the share of the best score, from 0 to 1, by text; {} if none has one. Raises GradeError."""
        shown = sorted(set(texts), key=lambda text: hashlib.sha256(text.encode(errors="replace")).digest())
        names = {f"candidate-{number}": text for number, text in enumerate(shown, 1)}
        most = self.max_chars // len(names)
        what = f"Compare the candidates and give one score for each. {self.better}"
        form = {"why": "two sentences", "scores": dict.fromkeys(names, 0)}
        parts = [("task", cut(prompt, self.max_chars))]
        messages, mark = question(
            what, form, [*parts, *((name, cut(text, most)) for name, text in names.items())]
        )
        try:
            found = await self.endpoint.ask(messages, lambda reply: _read(reply, mark, names), about)
        except NoVerdict as error:
            if self.no_verdict is None:
                raise GradeError(str(error)) from error
            if not error.scores:
                return {}
            found = dict.fromkeys(names, self.no_verdict) | dict(error.scores)
        return {names[name]: score for name, score in found.items()}

    def _text(self, rollout: FinishedRollout) -> str:
        parts = [part_of(rollout, name) for name in self.shows]
        return "\n\n".join(parts)


def _read(reply: str, mark: str, names: Mapping[str, str]) -> dict[str, float]:
    given = verdict_of(reply, mark).get("scores")
    if not isinstance(given, dict) or not given.keys() <= names.keys():
        raise NoVerdict("the judge did not score each candidate once")
    found, wrong = {}, ""
    for name, score in given.items():
        try:
            found[name] = share(score, name)
        except NoVerdict as error:
            wrong = str(error)
    if len(found) < len(names):
        raise NoVerdict(wrong or "the judge did not score each candidate once", found)
    return found
