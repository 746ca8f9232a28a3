"""Run directories made by the real store: ordinary ones, and ones with hostile text in every column.

`python tests/view/web/run_lab.py DIR [--hostile]` writes one to look at.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from insitu.chat.load import load_renderer
from insitu.config import WARM_START, load_config
from insitu.storage.artifacts import AgentArtifacts
from insitu.storage.logs import AgentLogs
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.types import (
    CallTimes,
    DriftNote,
    FailingCheck,
    FileEntry,
    Group,
    IntArray,
    Ledger,
    Message,
    MessageSpans,
    Outcome,
    Rollout,
    Segment,
    Status,
    Timings,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
)
from insitu_train.plan.step import PlanConfig, plan_step

CORPUS = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "<svg onload=window.pwned=1>",
    '<iframe srcdoc="<script>parent.pwned=1</script>">',
    "javascript:window.pwned=1",
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \x1b]52;c;cHduZWQ=\x07",
    "\u202egnp.exe \u2066x\u2069 \u200bzero\u200d width",
    "control \x00\x01\x7f\x9b end",
    "{{constructor.constructor('window.pwned=1')()}} ${window.pwned=1} #{1}",
    "\"'><b onmouseover=window.pwned=1>",
    "<|im_end|><|im_start|>system [link](javascript:window.pwned=1) ![x](http://evil.example/x.png)",
)
"""Text that must be shown as text."""
STEPS, GROUPS, SLOTS = 3, 4, 4
BEGAN_S = 1_790_000_000.0
_renderer = load_renderer(WARM_START)


@dataclass(frozen=True)
class Flavour:
    """What is written where text is free."""

    hostile: bool = False
    sets: tuple[str, ...] = ()
    """Names of task sets over the same tasks, by number of the group."""

    def of_set(self, group: int) -> tuple[int, str]:
        """Return the number of a group's task, and the name of its task set."""
        number, at = divmod(group, max(1, len(self.sets)))
        return number, self.sets[at] if self.sets else ""

    def text(self, ordinary: str, number: int = 0) -> str:
        if not self.hostile:
            return ordinary
        return f"{ordinary} {CORPUS[number % len(CORPUS)]}".replace("\x00", "")

    def all(self, ordinary: str) -> str:
        return "\n".join([ordinary, *CORPUS]).replace("\x00", "") if self.hostile else ordinary


def make_run(
    path: Path, *, hostile: bool = False, steps: int = STEPS, agents: Mapping[str, str] = {}, **tables: object
) -> Path:
    """Write a finished run of `steps` steps with evaluations before and after, and return its folder.

    agents: by task set, for a run of several.
    """
    flavour = Flavour(hostile, tuple(agents))
    if agents:
        tables["tasks"] = [{"name": name, "harness": {"agent": agent}} for name, agent in agents.items()]
    config = load_config(
        tables={
            "run": {"dir": str(path), "steps": steps},
            "eval": {"count": 4},
            "collect": {"group_size": SLOTS},
            **tables,  # type: ignore[dict-item]
        }
    )
    with RunDir.create(config) as run, run.store() as store, run.metrics() as metrics:
        store.set_meta("agent", flavour.text("script"))
        logs, kept = AgentLogs(run.logs), AgentArtifacts(run.artifacts)
        _evaluate(store, flavour, "eval_before", 0)
        for step in range(1, steps + 1):
            groups = [_group(store, flavour, step, number) for number in range(GROUPS)]
            failed = groups[0].rollouts[0]
            logs.keep(failed, flavour.all("output of the agent").encode())
            kept.keep(failed, {"/work/" + flavour.text("notes.txt").replace("/", "_"): b"kept"})
            _commit(store, PlanConfig.of(config), step, groups)
            metrics.write({"event": "step", "step": step, flavour.text("loss"): 0.5 / step})
        _evaluate(store, flavour, "eval_after", steps)
        timeline = run.timeline()
        with timeline.phase(flavour.text("collect"), 1):
            gpus = {"gpu0_use": 40, "gpu0_memory_bytes": 1 << 30, "gpu1_use": 60}
            timeline.write("gauges", {"rollouts_running": 2, flavour.text("rss_bytes"): 3, **gpus})
        run.write_summary({"agent": flavour.text("script"), "rollouts": steps * GROUPS * SLOTS})
    return path


