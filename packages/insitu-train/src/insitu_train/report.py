"""Final report of a run as plain text: scores, a rollout before and after, the ledger, paths."""

from __future__ import annotations

import itertools
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from insitu.progress.base import change_text, duration, rounded
from insitu.storage.pass_at_k import covered, title
from insitu.storage.store import Score
from insitu.types import Ledger

_TOOL_LINES = 6
"""Maximum lines shown of one tool result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """One decoded message of a rollout."""

    speaker: Literal["task", "model", "tool"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """One rollout as text."""

    title: str
    turns: tuple[ShownTurn, ...]
    verdict: str
    """Verdict as text, for example `unresolved, 2 of 4 cases`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Scores of one evaluation before and after training."""

    name: str
    before: Score
    after: Score
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """`before`, `after` and `gain` of summary.json; empty = there was no evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSetReport:
    """Scores of one task set of a mix."""

    name: str
    agent: str
    trained: Score
    """Over all rollouts of training."""
    evaluations: Sequence[EvaluationReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReport:
    """Content of the report."""

    run_dir: Path
    heldout: EvaluationReport
    ledger: Ledger
    wall_s: float
    steps: int
    rollouts: int
    updates: int
    """Steps that changed the weights."""
    max_logprob_gap: float | None
    """Largest |sampler - trainer| log-probability gap of all compared tokens; None = no tokens compared."""
    mismatched: int = 0
    """Tokens excluded from training because of the gap."""
    categories: Mapping[str, tuple[Score, Score]] = field(default_factory=dict)
    """Task category -> (before, after)."""
    best: tuple[int, float] | None = None
    """Best step and its mean reward on held-out tasks; None if it is the last one and `base` is None."""
    base: float | None = None
    """Mean reward before training, where no step has a better one."""
    further: tuple[EvaluationReport, ...] = ()
    """The evaluations after the first one."""
    sets: tuple[TaskSetReport, ...] = ()
    """Of a mix."""
    ended: str = ""
    """Why the run ended before its last step; empty = it did not."""
    shown: tuple[ShownRollout, ...] = ()
    """The same task before and after training."""
    beside: tuple[tuple[ShownRollout, ShownRollout], ...] = ()
    """Replies to the same tasks before and after training, to be shown side by side."""
    untrained: tuple[str, ...] = ()
    """Sentences on why no step changed the weights and how to fix it."""
    unparsed: str = ""
    """Replies of training with calls that did not parse or were of unknown tools; empty = none."""
    shared: str = ""
    """Rows that ranks of the learner computed together; empty = none."""
    curve: Path | None = None


def render_report(report: FinalReport, width: int = 100) -> str:
    """Return the report as text of at most `width` columns, ending in a newline."""
    lines = [""]
    for shown in report.shown:
        lines += [*_rollout(shown, width), ""]
    for before, after in report.beside:
        lines += [*_side_by_side(before, after, width), ""]
    lines += [*_scores(report), ""]
    sets = "Task sets" if any(one.name != one.agent for one in report.sets) else "Agents"
    for heading, more in (("Further evaluations", _further(report)), (sets, set_lines(report.sets))):
        if found := list(more):
            lines += [heading, *found, ""]
    lines += [*_ledger(report.ledger), ""]
    lines += [part for sentence in report.untrained for part in textwrap.wrap(sentence, width)]
    lines.append(f"{_steps(report)}, {report.rollouts} rollouts in {duration(report.wall_s)}{_gap(report)}")
    lines += [f"calls  {report.unparsed}"] if report.unparsed else []
    lines += [f"shared  {report.shared}"] if report.shared else []
    lines += [report.ended] if report.ended else []
    if report.curve is not None:
        lines.append(f"curve  {report.curve}")
    lines.append(f"run    {report.run_dir}")
    lines.append(f"look   insitu view {shlex.quote(str(report.run_dir))}")
    return "\n".join(lines) + "\n"


def _steps(report: FinalReport) -> str:
    if report.updates == report.steps:
        return f"{report.steps} optimizer steps"
    return (
        f"{report.updates} optimizer steps ({report.steps - report.updates} of {report.steps} had no update)"
    )


def _gap(report: FinalReport) -> str:
    if report.max_logprob_gap is None:
        return ""
    tokens = "token" if report.mismatched == 1 else "tokens"
    excluded = f", {report.mismatched} {tokens} excluded" if report.mismatched else ""
    return f"; largest sampler-trainer logprob gap {report.max_logprob_gap:.1e}{excluded}"


def score_text(score: Score) -> str:
    """Return text such as `0.17 (22/128, 95 % 0.12 to 0.25)`, with the mean reward if some are partial."""
    if not score.total:
        return "none graded"
    mean = f", mean reward {score.reward_mean:.2f}" if score.partial else ""
    interval = f"95 % {rounded(score.low)} to {rounded(score.high)}"
    return f"{rounded(score.rate)} ({score.solved}/{score.total}, {interval}){mean}"


def _scores(report: FinalReport) -> Iterator[str]:
    yield "Held-out solve rate"
    heldout = report.heldout
    yield f"  before  {score_text(heldout.before)}"
    yield f"  after   {score_text(heldout.after)}"
    if gain := _gain(heldout):
        yield f"  gain    {gain}"
    yield from _levels(heldout)
    if report.best is not None:
        step, reward = report.best
        how = f"insitu export {shlex.quote(str(report.run_dir))} --checkpoint best --out DIR"
        # Where training has gained nothing, its best checkpoint must not read as a gain.
        base = "" if report.base is None else f", no better than {rounded(report.base)} before training"
        yield f"  best    mean reward {rounded(reward)} after step {step}{base}: {how}"
    wide = max((len(name) for name in report.categories), default=0)
    for name, (before, after) in report.categories.items():
        counts = f"({before.solved}/{before.total} -> {after.solved}/{after.total})"
        mean = f", mean reward {before.reward_mean:.2f} -> {after.reward_mean:.2f}"
        partial = before.partial or after.partial
        rates = f"{rounded(before.rate)} -> {rounded(after.rate)}"
        yield f"    {name:<{wide}}  {rates}  {counts}{mean if partial else ''}"


def _further(report: FinalReport) -> Iterator[str]:
    wide = max((len(one.name) for one in report.further), default=0)
    for one in report.further:
        gain = _gain(one)
        scores = f"{score_text(one.before)} -> {score_text(one.after)}"
        yield f"  {one.name:<{wide}}  {scores}{f', gain {gain}' if gain else ''}"
        yield from _levels(one, "  ")


def _gain(evaluation: EvaluationReport) -> str:
    """Return the change of the tasks' solve rates with its interval; empty where nothing is on both sides."""
    gain = evaluation.numbers.get("gain")
    return "" if gain is None else change_text(gain)


def _levels(evaluation: EvaluationReport, indent: str = "") -> Iterator[str]:
    """Yield pass@k and pass^k before and after, of an evaluation with several samples."""
    after, of = evaluation.numbers.get("after", {}), evaluation.numbers.get("tasks", 0)
    for name in (name for name in after if name.startswith("pass_") and f"{name}_low" in after):
        sides = (evaluation.numbers[side] for side in ("before", "after"))
        shown = (
            f"{rounded(s[name])} (95 % {rounded(s[f'{name}_low'])} to {rounded(s[f'{name}_high'])}"
            f"{covered(s.get(f'{name}_tasks', of), of)})"
            for s in sides
            if name in s
        )
        yield f"{indent}  {title(name)}  {' -> '.join(shown)}"


def set_lines(sets: Sequence[TaskSetReport]) -> Iterator[str]:
    """Yield a line for each task set: agent, and scores in training and in each evaluation."""
    wide = max((len(one.name) for one in sets), default=0)
    agents = ["" if one.agent == one.name else one.agent for one in sets]
    column = max((len(agent) + 2 for agent in agents if agent), default=0)
    for one, agent in zip(sets, agents, strict=True):
        scores = [f"training {_counted(one.trained)}"] if one.trained.total else []
        scores += [
            f"{found.name} {_counted(found.before)} -> {_counted(found.after)}"
            for found in one.evaluations
            if found.before.total or found.after.total
        ]
        yield f"  {one.name:<{wide}}  {agent:<{column}}{', '.join(scores)}".rstrip()


def _counted(score: Score) -> str:
    return f"{rounded(score.rate)} ({score.solved}/{score.total})" if score.total else "none graded"


def _ledger(ledger: Ledger) -> Iterator[str]:
    yield "Ledger: every sampled token, once"
    rows = {"captured": ledger.captured, "trained": ledger.trained}
    rows |= {f"excluded: {reason}": tokens for reason, tokens in sorted(ledger.excluded.items())}
    wide = max(len(name) for name in rows)
    digits = max(len(f"{tokens:,}") for tokens in rows.values())
    for name, tokens in rows.items():
        yield f"  {name:<{wide}}  {tokens:>{digits},}"
    yield "  balanced" if ledger.balanced else "  NOT BALANCED: this is a defect, please report it"


def _rollout(shown: ShownRollout, width: int) -> Iterator[str]:
    yield f"{shown.title} {'-' * max(0, width - len(shown.title) - 1)}"
    for turn in shown.turns:
        prefix = f"  {turn.speaker:<5} | "
        lines = [
            part for line in turn.text.strip("\n").split("\n") for part in _wrap(line, width - len(prefix))
        ]
        if turn.speaker == "tool" and len(lines) > _TOOL_LINES:
            more = len(lines) - _TOOL_LINES
            lines = [*lines[:_TOOL_LINES], f"... {more} more line{'s' if more > 1 else ''}"]
        for number, line in enumerate(lines):
            yield ((prefix if number == 0 else " " * 8 + "| ") + line).rstrip()
    yield f"  => {shown.verdict}"


def _side_by_side(before: ShownRollout, after: ShownRollout, width: int) -> Iterator[str]:
    """Yield the task over the whole width, and the last reply of both in two columns."""
    column = (width - 3) // 2
    yield from _wrapped(f"task | {before.turns[0].text.strip()}", width)
    sides = []
    for shown in (before, after):
        said = [turn.text for turn in shown.turns if turn.speaker == "model"] or [""]
        sides.append([shown.title, "-" * column, *_wrapped(said[-1], column), f"=> {shown.verdict}"])
    for left, right in itertools.zip_longest(*sides, fillvalue=""):
        yield f"{left:<{column}} | {right}".rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    return [part for line in text.strip("\n").split("\n") for part in _wrap(line, width)]


def _wrap(line: str, width: int) -> list[str]:
    # Control characters from a model or tool must not reach the terminal.
    clean = "".join(c if c.isprintable() else "?" for c in line.expandtabs(4))
    return textwrap.wrap(clean, width, drop_whitespace=False, replace_whitespace=False) or [""]
