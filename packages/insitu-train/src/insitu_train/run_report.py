"""Curve and report of a finished run, and the text of `insitu show`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from insitu.config import Arm, Config
from insitu.errors import RecordError
from insitu.progress.base import rate_text
from insitu.storage.files import write_text
from insitu.storage.run_dir import KIND, REPORT, read_config, read_store, read_summary
from insitu.storage.score import Score
from insitu.storage.store import ScoresBy, Store
from insitu.types import DriftNote, Ledger
from insitu_train.alarms import describe_rewards
from insitu_train.curve import curve_of, curve_svg
from insitu_train.phases import When, eval_name, eval_phase
from insitu_train.report import (
    EvaluationReport,
    FinalReport,
    ShownRollout,
    TaskSetReport,
    render_report,
    score_text,
    set_lines,
)

CURVE = "curve.svg"
_ENDS: tuple[When, When] = ("before", "after")
_NONE = Score.of(())
NAMED_VERDICTS = 3
"""Number of verdicts listed in the report of a run without updates."""


def finish(
    run_dir: Path,
    summary: Mapping[str, Any],
    shown: Sequence[ShownRollout] = (),
    beside: Sequence[tuple[ShownRollout, ShownRollout]] = (),
) -> str:
    """Write curve.svg and report.txt of a finished run and return the report's text."""
    steps, agent = summary["rl_steps"], summary["agent"]
    title = f"Tasks solved by {agent} over {steps} steps of training (seed {summary['seed']})"
    with read_store(run_dir) as store:
        write_text(run_dir / CURVE, curve_svg(curve_of(store, title)))
        report = replace(report_of(run_dir, store, summary, shown), beside=tuple(beside))
    text = render_report(report)
    write_text(run_dir / REPORT, text)
    return text


def report_of(
    run_dir: Path, store: Store, summary: Mapping[str, Any], shown: Sequence[ShownRollout] = ()
) -> FinalReport:
    """Return the report of a stored run: scores from its rollouts, the rest from its summary."""
    config, steps = read_config(run_dir), summary["rl_steps"]
    before, after = (_scores(store, eval_phase(when)) for when in _ENDS)
    categories = [name for name in before | after if name]
    heldout, *further = _evaluations(store, config, summary["evaluations"])
    step, limit = summary["best_step"], config.run.stop_after_evals
    best = None if step is None else (step, summary["best_heldout_reward"])
    base = before[""].reward_mean if "" in before else 0.0
    as_good = best is not None and round(base, 4) >= best[1] > 0.0
    ended = (
        f"ended after step {steps} of {config.run.steps}: {limit} evaluations without a better held-out"
        " result (run.stop_after_evals)"
    )
    return FinalReport(
        run_dir=run_dir,
        heldout=heldout,
        best=best if as_good or step != steps else None,
        base=base if as_good else None,
        further=tuple(one for one in further if one.numbers),
        sets=_task_sets(store, config),
        ended=ended if summary["stopped_early"] else "",
        ledger=Ledger(**summary["ledger"]),
        wall_s=summary["wall_s"],
        steps=steps,
        updates=summary["updates"],
        rollouts=summary["rollouts"],
        max_logprob_gap=summary["max_logprob_gap_seen"],
        mismatched=summary["mismatched"],
        categories={name: (before.get(name, _NONE), after.get(name, _NONE)) for name in categories},
        shown=tuple(shown),
        unparsed=_unparsed(store),
        shared=_shared(store),
        untrained=() if summary["updates"] or not summary["rl_steps"] else tuple(_untrained(store)),
        curve=run_dir / CURVE,
    )


def _evaluations(
    store: Store, config: Config, numbers: Mapping[str, Any], by: ScoresBy = "category", of: str = ""
) -> list[EvaluationReport]:
    """Return what each evaluation found, the first one as `held-out`; of: what `by` is for its rollouts."""
    found = []
    for number, table in enumerate(config.eval):
        phases = [eval_phase(when, table.name if number else "") for when in _ENDS]
        before, after = (_scores(store, phase, by).get(of, _NONE) for phase in phases)
        own = numbers.get(table.name, {})
        name = table.name if number else "held-out"
        found.append(EvaluationReport(name=name, before=before, after=after, numbers=own))
    return found


