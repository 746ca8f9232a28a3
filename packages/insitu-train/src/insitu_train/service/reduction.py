"""Find out how a training service sums the losses of a step.

The Tinker API describes a plain sum over tokens and rows. SkyRL's server divides each row by its length and
the step by its number of rows, which would weigh a long rollout's tokens less. No endpoint names the rule, so
it is measured: the same loss of one token is applied alone, in a longer row, and beside another row. The
optimizer's `eps` is large against the gradient and it has no memory, so a step is proportional to it. The
steps are small and taken back at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from insitu.config.training import OptimizerKeys
from insitu.errors import EngineError
from insitu.types import FloatArray, IntArray
from insitu_train.service.session import TrainingRun

_ADVANTAGE, _EPS, _NO_CLIP = 1e-3, 1.0, 1e9
_FIRST_LR, _WANTED = 1.0, 0.03
"""Learning rate of the first trial, and the change of the log-probability that later ones aim at."""
_LARGEST_LR = 1e7
_NEAR = 0.1
"""Largest relative deviation from a factor of 1, or of the lengths' or numbers' ratio."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a service divides the loss of a token by."""

    length: bool
    """The number of tokens of its row."""
    rows: bool
    """The number of rows of the step."""

    def factors(self, lengths: Sequence[int]) -> list[float]:
        """Return, per row of a step, what its losses are multiplied by for a plain sum."""
        rows = len(lengths) if self.rows else 1
        return [float(rows * (length if self.length else 1)) for length in lengths]


def find_reduction(run: TrainingRun, ids: IntArray) -> Reduction:
    """Measure the rule with `ids`, some tens of tokens in the vocabulary, of a run that was just created.

    Raises EngineError for a rule that is neither.
    """
    start = run.save("insitu-probe")
    row, longer = ids, np.concatenate([ids, ids, ids])

    def change(rows: Sequence[IntArray], lr: float) -> float:
        """Return by how much a step on the last token of `row`, the start of rows[0], changes it."""
        loss = [np.zeros(len(r) - 1, np.float32) for r in rows]
        loss[0][len(row) - 2] = _ADVANTAGE
        known = run.logprobs(rows)
        _step(run, rows, known, loss, lr)
        moved = run.logprobs(rows)
        _step(run, rows, moved, [-part for part in loss], lr)  # about where the next one begins
        return float(moved[0][len(row) - 2] - known[0][len(row) - 2])

    lr = _FIRST_LR
    alone = change([row], lr)
    while abs(alone) < _WANTED / 3 and lr < _LARGEST_LR:
        lr = min(_LARGEST_LR, lr * min(100.0, _WANTED / max(abs(alone), 1e-12)))
        alone = change([row], lr)
    if not abs(alone) > 1e-4:
        raise EngineError("training service: a training step does not change the log-probabilities")
    by_length = change([longer], lr) / alone
    by_rows = change([row, longer], lr) / alone
    run.restart(start)
    ratio = (len(row) - 1) / (len(longer) - 1)
    return Reduction(
        length=_which("the length of a row", by_length, ratio),
        rows=_which("the number of rows", by_rows, 0.5),
    )


def _step(
    run: TrainingRun,
    rows: Sequence[IntArray],
    known: Sequence[FloatArray],
    factors: Sequence[FloatArray],
    lr: float,
) -> None:
    run.backward(rows, known, factors)
    run.update(OptimizerKeys(grad_clip=_NO_CLIP, betas=(0.0, 0.0)), lr, _EPS)


def _which(what: str, found: float, divided: float) -> bool:
    """Return whether `found` is `divided` rather than 1."""
    if abs(found - 1.0) <= _NEAR:
        return False
    if abs(found - divided) <= _NEAR * divided:
        return True
    raise EngineError(
        f"training service: its loss depends on {what} in an unknown way (factor {found:.3g}, neither 1 nor"
        f" {divided:.3g}): the weights of rollouts would be wrong"
    )
