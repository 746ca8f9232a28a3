"""Warm start of the demo: recorded demonstrations of the real agent, then supervised fine-tuning.

    probe the agents' constant prompts -> tokenizer -> record through Pi -> sft_job (child) -> gate -> folder

Demonstrations and trained folder are cached under hashes of the prompts, the relevant source files and the
job. `python -m insitu_train.demo.make_warm_start` regenerates the folder in the repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from insitu.agents.base import ModelAccess
from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer
from insitu.concurrency import run_all
from insitu.config import WARM_START, Config, demo_preset, load_config
from insitu.errors import TrainError
from insitu.gateway.token_backend import TokenBackend
from insitu.progress.base import View
from insitu.progress.plain import PlainView
from insitu.runtime.agents import limits_of
from insitu.runtime.run import open_runtime
from insitu.shutdown import run_interruptible
from insitu.storage.temp_dirs import (
    cache_folder,
    part_folder,
    remove_stale_parts,
    remove_stale_scratch,
    scratch_folder,
)
from insitu.tasks.toy import ToyProblem, ToySource
from insitu.types import IntArray, Message, RequestKey, Segment, Task
from insitu_train.demo.demonstrator import Habits, Step, plan_turns
from insitu_train.demo.rendered_demonstrations import Demonstration
from insitu_train.demo.scripted import ScriptedEngine
from insitu_train.demo.sft_data import Recorded, SftJob, write_job, write_recorded
from insitu_train.demo.vocabulary import CONTROL, build_tokenizer
from insitu_train.learner.process import computing

RECORDED = 320
"""Number of demonstrations recorded through Pi, half of them with each phase's habits."""
RECORDING_SOURCES = (
    *(
        f"insitu_train/demo/{name}"
        for name in ("demonstrator.py", "rendered_demonstrations.py", "sft_data.py", "vocabulary.py")
    ),
    *("insitu_train/demo/chat_template.jinja", "insitu/tasks/toy.py"),
)
"""Files that affect the demonstrations."""
SOURCES = (
    *RECORDING_SOURCES,
    *("insitu_train/demo/sft_job.py", "insitu_train/embedded/model.py", "insitu_train/sft/trainer.py"),
    *("insitu_train/trainer/optimizer.py", "insitu_train/loss/fused_head.py"),
)
"""Files that affect a warm start's weights."""
SFT_SILENCE_S = 1800.0
"""Timeout of one report of the supervised training."""


class Demonstrator:
    """Scripted policy for ScriptedEngine: one script per rollout id."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._scripts: dict[str, list[Step]] = {}

    def assign(self, rollout_id: str, problem: ToyProblem, habits: Habits, seed: int) -> None:
        self._scripts[rollout_id] = list(plan_turns(problem, habits, seed))

    def __call__(self, prompt_ids: IntArray, key: RequestKey) -> Message:
        """Return the next turn whose condition holds; the script's last turn ends the run."""
        steps = self._scripts[key.rollout_id]
        result = self._renderer.decode(prompt_ids[-120:]).rsplit("<tool_response>", 1)[-1]
        outcome = "accepted" if "Successfully replaced" in result else "refused"
        while len(steps) > 1 and steps[0].after not in ("any", outcome):
            steps.pop(0)
        return steps.pop(0).message


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSpec:
    """One demonstration to record."""

    rollout_id: str
    task: Task


async def record_all(
    config: Config,
    renderer: ChatRenderer,
    engine: ScriptedEngine,
    plays: Sequence[DemonstrationSpec],
    view: View,
) -> dict[str, tuple[Segment, ...]]:
    """Run every demonstration through the configured agent; return segments by rollout id."""
    found: dict[str, tuple[Segment, ...]] = {}
    source = ToySource(limits_of(config))
    async with open_runtime(config, TokenBackend(engine, renderer), source) as agents:

        async def one(play: DemonstrationSpec) -> None:
            limits = play.task.limits
            async with agents.workers.lease() as worker:
                session = agents.gateway.open_session(
                    play.rollout_id,
                    seed=0,
                    limits=limits,
                    temperature=1.0,
                    max_call_tokens=limits.max_call_tokens,
                    listener=worker.gateway_socket,
                )
                access = ModelAccess(
                    public_id=session.public_id,
                    secret=session.secret,
                    max_call_tokens=limits.max_call_tokens,
                    # An agent's prompt may depend on its window, which is a run's, not that of a longer task.
                    max_context_tokens=config.model.max_context_tokens,
                )
                try:
                    await worker.run(play.task, access)
                finally:
                    trajectory = await session.seal(10.0)
            found[play.rollout_id] = trajectory.segments
            view.advance(len(found))

        await run_all(*(one(play) for play in plays))
    return found


