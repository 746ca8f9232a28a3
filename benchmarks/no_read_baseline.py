"""Baseline solve rate of a scripted agent that edits toy tasks without reading the file.

`python -m benchmarks no_read_baseline` runs held-out tasks through the real path (agent, gateway, grader).
By default both the old and the new text of the edit are guessed. With `--anchor` the agent inserts a guessed
line after text that all generated modules share: the edit is accepted, but the right content is only in the
file.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

from benchmarks._arguments import Arguments
from insitu.attempt import AttemptExecutor
from insitu.chat.load import load_renderer
from insitu.collect.breaker import Breaker
from insitu.collect.groups import open_groups
from insitu.collect.options import CollectOptions, Phase, Slot
from insitu.config import Config, demo_preset, load_config, model_folder
from insitu.gateway.token_backend import TokenBackend
from insitu.runtime.agents import limits_of
from insitu.runtime.run import open_runtime
from insitu.storage.store import Score
from insitu.tasks.toy import ToyProblem, ToySource
from insitu.types import Message, Rollout
from insitu_train.demo.demonstrator import FINAL, Habits, Step, edit, guess
from insitu_train.demo.make_warm_start import Demonstrator
from insitu_train.demo.scripted import ScriptedEngine

BLIND = Habits(look=0.0, recover=0.0, verify=0.0)


class Anchored(Demonstrator):
    """Demonstrator that inserts a guessed line after the function's signature."""

    def assign(self, rollout_id: str, problem: ToyProblem, habits: Habits, seed: int) -> None:
        _, imagined = guess(random.Random(f"whet-anchor-{problem.seed}-{seed}"))
        self._scripts[rollout_id] = [
            Step(message=edit(problem, "):", f"):\n    return {imagined}")),
            Step(message=Message(role="assistant", text=FINAL)),
        ]


class _NullSink:
    """Sink and observer that discard everything."""

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        """Do nothing."""

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        """Do nothing."""

    def put(self, slot: Slot, rollout: Rollout) -> None: ...

    def rescored(self, rollout: Rollout) -> None: ...

    def attempted(self, slot: Slot, rollout: Rollout) -> None: ...

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None: ...

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None: ...

    def held(self, phase: Phase, step: int) -> tuple[Rollout, ...]:
        return ()

    def tried(self, phase: Phase, step: int) -> dict[str, int]:
        return {}

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


async def measure(config: Config, tasks: int, *, anchor: bool = False) -> dict[str, Score]:
    """Return the scores by task category on held-out tasks; "" is the total. `anchor`: see the module."""
    renderer = load_renderer(model_folder(config), config.model.renderer)
    demonstrator = Anchored(renderer) if anchor else Demonstrator(renderer)
    source = ToySource(limits_of(config))
    chosen = source.tasks("eval", 0, tasks)
    for i, task in enumerate(chosen):
        slot = Slot(phase="eval_before", step=0, group=i, slot=0)
        demonstrator.assign(slot.rollout_id, source.problem(task), BLIND, 0)
    engine, sink = ScriptedEngine(renderer, demonstrator), _NullSink()
    async with open_runtime(config, TokenBackend(engine, renderer), source) as runtime:
        attempts = AttemptExecutor(runtime.gateway, runtime.workers, runtime.judge)
        options = CollectOptions(seed=0, group_size=1, phase="eval_before", first_step=0)
        async with open_groups(attempts, sink, sink, Breaker(), options, chosen) as collector:
            groups = (await collector.next_batch()).groups
    found: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.rollouts:
            if rollout.reward is not None:
                found.setdefault("", []).append(rollout.reward)
                found.setdefault(rollout.category, []).append(rollout.reward)
    return {name: Score.of(rewards) for name, rewards in sorted(found.items())}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rate with its 95 % interval, by category, and one JSON line."""
    parser = Arguments(prog="benchmarks no_read_baseline", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--agent", choices=("pi", "script"), default="pi")
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--anchor", action="store_true", help="edit behind the text that all modules share")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    options = parser.parse_args(argv)
    config = load_config(None, [f"harness.agent={options.agent}", *options.overrides], demo_preset())
    scores = asyncio.run(measure(config, options.tasks, anchor=options.anchor))
    for name, score in scores.items():
        print(
            f"{name or 'all':12} {score.rate:.3f}  {score.solved}/{score.total}  95 %"
            f" {score.low:.3f} to {score.high:.3f}"
        )
    print(json.dumps({name or "all": score.rate for name, score in scores.items()}))
    return 0