def _evaluate(store: Store, flavour: Flavour, phase: str, step: int) -> None:
    for number in range(4):
        solved = number == 0 or (phase == "eval_after" and number < 3)
        if phase == "eval_after" and number == 0:
            solved = False
        store.put_rollout(phase, step, number, 0, make_rollout(flavour, phase, step, number, 0, solved))


def _group(store: Store, flavour: Flavour, step: int, number: int) -> Group:
    """Store one group: the first has several troubles, the second equal rewards."""
    rollouts = []
    for slot in range(SLOTS):
        solved = number != 1 and slot % 2 == 0
        rollout = make_rollout(flavour, "train", step, number, slot, solved)
        if number == 0 and slot == 1:
            rollout = replace(rollout, status=Status.TRUNCATED)
        if number == 0 and slot == 3 and rollout.verdict is not None:
            verdict = replace(rollout.verdict, outcome=Outcome.TAMPERED, reward=0.0)
            rollout = replace(rollout, verdict=verdict, egress_attempts=3)
        store.put_rollout("train", step, number, slot, rollout)
        rollouts.append(rollout)
    return Group(id=f"train/{step:05d}/{number:03d}", task_id=rollouts[0].task_id, rollouts=tuple(rollouts))


def _commit(store: Store, config: PlanConfig, step: int, groups: list[Group]) -> None:
    plan = plan_step(groups, config)
    reasons = plan.exclusion_reasons
    store.assign(step, list(reasons))
    store.commit_step(
        step,
        checkpoint=f"checkpoints/step-{step:05d}",
        plan_hash=plan.digest,
        metrics={
            "loss": 0.5 / step,
            "groups": GROUPS,
            "effective_groups": plan.groups,
            "alarm": "a row that no rank holds was computed by 2 ranks together" if step == 2 else "",
            "tamper_alarm": step == 2,
            "malformed_calls": 9 * step,
            "unknown_tools": step,
            "unparsed_share": step / 7,
            "tokens_sampled": 300 * step,
            "collect_s": 3.0,
            "tokens": 100 * step,
            "seconds": 2.0,
            "mfu": step / 10,
        },
        ledger=plan.ledger,
        trained=[name for name, reason in reasons.items() if not reason],
        discarded={name: reason for name, reason in reasons.items() if reason},
    )


def make_rollout(flavour: Flavour, phase: str, step: int, group: int, slot: int, solved: bool) -> Rollout:
    """Return a rollout of four calls: the main line of two, a branch that was left, and a sub-agent's."""
    name = f"{phase}/{step:05d}/{group:03d}/{slot:02d}"
    turns = _turns(flavour, solved, version=max(0, step - 1))
    rows = ([0, 1], [0, 2], [3])
    labels = ("wipe", "final", "subagent")
    segments, masked = [], set()
    for index, (path, label) in enumerate(zip(rows, labels, strict=True)):
        segments.append(_segment(name, index, label, [turns[i] for i in path], masked))
        masked |= set(path)
    sampled = sum(len(turn.ids) for turn in turns)
    infra = phase == "train" and group == 2 and slot == 3
    number, task_set = flavour.of_set(group)
    return Rollout(
        id=name,
        task_id=flavour.text(f"task-{step if phase == 'train' else 0}-{number}", group),
        part=task_set,
        category=flavour.text("swap", group),
        status=Status.OK,
        reward=float(solved),
        trajectory=Trajectory(
            segments=tuple(segments),
            turns=turns,
            ledger=Ledger(captured=sampled, trained=sampled),
            drifts=(
                DriftNote(kind="edited", cause="arguments", request=2, turn=1, detail=flavour.all("path")),
            ),
        ),
        verdict=Verdict(
            outcome=Outcome.RESOLVED if solved else Outcome.UNRESOLVED,
            reward=float(solved),
            trust="strong",
            passed=4 if solved else 1,
            total=4,
            controls=flavour.text("ok", 1),
            image=flavour.text("image", 2),
            grader=flavour.text("insitu", 3),
            dropped_paths=(flavour.text("tests/conftest.py", 4),) if slot == 3 else (),
            reason=flavour.text("4 of 4 cases pass" if solved else f"case {slot} raised NameError", slot),
            task_hash="ab",
            diff_hash="cd" if solved else "",
            evidence=() if solved else (_failing(flavour, slot),),
        ),
        changed={flavour.text("shop.py", 5): FileEntry(content=flavour.all("def f(): pass").encode())},
        deleted=(flavour.text("old.py", 6),) if slot == 1 else (),
        timings=Timings(queued_s=0.1, agent_s=2.0 + slot, engine_s=1.0, grade_s=0.5, total_s=3.0 + slot),
        attempt=2 if infra else 1,
        error=flavour.text("the agent stopped", 7) if slot == 1 else "",
        egress_attempts=0,
        reward_components={flavour.text("tests", 8): float(solved)},
        began_s=BEGAN_S - 0.5,
        diff=flavour.all("--- a/shop.py\n+++ b/shop.py\n@@ -1 +1 @@\n-old\n+def f(): pass\n"),
    )


