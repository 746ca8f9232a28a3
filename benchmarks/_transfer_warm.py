"""The warm start of the transfer benchmark: one small model that was taught the tools of every agent.

    first requests of the agents -> tokenizer -> recordings through the agents -> supervised training

A recording must equal its rendering; then the model trains on both. Weights begin as those of the demo's
warm start, with new rows for new tokens. Each part is kept below the folder and is not made twice.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks._transfer_agents import SPELLINGS, VOLATILE, Opening, opening_of, rendered, spelled
from benchmarks._transfer_runs import CONTEXT, Late
from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer
from insitu.config import WARM_START, Config, demo_preset, load_config
from insitu.errors import TrainError
from insitu.progress.plain import PlainView
from insitu.runtime.agents import limits_of
from insitu.storage.temp_dirs import part_folder
from insitu.tasks.toy import FAMILIES, ToySource
from insitu.types import IntArray, Limits, Segment
from insitu_train.demo.demonstrator import Habits, Step
from insitu_train.demo.make_warm_start import DemonstrationSpec, Demonstrator, record_all, write_renderer
from insitu_train.demo.rendered_demonstrations import Demonstration
from insitu_train.demo.scripted import ScriptedEngine
from insitu_train.demo.sft_data import (
    DemonstrationBatch,
    Phase,
    Recorded,
    padded,
    read_recorded,
    write_recorded,
)
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3, initialise, load_model, save_model
from insitu_train.options import OptimConfig
from insitu_train.sft.trainer import Sft, SftConfig

RECORDED = 12
"""Demonstrations recorded through each agent, equally many with the habits of each phase."""
PHASES = (Phase(steps=450, look=0.9, wrong=0.0), Phase(steps=150, look=0.2, wrong=0.1))
ROWS, RECORDED_ROWS = 16, 2
"""Rows of a batch, and those of them that were recorded; all are inside one agent, which takes turns."""
SAVED = 10
"""Steps of the supervised training between two stored states."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def configuration(agent: str, folder: Path) -> Config:
    """Return the demo's configuration with another agent and the model of a folder."""
    keys = [f"harness.agent={agent}", "harness.workers=4", f"model.max_context_tokens={CONTEXT}"]
    return load_config(None, [*keys, f"model.path={folder}"], demo_preset())