def _with_agent(config: Config, agent: str, workers: int) -> Config:
    harness = config.harness.model_copy(update={"agent": agent, "workers": workers, "mode": "warm"})
    return config.model_copy(update={"harness": harness})


async def sent_prompt(
    config: Config, agent: str, folder: Path, view: View
) -> tuple[ChatRenderer, Task, IntArray]:
    """Return the first prompt of a real run of `agent`, in tokens of `folder`'s tokenizer."""
    renderer = load_renderer(folder)
    engine = ScriptedEngine(renderer, lambda ids, key: Message(role="assistant", text="done"))
    # A tokenizer without the prompt's lines falls back to bytes, which need more context.
    task = ToySource(limits_of(config).changed(max_context_tokens=65536)).tasks("train", 0, 1)[0]
    plays = [DemonstrationSpec(rollout_id=f"probe/{agent}", task=task)]
    await record_all(_with_agent(config, agent, 1), renderer, engine, plays, view)
    return renderer, task, engine.sent[0].ids


async def constant_text(config: Config, agent: str, view: View) -> str:
    """Return an agent's constant prompt as rendered text, including control markers."""
    with scratch_folder() as folder:
        write_renderer(folder, "")
        renderer, _, ids = await sent_prompt(config, agent, folder, view)
        return renderer.decode(ids).split("<|im_start|>user", 1)[0]


async def constant_ids(config: Config, agent: str, folder: Path, view: View) -> IntArray:
    """Return an agent's constant prompt in tokens of `folder`'s tokenizer."""
    renderer, task, ids = await sent_prompt(config, agent, folder, view)
    user = renderer.append([Message(role="user", text=task.prompt)])
    tail = np.concatenate([user, renderer.generation_prompt()])
    if not np.array_equal(ids[-len(tail) :], tail):
        raise TrainError(f"agent {agent} does not send the task's prompt as its only user message")
    return ids[: -len(tail)]


def write_renderer(folder: Path, constant: str) -> None:
    """Write tokenizer.json and chat_template.jinja of the demo model."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(constant).save(str(folder / "tokenizer.json"))
    shutil.copy(Path(__file__).parent / "chat_template.jinja", folder)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
    ends = [CONTROL.index(token) for token in ("<|im_end|>", "<|endoftext|>", "<|im_start|>")]
    generation = {"eos_token_id": ends, "pad_token_id": 0, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


async def record(
    config: Config, folder: Path, job: SftJob, prefixes: Sequence[IntArray], view: View
) -> Recorded:
    """Record at least RECORDED demonstrations through Pi, equally many with each phase's habits."""
    renderer = load_renderer(folder)
    demonstrator = Demonstrator(renderer)
    engine = ScriptedEngine(renderer, demonstrator)
    source = ToySource(limits_of(config), seed=2000 + job.seed)
    plays, phase_of = [], {}
    for i, task in enumerate(source.tasks("train", 0, RECORDED)):
        phase = i % len(job.phases)
        play = DemonstrationSpec(rollout_id=f"demonstration/{i:04d}", task=task)
        demonstrator.assign(play.rollout_id, source.problem(task), job.phases[phase].habits, job.seed)
        phase_of[play.rollout_id] = phase
        plays.append(play)
    view.stage("demonstrations through Pi", len(plays))
    pi = _with_agent(config, "pi", config.harness.workers)
    found = await record_all(pi, renderer, engine, plays, view)
    rows: dict[int, list[Demonstration]] = {}
    for play in plays:
        rows.setdefault(phase_of[play.rollout_id], []).append(
            _demonstration(play, found[play.rollout_id], prefixes[0])
        )
    return Recorded(prefixes=tuple(prefixes), rows=rows)


def _demonstration(play: DemonstrationSpec, segments: Sequence[Segment], prefix: IntArray) -> Demonstration:
    if len(segments) != 1 or segments[0].kind != "demonstrated":
        raise TrainError(f"{play.rollout_id}: expected one demonstrated segment, got {len(segments)}")
    segment = segments[0]
    if not np.array_equal(segment.ids[: len(prefix)], prefix):
        raise TrainError(f"{play.rollout_id}: the agent's constant prompt changed")
    cut = len(prefix)
    return Demonstration(task_id=play.task.id, ids=segment.ids[cut:], mask=segment.mask[cut:])


