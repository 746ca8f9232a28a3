"""The warm start: demonstrations recorded through the gateway and the real agent, then supervised training.

    probe the agents' constant prompts -> tokenizer -> record through Pi -> sft_job (child) -> gate -> folder

Everything is cached under a hash of what decides it: the prompts, the sources of this package's parts and
the job. `python -m whet.demo.warm` regenerates the folder that the repository carries.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from whet.collect.agents import limits_of, open_agents
from whet.config import WARM_START, Config, demo_preset, load_config
from whet.demo.policy import Habits, Step, plan_turns
from whet.demo.sft_data import Recorded, SftJob, write_job, write_recorded
from whet.demo.synth import Demonstration
from whet.demo.vocabulary import CONTROL, build_tokenizer
from whet.errors import TrainError, first_error
from whet.harness.base import ModelAccess
from whet.record.scratch import cache_folder
from whet.render.family import Family
from whet.render.load import load_family
from whet.tasks.toy import ToyProblem, ToySource
from whet.testing.scripted_engine import ScriptedEngine
from whet.types import IntArray, Message, RequestKey, Segment, Task
from whet.view.base import View
from whet.view.plain import PlainView

RECORDED = 320
"""Demonstrations recorded through Pi, half of them with each phase's habits."""
SOURCES = (
    *(f"demo/{name}" for name in ("policy.py", "synth.py", "sft_data.py", "sft_job.py", "vocabulary.py")),
    *("demo/chat_template.jinja", "tasks/toy.py", "engine/embedded_model.py"),
    *("train/sft/warm.py", "train/trainer/optim.py", "train/head/objective.py"),
)
"""Files of the package that decide a warm start's weights."""
SFT_DEADLINE_S = 5400.0


class Demonstrator:
    """The scripted policy as ScriptedEngine calls it: one script per rollout id."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._scripts: dict[str, list[Step]] = {}

    def assign(self, rollout_id: str, problem: ToyProblem, habits: Habits, seed: int) -> None:
        self._scripts[rollout_id] = list(plan_turns(problem, habits, seed))

    def __call__(self, prompt_ids: IntArray, key: RequestKey) -> Message:
        """The next turn whose condition holds; the script's last turn ends the run."""
        steps = self._scripts[key.rollout_id]
        heard = self._family.decode(prompt_ids[-120:]).rsplit("<tool_response>", 1)[-1]
        outcome = "accepted" if "Successfully replaced" in heard else "refused"
        while len(steps) > 1 and steps[0].after not in ("any", outcome):
            steps.pop(0)
        return steps.pop(0).message


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One demonstration to record."""

    rollout_id: str
    task: Task


async def _record(
    config: Config, family: Family, engine: ScriptedEngine, plays: Sequence[Play], view: View
) -> dict[str, tuple[Segment, ...]]:
    """Run every play once through the configured agent; rollout id -> its segments."""
    found: dict[str, tuple[Segment, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="whet-warm-") as scratch:
        async with open_agents(config, family, engine, Path(scratch)) as agents:

            async def one(play: Play) -> None:
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
                    )
                    try:
                        await worker.run(play.task, access)
                    finally:
                        trajectory = await session.seal(10.0)
                found[play.rollout_id] = trajectory.segments
                view.advance(len(found))

            try:
                async with asyncio.TaskGroup() as running:
                    for play in plays:
                        running.create_task(one(play))
            except BaseExceptionGroup as group:
                raise first_error(group) from group
    return found


def _with_agent(config: Config, agent: str, workers: int) -> Config:
    harness = config.harness.model_copy(update={"agent": agent, "workers": workers, "mode": "warm"})
    return config.model_copy(update={"harness": harness})


def sent_prompt(config: Config, agent: str, folder: Path, view: View) -> tuple[Family, Task, IntArray]:
    """The first prompt a real run of `agent` sends, in the tokens of `folder`'s family."""
    family = load_family(folder)
    engine = ScriptedEngine(family, lambda ids, key: Message(role="assistant", text="done"))
    # A tokenizer that does not know the prompt yet spells it in bytes: leave room for that.
    task = ToySource(replace(limits_of(config), max_context_tokens=65536)).tasks("train", 0, 1)[0]
    plays = [Play(rollout_id=f"probe/{agent}", task=task)]
    asyncio.run(_record(_with_agent(config, agent, 1), family, engine, plays, view))
    return family, task, engine.sent[0].ids


def constant_text(config: Config, agent: str, view: View) -> str:
    """An agent's constant prompt as rendered text, control markers included."""
    with tempfile.TemporaryDirectory(prefix="whet-probe-") as name:
        write_family(Path(name), "")
        family, _, ids = sent_prompt(config, agent, Path(name), view)
        return family.decode(ids).split("<|im_start|>user", 1)[0]