def _task_sets(store: Store, config: Config) -> tuple[TaskSetReport, ...]:
    """Return the scores of each task set of a mix and each of several agents; empty for one set and agent."""
    rows: list[tuple[ScoresBy, Arm]] = [("task_set", arm) for arm in config.set_arms if config.set_names]
    rows += [("part", arm) for arm in config.agent_arms]
    return tuple(
        TaskSetReport(
            name=arm.label,
            agent=config.agent_of(arm.part),
            trained=store.scores("train", None, by).get(arm.label, _NONE),
            evaluations=_evaluations(store, config, {}, by, arm.label),
        )
        for by, arm in rows
    )


def _unparsed(store: Store) -> str:
    """Return how many replies of training had calls that did not parse or were of unknown tools, or ""."""
    steps = [step for step in store.steps() if step.metrics.get("unparsed_share") is not None]
    malformed, unknown = (
        sum(s.metrics[name] for s in steps) for name in ("malformed_calls", "unknown_tools")
    )
    if not malformed and not unknown:
        return ""
    shares = [f"{s.metrics['unparsed_share']:.1%} in step {s.step}" for s in (steps[0], steps[-1])]
    found = f"{malformed} malformed, {unknown} of unknown tools"
    return f"{found}; share of the replies {', '.join(dict.fromkeys(shares))}"


def _shared(store: Store) -> str:
    """Return how many rows were too long for one rank, and what part of the updates they took, or ""."""
    steps = [step.metrics for step in store.steps()]
    having = [m for m in steps if m.get("shared_rows")]
    if not having:
        return ""
    rows, seconds = sum(m["shared_rows"] for m in having), sum(m["shared_s"] for m in having)
    whole = sum(m.get("seconds") or 0.0 for m in steps)
    return (
        f"{rows} rows in {len(having)} of {len(steps)} steps were too long for one rank and computed by"
        f" several: {seconds:.1f} of {whole:.1f} s of updates"
    )


def _untrained(store: Store) -> Iterator[str]:
    """Explain why no step of a run changed the weights and how to fix it."""
    rollouts = [o for phase, step in store.phases() if phase == "train" for o in store.outcomes(phase, step)]
    rewards = [o.reward for o in rollouts if o.reward is not None]
    earned = describe_rewards(rewards)
    yield f"Nothing was trained: no step had enough groups with different rewards; {earned}."
    verdicts = Counter(
        f"{o.outcome.value}: {o.reason or '(no reason)'}" for o in rollouts if o.outcome is not None
    )
    common = [f"{count} times {verdict}" for verdict, count in verdicts.most_common(NAMED_VERDICTS)]
    yield from [f"Most common verdicts: {'; '.join(common)}."] if common else []
    if rewards and min(rewards) >= 1.0:
        yield "Every task is already solved: use harder tasks."
    else:
        yield (
            "Check the reward first: `insitu tasks validate` verifies that each task's solution earns it."
            " Then try easier tasks, a stronger model, larger groups (collect.group_size) or partial rewards."
        )


def show_run(run_dir: Path) -> str:
    """Return a text about a stored run, finished or not.

    Raises RecordError.
    """
    config = read_config(run_dir)
    with read_store(run_dir) as store:
        kind = store.meta().get(KIND)
        agent = "served" if kind == "serve" else config.agent_names
        head = f"{run_dir}: {agent}, seed {config.run.seed}"
        if kind is not None:
            return "\n".join([head, *_decided_lines(run_dir, store, kind)]) + "\n"
        lines = [head, *_step_lines(store), *_eval_lines(store)]
        lines += [f"  drift: {line}" for line in drift_totals(store.drifts())]
        lines += _attempt_lines(store)
        summary = read_summary(run_dir)
        if summary is not None:
            try:
                report = report_of(run_dir, store, summary)
            except (KeyError, TypeError) as error:
                file = run_dir / "summary.json"
                raise RecordError(f"{file} is not the summary of a training run: {error!r}") from error
            return "\n".join(lines) + "\n" + render_report(report)
        lines += _state_lines(store)
        lines += set_lines(_task_sets(store, config))
        last = store.last_step()
        if last is None and not store.phases():
            return "\n".join([*lines, "nothing is stored yet"]) + "\n"
    done = 0 if last is None else last.step
    lines.append(f"not finished: {done} of {config.run.steps} steps")
    lines.append(f"continue with: insitu train --resume {run_dir}")
    return "\n".join(lines) + "\n"


