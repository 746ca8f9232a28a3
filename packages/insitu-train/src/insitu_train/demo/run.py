"""`insitu demo`: `insitu train` with a preset, a warm start and example rollouts in the report.

The run itself is `training.loop` on examples/demo.toml, with a warm start that is shipped or made with
--from-scratch; with --model on examples/small-model.toml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, model_folder
from insitu.progress.base import View
from insitu.storage.run_dir import read_config, read_store
from insitu.storage.store import Store
from insitu.types import IntArray, Rollout
from insitu_train.demo.smollm2 import fetch_smollm2, smollm2_file
from insitu_train.learner.process import require_learner
from insitu_train.loop import TrainOptions
from insitu_train.phases import eval_phase
from insitu_train.report import ShownRollout, ShownTurn
from insitu_train.run import run_training
from insitu_train.run_report import finish

SIDE_BY_SIDE = 2
"""Tasks of each evaluation that the report of single replies shows."""


async def run_demo(config: Config, view: View, options: TrainOptions, *, from_scratch: bool = False) -> str:
    """Run the demo, write its report and return it. Raises InsituError.

    The time of a warm start made here is part of `wall_s` and is reported as `warm_start_s`.
    """
    extra: dict[str, float] = {}
    if from_scratch and options.resume is None:
        from insitu_train.demo.make_warm_start import make_warm_start

        require_learner(config)
        start = monotonic()
        folder = await make_warm_start(config, view)
        extra["warm_start_s"] = round(monotonic() - start, 1)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    if config.model.path == str(smollm2_file()):
        await fetch_smollm2(view)
    summary = await run_training(config, view, replace(options, extra=extra))
    return write_report(Path(config.run.dir), summary)


def write_report(run_dir: Path, summary: Mapping[str, Any]) -> str:
    """Write curve.svg and report.txt of a finished run, with held-out tasks before and after training.

    One task with every turn of an agent; of single replies some tasks of each evaluation, side by side.
    """
    config = read_config(run_dir)
    single = config.harness.agent == "single_turn"
    with read_store(run_dir) as store:
        renderer = load_renderer(model_folder(config), config.model.renderer)
        evaluations = ["", *(table.name for table in config.eval[1:])] if single else [""]
        found = [_pairs(store, renderer, name)[: SIDE_BY_SIDE if single else 1] for name in evaluations]
    pairs = [pair for several in found for pair in several]
    if single:
        return finish(run_dir, summary, beside=pairs)
    return finish(run_dir, summary, [one for pair in pairs for one in pair])


def _pairs(
    store: Store, renderer: ChatRenderer, evaluation: str
) -> Sequence[tuple[ShownRollout, ShownRollout]]:
    """Return the tasks of an evaluation before and after training: first those that were learned."""
    before = store.rollouts(eval_phase("before", evaluation), 0)
    last = store.last_step()
    ended = store.rollouts(eval_phase("after", evaluation), 0 if last is None else last.step)
    after = {r.task_id: r for r in ended}
    pairs = [(b, after[b.task_id]) for b in before if b.task_id in after]
    pairs.sort(key=lambda pair: (pair[0].reward, pair[1].reward) != (0.0, 1.0))
    return [
        (shown(first, renderer, "before training"), shown(then, renderer, "after training"))
        for first, then in pairs
    ]


def shown(rollout: Rollout, renderer: ChatRenderer, when: str) -> ShownRollout:
    """Return a stored rollout decoded turn by turn, without the agent's constant prompt."""
    turns: list[ShownTurn] = []
    for turn in rollout.trajectory.turns:
        context = renderer.decode(turn.context_ids)
        if turn.parent < 0:
            turns.append(ShownTurn(speaker="task", text=_between(context, "<|im_start|>user\n")))
        else:
            turns.append(ShownTurn(speaker="tool", text=_between(context, "<tool_response>\n")))
        turns.append(ShownTurn(speaker="model", text=_reply_text(renderer, turn.ids)))
    verdict = rollout.verdict
    outcome = (
        "not graded"
        if verdict is None
        else (f"{verdict.outcome.value}, {verdict.passed} of {verdict.total} cases")
    )
    return ShownRollout(title=f"{rollout.task_id} {when}", turns=tuple(turns), verdict=outcome)


def _between(text: str, start: str) -> str:
    tail = text.rsplit(start, 1)[-1]
    for end in ("\n</tool_response>", "<|im_end|>"):
        tail = tail.split(end, 1)[0]
    return tail


def _reply_text(renderer: ChatRenderer, ids: IntArray) -> str:
    parsed = renderer.parse(ids)
    calls = [f"{c.name} {c.arguments}" for c in parsed.calls]
    return "\n".join([*([parsed.text] if parsed.text else []), *calls])