def constant_ids(config: Config, agent: str, folder: Path, view: View) -> IntArray:
    """An agent's constant prompt in the tokens of `folder`'s family."""
    family, task, ids = sent_prompt(config, agent, folder, view)
    user = family.append([Message(role="user", text=task.prompt)])
    tail = np.concatenate([user, family.generation_prompt()])
    if not np.array_equal(ids[-len(tail) :], tail):
        raise TrainError(f"agent {agent} does not send the task's prompt as its only user message")
    return ids[: -len(tail)]


def write_family(folder: Path, constant: str) -> None:
    """tokenizer.json and chat_template.jinja for the demo's family."""
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


def record(config: Config, folder: Path, job: SftJob, prefixes: Sequence[IntArray], view: View) -> Recorded:
    """At least RECORDED demonstrations through the real Pi, equal parts with each phase's habits."""
    family = load_family(folder)
    demonstrator = Demonstrator(family)
    engine = ScriptedEngine(family, demonstrator)
    source = ToySource(limits_of(config), seed=2000 + job.seed)
    plays, phase_of = [], {}
    for i, task in enumerate(source.tasks("train", 0, RECORDED)):
        phase = i % len(job.phases)
        play = Play(rollout_id=f"demonstration/{i:04d}", task=task)
        demonstrator.assign(play.rollout_id, source.problem(task), job.phases[phase].habits, job.seed)
        phase_of[play.rollout_id] = phase
        plays.append(play)
    view.stage("demonstrations through Pi", len(plays))
    found = asyncio.run(
        _record(_with_agent(config, "pi", config.harness.workers), family, engine, plays, view)
    )
    rows: dict[int, list[Demonstration]] = {}
    for play in plays:
        rows.setdefault(phase_of[play.rollout_id], []).append(
            _demonstration(play, found[play.rollout_id], prefixes[0])
        )
    return Recorded(prefixes=tuple(prefixes), rows=rows)


def _demonstration(play: Play, segments: Sequence[Segment], prefix: IntArray) -> Demonstration:
    if len(segments) != 1 or segments[0].kind != "demonstrated":
        raise TrainError(f"{play.rollout_id}: expected one demonstrated segment, got {len(segments)}")
    segment = segments[0]
    if not np.array_equal(segment.ids[: len(prefix)], prefix):
        raise TrainError(f"{play.rollout_id}: the agent's constant prompt changed")
    cut = len(prefix)
    return Demonstration(task_id=play.task.id, ids=segment.ids[cut:], mask=segment.mask[cut:])


def content_key(constants: Sequence[str], job: SftJob) -> str:
    """What a warm start depends on, hashed: prompts, the code that makes it, the job."""
    h = hashlib.sha256()
    parts = [*constants, json.dumps(asdict(job), sort_keys=True), str(RECORDED)]
    package = Path(__file__).parent.parent
    parts += [(package / name).read_text() for name in SOURCES]
    for part in parts:
        h.update(hashlib.sha256(part.encode()).digest())
    return h.hexdigest()


def make_warm_start(config: Config, view: View, job: SftJob | None = None) -> Path:
    """The folder of a warm start, from the cache when the same content was made before.
    Raises TrainError when the gate is missed, SetupError when an agent cannot run."""
    job = job or SftJob()
    view.stage("constant prompts of the agents")
    constants = [constant_text(config, agent, view) for agent in ("pi", "script")]
    folder = cache_folder() / "warm-start" / content_key(constants, job)[:24]
    if (folder / "model.safetensors").exists():
        view.note(f"warm start {folder.name} is in the cache")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        write_family(part, "\n".join(constants))
        prefixes = [constant_ids(config, agent, part, view) for agent in ("pi", "script")]
        write_job(job, part / "job.json")
        write_recorded(part / "recorded.npz", record(config, part, job, prefixes, view))
        _train(part, job, view)
    except TrainError as error:
        # Half an hour of work: keep it for whoever wants to know why.
        raise TrainError(f"{error} (kept in {part})") from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.rename(folder)
    return folder


def _train(folder: Path, job: SftJob, view: View) -> None:
    """Run demo.sft_job as a child process and pass its reports on."""
    view.stage("supervised warm start", job.steps)
    command = [sys.executable, "-m", "whet.demo.sft_job", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            for line in child.stdout or ():
                report = json.loads(line)
                if "step" in report:
                    view.advance(report["step"])
                if "gate" in report:
                    view.note(f"step {report['step']}: whole-edit accuracy by family {report['gate']}")
            error = child.stderr.read() if child.stderr else ""
            if child.wait(SFT_DEADLINE_S):
                last = error.strip().splitlines()[-1:] or [f"exit {child.returncode}"]
                raise TrainError(f"the warm start failed: {last[0]}")
        finally:
            if child.poll() is None:
                child.kill()


def main() -> None:
    """Make the warm start and put it where the package looks for it."""
    config = load_config(None, sys.argv[1:], demo_preset())
    view = PlainView(sys.stdout)
    view.begin("warm start", 0)
    folder = make_warm_start(config, view)
    shutil.rmtree(WARM_START, ignore_errors=True)
    shutil.copytree(folder, WARM_START)


if __name__ == "__main__":
    main()