def _decided_lines(run_dir: Path, store: Store, kind: str) -> Iterator[str]:
    """Yield the report of a run without training, or its progress."""
    report = run_dir / REPORT
    if read_summary(run_dir) is not None and report.exists():
        yield report.read_text(encoding="utf-8").rstrip()
        return
    for phase, step in store.phases():
        rollouts = store.outcomes(phase, step)
        ends = Counter(o.status.value if o.outcome is None else o.outcome.value for o in rollouts)
        yield f"  {len(rollouts)} rollouts so far: {', '.join(f'{name} {n}' for name, n in ends.items())}"
    if kind == "bridge":
        yield "not finished: its trainer is running, or was killed"
    elif kind == "serve":
        yield f"not finished: serving, or killed (insitu recover {run_dir})"
    else:
        yield f"not finished; continue with: insitu {kind} --resume {run_dir}"


def _scores(store: Store, phase: str, by: ScoresBy = "category") -> dict[str, Score]:
    """Return the scores of the newest step with this phase; empty when there is none."""
    steps = [step for name, step in store.phases() if name == phase]
    return store.scores(phase, max(steps), by) if steps else {}


def _step_lines(store: Store) -> Iterator[str]:
    for record in store.steps():
        score = store.step_score(record.step)
        ledger = record.ledger
        unparsed = record.metrics.get("unparsed_share")
        shared = record.metrics.get("shared_rows")
        yield (
            f"  step {record.step:>4}  solved {rate_text(score)} ({score.solved}/{score.total})"
            f"  trained {ledger.trained:,} of {ledger.captured:,} tokens"
            f"{f'  unparsed calls {unparsed:.1%}' if unparsed else ''}"
            f"{f'  rows shared by ranks {shared}' if shared else ''}"
        )


def _state_lines(store: Store) -> Iterator[str]:
    """Yield a line with the number of rollouts per state."""
    states = {state: count for state, count in store.states().items() if count and state != "discarded"}
    states |= {f"discarded ({reason})": count for reason, count in store.discards().items()}
    if states:
        yield f"  rollouts: {', '.join(f'{count} {state}' for state, count in states.items())}"


def _attempt_lines(store: Store) -> Iterator[str]:
    """Yield a line with the number of attempts per end, if any did not decide its rollout."""
    attempts = {end: count for end, count in store.attempts_by_end().items() if count}
    if attempts.keys() - {"decided"}:
        yield f"  attempts: {', '.join(f'{count} {end}' for end, count in attempts.items())}"


def _eval_lines(store: Store) -> Iterator[str]:
    left = Counter((state.phase, state.step) for state in store.open_rollouts())
    for place, done in store.phases().items():
        phase, step = place
        if phase.startswith("eval"):
            so_far = f"  {done} of {done + left[place]} rollouts so far" if left[place] else ""
            score = score_text(store.scores(phase, step)[""])
            yield f"  {eval_name(phase) or 'held-out'} after {step} steps  {score}{so_far}"


def drift_totals(drifts: Sequence[DriftNote]) -> list[str]:
    """Return one line per kind and cause, with the number of sampled tokens concerned."""
    counts = Counter((note.kind, note.cause) for note in drifts)
    tokens: Counter[tuple[str, str]] = Counter()
    for note in drifts:
        tokens[note.kind, note.cause] += note.tokens
    return [
        f"total {kind} {cause}: {count}, {tokens[kind, cause]} sampled tokens concerned"
        for (kind, cause), count in sorted(counts.items())
    ]