def recording_key(constants: Sequence[str], job: SftJob) -> str:
    """Return the cache key of the demonstrations: hash of prompts, source files, seed and habits."""
    habits = [asdict(phase.habits) for phase in job.phases]
    return _hashed([*constants, json.dumps([job.seed, habits]), str(RECORDED)], RECORDING_SOURCES)


def content_key(constants: Sequence[str], job: SftJob) -> str:
    """Return the cache key of a warm start: hash of prompts, source files and the job."""
    return _hashed([*constants, json.dumps(asdict(job), sort_keys=True), str(RECORDED)], SOURCES)


def _hashed(parts: Sequence[str], sources: Sequence[str]) -> str:
    h = hashlib.sha256()
    paths = (name.partition("/")[::2] for name in sources)
    for part in [*parts, *(files(package).joinpath(rest).read_text() for package, rest in paths)]:
        h.update(hashlib.sha256(part.encode()).digest())
    return h.hexdigest()[:24]


async def make_warm_start(config: Config, view: View) -> Path:
    """Return the folder of a warm start, from the cache if it exists.

    Raises TrainError when the gate fails, SetupError when an agent cannot run.
    """
    job = SftJob()
    view.stage("constant prompts of the agents")
    remove_stale_scratch()
    constants = [await constant_text(config, agent, view) for agent in ("pi", "script")]
    shelf = cache_folder() / "warm-start"
    folder = shelf / content_key(constants, job)
    if (folder / "model.safetensors").exists():
        view.note(f"warm start {folder.name} is in the cache")
        return folder
    shelf.mkdir(parents=True, exist_ok=True)
    remove_stale_parts(shelf)
    with part_folder(folder) as part:
        write_renderer(part, "\n".join(constants))
        write_job(job, part / "job.json")
        kept = shelf / f"recorded-{recording_key(constants, job)}.npz"
        if kept.exists():
            view.note(f"the demonstrations are in the cache ({kept.name})")
        else:
            prefixes = [await constant_ids(config, agent, part, view) for agent in ("pi", "script")]
            _keep(await record(config, part, job, prefixes, view), part / kept.name, kept)
        shutil.copy(kept, part / "recorded.npz")
        try:
            await _train(part, job, view)
        except TrainError as error:
            # Half an hour of work: keep it for whoever wants to know why.
            failed = folder.with_name(f"{folder.name}-failed")
            shutil.rmtree(failed, ignore_errors=True)
            part.rename(failed)
            raise TrainError(f"{error} (kept in {failed})") from error
        if not folder.exists():
            part.rename(folder)
    return folder


def _keep(recorded: Recorded, written: Path, kept: Path) -> None:
    """Write the recording atomically and durably."""
    write_recorded(written, recorded)
    with written.open("rb") as file:
        os.fsync(file.fileno())
    written.replace(kept)


async def _train(folder: Path, job: SftJob, view: View) -> None:
    """Run demo.sft_job as a child process and forward its reports to the view."""
    view.stage("supervised warm start", job.steps)
    command = [sys.executable, "-m", "insitu_train.demo.sft_job", str(folder), "--parent", str(os.getpid())]
    errors = folder / "errors"
    with errors.open("wb") as stderr:
        child = await asyncio.create_subprocess_exec(
            *command, env=computing(os.environ), stdout=asyncio.subprocess.PIPE, stderr=stderr
        )
    try:
        async for report in _reports(child):
            if "step" in report:
                view.advance(report["step"])
            if "gate" in report:
                view.note(f"step {report['step']}: whole-edit accuracy by category {report['gate']}")
        if await asyncio.wait_for(child.wait(), SFT_SILENCE_S):
            last = errors.read_text(errors="replace").strip().splitlines()[-1:]
            raise TrainError(f"the warm start failed: {(last or [f'exit {child.returncode}'])[0]}")
    except TimeoutError as error:
        raise TrainError(f"the warm start failed: no report for {SFT_SILENCE_S:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    errors.unlink()


async def _reports(child: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """Yield the child's JSON lines; raise TimeoutError when the next one takes too long."""
    while child.stdout and (line := await asyncio.wait_for(child.stdout.readline(), SFT_SILENCE_S)):
        yield json.loads(line)


def main() -> None:
    """Make the warm start and copy it into the package."""
    config = load_config(None, sys.argv[1:], demo_preset())
    view = PlainView(sys.stdout)
    view.begin("warm start", 0)
    folder = run_interruptible(make_warm_start(config, view))
    shutil.rmtree(WARM_START, ignore_errors=True)
    shutil.copytree(folder, WARM_START)


if __name__ == "__main__":
    main()