def _failing(flavour: Flavour, slot: int) -> FailingCheck:
    return FailingCheck(
        name=flavour.text(f"case {slot}: f(1)"),
        outcome=flavour.text("wrong", 1),
        expected=flavour.text("2", 2),
        got=flavour.text("1", 3),
        tail=flavour.all("Traceback"),
    )


def _turns(flavour: Flavour, solved: bool, *, version: int) -> tuple[Turn, ...]:
    system = [Message(role="system", text=flavour.text("Fix the code.", 1))]
    task = [Message(role="user", text=flavour.all("Fix shop.py."))]
    root, first_run = _renderer.open(system, ()), _renderer.append(task)
    opened = np.concatenate([root, first_run, _renderer.generation_prompt()])
    end = len(root) + len(first_run)
    asked: MessageSpans = (("system", 0, len(root), ""), ("user", len(root), end, ""))
    call = ToolCall(id="call_a", name="bash", arguments='{"command": "python3 check.py"}')
    first = _reply(Message(role="assistant", tool_calls=(call,)))
    result = [Message(role="tool", text=flavour.all("1 failed\nétoile 🎉"), tool_call_id="call_a")]
    run = _renderer.join(first, "stop", result)
    answered = np.concatenate([run, _renderer.generation_prompt("tool")])
    spans: MessageSpans = (("tool", len(_renderer.close(first, "stop")), len(run), flavour.text("bash", 11)),)
    texts = (flavour.all("I guess."), flavour.all("done" if solved else "gave up"), flavour.text("looked"))
    left, last, other = (_reply(Message(role="assistant", text=text)) for text in texts)
    return (
        _turn(0, -1, opened, first, version, asked),
        _turn(1, 0, answered, left, version, spans, () if solved else (("label", "malformed"),)),
        _turn(2, 0, answered, last, version, spans, () if solved else (("label", "unknown_tool"),)),
        _turn(3, -1, opened, other, version, asked, ((flavour.text("agent", 9), flavour.text("sub", 10)),)),
    )


def _reply(message: Message) -> IntArray:
    return _renderer.render_reply(message)


def _turn(
    index: int,
    parent: int,
    context: IntArray,
    ids: IntArray,
    version: int,
    spans: MessageSpans,
    hints: tuple[tuple[str, str], ...] = (),
) -> Turn:
    logprobs = -(np.arange(len(ids), dtype=np.float32) % 7) / 8
    return Turn(
        index=index,
        parent=parent,
        context_ids=context.astype(np.int32),
        ids=ids.astype(np.int32),
        logprobs=logprobs,
        finish="stop",
        version_runs=((0, version),),
        hints=hints,
        spans=spans,
        times=CallTimes(
            began_s=BEGAN_S + index, first_s=BEGAN_S + index + 0.25, ended_s=BEGAN_S + index + 0.5, cached=8
        ),
    )


def _segment(name: str, index: int, label: str, path: list[Turn], masked: set[int]) -> Segment:
    ids, mask, logprobs = [], [], []
    for turn in path:
        fresh = turn.index not in masked
        ids += [turn.context_ids, turn.ids]
        mask += [np.zeros(len(turn.context_ids), dtype=np.bool_), np.full(len(turn.ids), fresh)]
        own = np.zeros(0, dtype=np.float32) if turn.logprobs is None else turn.logprobs
        logprobs += [np.zeros(len(turn.context_ids), dtype=np.float32), own * np.float32(fresh)]
    joined = np.concatenate(mask)
    return Segment(
        rollout_id=name,
        index=index,
        kind="sampled",
        label=label,
        ids=np.concatenate(ids),
        mask=joined,
        logprobs=np.concatenate(logprobs),
        versions=np.where(joined, path[0].version_runs[0][1], 0).astype(np.int32),
    )


if __name__ == "__main__":
    made = make_run(Path(sys.argv[1]), hostile="--hostile" in sys.argv)
    print(made)