class _SpelledDemonstrator(Demonstrator):
    """The demonstrator of one agent."""

    def script(self, rollout_id: str, steps: Sequence[Step]) -> None:
        self._scripts[rollout_id] = list(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """What came of demonstrations through an agent, by rollout id."""

    prompts: Mapping[str, IntArray]
    """First request."""
    segments: Mapping[str, Sequence[Segment]]


def _play(agent: str, folder: Path, context: int, plays: Mapping[str, Habits], seed: int) -> _Played:
    """Run one demonstration per habits through the real agent and a gateway that accepts `context` tokens."""
    config, renderer = configuration(agent, folder), load_renderer(folder)
    demonstrator = _SpelledDemonstrator(renderer)
    limits = limits_of(config).changed(max_context_tokens=context)
    source = ToySource(limits, seed=3000 + seed)
    tasks = source.tasks("train", 0, len(plays))
    specs = []
    for (name, habits), task in zip(plays.items(), tasks, strict=True):
        demonstrator.script(name, spelled(agent, source.problem(task), habits, seed))
        specs.append(DemonstrationSpec(rollout_id=name, task=task))
    engine = ScriptedEngine(renderer, demonstrator)
    found = asyncio.run(record_all(config, renderer, engine, specs, PlainView(sys.stderr)))
    first: dict[str, IntArray] = {}
    for sent in engine.sent:
        first.setdefault(sent.key.rollout_id, sent.ids)
    return _Played(prompts=first, segments=found)


def first_text(agent: str, folder: Path) -> str:
    """Return the constant text of an agent's first request and its fixed messages, one a line."""
    kept = folder / "prompts" / f"{agent}.txt"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with part_folder(folder / "no-vocabulary") as part:
            write_renderer(part, "")
            # Without the agents' lines the tokenizer falls back to bytes, which need more context.
            played = _play(agent, part, 65536, {"probe/0": Habits(look=1.0, verify=0.0)}, 0)
            text = load_renderer(part).decode(played.prompts["probe/0"])
            task = ToySource(Limits(), seed=3000).tasks("train", 0, 1)[0]
        kept.write_text(_DATE.sub("\n", text.replace(task.prompt, "\n")))
    text = kept.read_text()
    # An indented line follows the tokens of its indentation.
    return "\n".join([text, *(line.strip() for line in text.splitlines()), *SPELLINGS[agent].pieces])


def recording(agent: str, model: Path, folder: Path) -> tuple[Recorded, Opening]:
    """Return demonstrations recorded through an agent; raise TrainError if its rendering differs."""
    kept, text = folder / f"{agent}.npz", folder / f"{agent}.json"
    renderer = load_renderer(model)
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        habits = {f"{agent}/{i:03d}": PHASES[i % len(PHASES)].habits for i in range(RECORDED)}
        played = _play(agent, model, CONTEXT, habits, 0)
        source = ToySource(Limits(), seed=3000)
        tasks, rows = source.tasks("train", 0, RECORDED), dict[int, list[Demonstration]]()
        problem = source.problem(tasks[0])
        opening = opening_of(renderer, played.prompts[next(iter(habits))], problem.prompt)
        for i, (name, task) in enumerate(zip(habits, tasks, strict=True)):
            found = _demonstration(name, played.segments[name], opening, task.id)
            made = rendered(renderer, agent, opening, source.problem(task), habits[name], 0)
            if _text(renderer, found) != _text(renderer, made):
                raise TrainError(
                    f"{name} was recorded as\n{_text(renderer, found)}\nand rendered as\n"
                    f"{_text(renderer, made)}"
                )
            rows.setdefault(i % len(PHASES), []).append(found)
        text.write_text(json.dumps({"before": opening.before, "after": opening.after}) + "\n")
        part = kept.with_suffix(".part.npz")
        write_recorded(part, Recorded(prefixes=(opening.prefix,), rows=rows))
        part.replace(kept)
    recorded = read_recorded(kept)
    return recorded, Opening(prefix=recorded.prefixes[0], **json.loads(text.read_text()))


def _demonstration(name: str, segments: Sequence[Segment], opening: Opening, task_id: str) -> Demonstration:
    if len(segments) != 1 or segments[0].kind != "demonstrated":
        raise TrainError(f"{name}: expected one demonstrated segment, got {len(segments)}")
    segment, cut = segments[0], len(opening.prefix)
    if not np.array_equal(segment.ids[:cut], opening.prefix):
        raise TrainError(f"{name}: the agent's constant prompt changed")
    return Demonstration(task_id=task_id, ids=segment.ids[cut:], mask=segment.mask[cut:])


def _text(renderer: ChatRenderer, made: Demonstration) -> tuple[str, str]:
    """Return the text and the demonstrated text, without what the agent makes up or measures."""
    text = VOLATILE.sub("Chunk", renderer.decode(made.ids))
    return text, renderer.decode(made.ids[made.mask])


def batches(
    renderer: ChatRenderer, recordings: Mapping[str, tuple[Recorded, Opening]]
) -> Iterator[DemonstrationBatch]:
    """Yield every batch of the training, each inside one agent."""
    source = ToySource(Limits(), seed=1000, kinds=(*sorted(FAMILIES), "comparison", "extreme"))
    rng, at = random.Random(0), 0
    # The demo's weights know Pi's tools: these two share one turn.
    known = [agent for agent in recordings if SPELLINGS[agent].command is None]
    others = [agent for agent in recordings if agent not in known]
    for index, phase in enumerate(PHASES):
        for step in range(phase.steps):
            turn, place = divmod(step, len(others) + 1)
            agent = others[place] if place < len(others) else known[turn % len(known)]
            recorded, opening = recordings[agent]
            rows = list(recorded.rows[index])
            kept = rng.sample(rows, min(RECORDED_ROWS, len(rows)))
            problems = [source.problem(t) for t in source.tasks("train", at, ROWS - len(kept))]
            at += len(problems)
            made = (rendered(renderer, agent, opening, p, phase.habits, 0) for p in problems)
            ids, mask = padded([*kept, *made])
            yield DemonstrationBatch(prefix=opening.prefix, rows=ids, mask=mask)


def _grown(folder: Path, renderer: ChatRenderer) -> Qwen3:
    """Return the demo's warm start with the vocabulary of `folder`; tokens that it lacks begin at random."""
    old_ids = Tokenizer.from_file(str(WARM_START / "tokenizer.json")).get_vocab()
    new_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    old = load_model(WARM_START)
    model = initialise(ModelConfig(vocab_size=renderer.vocab_size, max_position_embeddings=CONTEXT), 0)
    tensors = dict(old.state_dict())
    with torch.no_grad():
        rows = model.model.embed_tokens.weight.clone()
        for token, at in new_ids.items():
            if token in old_ids:
                rows[at] = old.model.embed_tokens.weight[old_ids[token]]
    tensors |= {name: rows for name in ("model.embed_tokens.weight", "lm_head.weight") if name in tensors}
    model.load_state_dict(tensors)
    return model


class _Training:
    """The supervised training in a folder; its state is stored every SAVED steps and goes on from there."""

    def __init__(self, folder: Path, renderer: ChatRenderer) -> None:
        self._state = folder / "training.pt"
        steps = sum(phase.steps for phase in PHASES)
        optim = OptimConfig(
            lr=3e-3,
            muon_lr=0.015,
            warmup_steps=min(20, steps // 4),
            decay="cosine",
            total_steps=steps,
            final=0.02,
        )
        self.model = _grown(folder, renderer)
        self.sft, self.steps = Sft(self.model, SftConfig(optim=optim)), steps
        if self._state.exists():
            state = torch.load(self._state, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.sft.optimiser.restore(state["optimiser"])
            self.sft.steps = state["step"]

    def save(self) -> None:
        part = self._state.with_suffix(".part")
        optimiser = self.sft.optimiser.tensors()
        state = {"step": self.sft.steps, "model": self.model.state_dict(), "optimiser": optimiser}
        torch.save(state, part)
        part.replace(self._state)

    def forget(self) -> None:
        """Remove the stored state."""
        self._state.unlink(missing_ok=True)

    def run(self, made: Iterator[DemonstrationBatch], note: Callable[[str], None], ends: float) -> None:
        """Train on the batches that were not trained on yet. Raises Late."""
        for step, batch in enumerate(made, 1):
            if step <= self.sft.steps:
                continue
            loss, accuracy = self.sft.step(batch.prefix, batch.rows, batch.mask)
            if step % SAVED == 0:
                self.save()
                note(f"supervised step {step} of {self.steps}: loss {loss:.4f}, accuracy {accuracy:.4f}")
            if time.monotonic() >= ends:
                raise Late


def make(folder: Path, agents: Sequence[str], note: Callable[[str], None], ends: float) -> Path:
    """Return the folder of the warm start for these agents; make what is missing of it.

    `ends` is a time of time.monotonic(). Raises Late, TrainError.
    """
    made, part = folder / "warm", folder / "warm-in-work"
    if made.exists():
        return made
    texts = [first_text(agent, folder) for agent in agents]
    write_renderer(part, "\n".join(texts))
    recordings = {agent: recording(agent, part, folder / "recorded") for agent in agents}
    note(f"{RECORDED} demonstrations through each of {', '.join(agents)} equal their renderings")
    torch.set_num_threads(1)
    renderer = load_renderer(part)
    training = _Training(part, renderer)
    training.run(batches(renderer, recordings), note, ends)
    save_model(training.model, part)
    training.forget()
    part.rename(made)
    return made
