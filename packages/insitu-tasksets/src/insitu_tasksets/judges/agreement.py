"""How far a judge agrees with people: accuracy and Cohen's kappa on a labelled sample."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from insitu.concurrency import run_all
from insitu.errors import ConfigError, GradeError
from insitu_tasksets.judges.ranking import Ranking
from insitu_tasksets.judges.rubric import Rubric

AT_A_TIME = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of a judge with a labelled sample."""

    count: int
    """Rows with a verdict."""
    accuracy: float
    """Share of these in which judge and label agree."""
    kappa: float
    """The same above chance: 1 = always, 0 = as chance does, by how often each says yes. Of pairs, chance
    is 1/2."""
    failed: tuple[str, ...]
    """Rows without a verdict: id and reason."""
    disagree: tuple[str, ...]
    """Ids of the rows in which they do not agree."""


async def agreement(
    judge: Rubric | Ranking, rows: Sequence[Mapping[str, Any]], threshold: float = 0.5
) -> Agreement:
    """Ask a judge about labelled rows.

    For a Rubric: {"id", "prompt", "diff", "transcript", "label"}; it says yes where its score is `threshold`
    or more, and so does a label, a number from 0 to 1. For a Ranking: {"id", "prompt", "better", "worse"},
    two texts. Raises ConfigError for rows that are none.
    """
    if not rows:
        raise ConfigError("no labelled rows")
    judge = replace(judge, no_verdict=None)  # a row without a verdict is no answer
    places = asyncio.Semaphore(AT_A_TIME)
    pairs = isinstance(judge, Ranking)

    async def one(number: int, row: Mapping[str, Any]) -> tuple[str, bool, bool, str]:
        name = str(row.get("id", number))
        async with places:
            try:
                if isinstance(judge, Ranking):
                    return name, True, await _prefers(judge, row, name), ""
                yes = await judge.score(_shown(judge, row, name), name) >= threshold
                return name, _label(row, name) >= threshold, yes, ""
            except GradeError as error:
                return name, False, False, str(error)

    found = await run_all(*(one(number, row) for number, row in enumerate(rows, 1)))
    judged = [(name, label, yes) for name, label, yes, error in found if not error]
    right = [label == yes for _, label, yes in judged]
    accuracy = sum(right) / len(right) if right else 0.0
    return Agreement(
        count=len(judged),
        accuracy=accuracy,
        kappa=2.0 * accuracy - 1.0 if pairs else _kappa([(label, yes) for _, label, yes in judged]),
        failed=tuple(f"{name}: {error}" for name, _, _, error in found if error),
        disagree=tuple(name for (name, _, _), fits in zip(judged, right, strict=True) if not fits),
    )


def _kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Return Cohen's kappa of two raters; 0 where chance explains everything."""
    if not pairs:
        return 0.0
    count = len(pairs)
    agreed = sum(a == b for a, b in pairs) / count
    yes = [sum(pair[rater] for pair in pairs) / count for rater in (0, 1)]
    chance = yes[0] * yes[1] + (1.0 - yes[0]) * (1.0 - yes[1])
    return (agreed - chance) / (1.0 - chance) if chance < 1.0 else 0.0


async def _prefers(judge: Ranking, row: Mapping[str, Any], name: str) -> bool:
    better, worse = _text(row, "better", name), _text(row, "worse", name)
    scores = await judge.scores(_text(row, "prompt", name), [better, worse], name)
    return scores[better] > scores[worse]


def _shown(judge: Rubric, row: Mapping[str, Any], name: str) -> dict[str, str]:
    return {part: _text(row, part, name) for part in judge.shows}


def _text(row: Mapping[str, Any], part: str, name: str) -> str:
    if not isinstance(row.get(part), str):
        raise ConfigError(f"labelled row {name}: {part} must be a text")
    return str(row[part])


def _label(row: Mapping[str, Any], name: str) -> float:
    label = row.get("label")
    if not isinstance(label, int | float) or not 0.0 <= label <= 1.0:
        raise ConfigError(f"labelled row {name}: label must be a number from 0 to 1")
    return float(label)
