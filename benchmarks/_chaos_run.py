"""One run that is killed and continued until it ends, and what it must not have lost. Caller: chaos.

A run is a directory and a process that works on it. `Run.life` starts the process, new or with --resume, and
sends SIGKILL; after each death the directory is read, with no process alive: the account of
rollouts and tokens must balance, and every rollout that is graded then must be found unchanged at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks._engine_process import EngineProcess
from insitu import failpoint
from insitu.errors import RecordError
from insitu.shutdown import descendants
from insitu.storage.run_dir import has_rollouts, read_store
from insitu.storage.store import Store
from insitu.types import Outcome

Victim = Literal["controller", "learner", "engine", "agent"]
LIFE_S = 900.0
"""Seconds after which a process that should have ended is a failure of the benchmark."""
GONE_S = 15.0
ABSENT_S = 2.0
"""Most seconds before whoever keeps a killed server starts it again."""
PLANNED = ("degenerate", "zero_advantage", "truncated", "overlong", "no_tokens")
"""Why a graded rollout may end untrained though nothing was lost: the planner's reasons. `few_groups` is
none: the benchmark's runs ask for one."""
AHEAD_OF_TRAINER = ("stale", "deadline")
"""The collector's reasons besides, in a run ahead of the trainer. `unused` is none: no group is drawn that
the run does not need, so one that is left over took the place of another."""


BEGUN = """SELECT COALESCE(SUM(MAX(s.attempt, (
  SELECT COALESCE(MAX(attempt), 0) FROM attempts a WHERE a.rollout_id = s.rollout_id))), 0) FROM states s"""
"""Attempts that were begun."""


class StuckError(RuntimeError):
    """A run that neither ended nor died when it should have."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One directory, through all its lives."""

    folder: Path
    config: Path
    overrides: Sequence[str]
    kills: Counter[str] = field(default_factory=Counter)
    """By victim; `failpoint` where a process killed itself at one."""
    points: list[str] = field(default_factory=list)
    """Failpoints that were passed and killed."""
    wrong: list[str] = field(default_factory=list)
    synchronous: bool = True
    engine: EngineProcess | None = None
    """The server that it samples with; None = the learner's own engine."""
    seen: dict[str, str] = field(default_factory=dict)
    """Rollout -> digest, of everything that was graded after some death."""

    # ------------------------------------------------------------------ lives

    def life(
        self, armed: Sequence[str] = (), kills: Sequence[Victim] = (), chance: random.Random | None = None
    ) -> bool:
        """Start the run, or continue it, and kill each of `kills` when some time has gone by. True when the
        run came to its end by itself."""
        env, once = self._arm(armed)
        if self.engine is not None:
            self.engine.answering()  # a run that is started beside no server ends at once
        log = self.folder.with_suffix(".log")
        with log.open("ab") as output:
            child = subprocess.Popen(self._command(), stdout=output, stderr=output, env=env)
            try:
                self._kill(child, kills, chance or random.Random(0))
                code = child.wait(LIFE_S)
            except subprocess.TimeoutExpired as error:
                raise StuckError(f"{self.folder} did not end; its words are in {log}") from error
            finally:
                self._bury(child)
        self._count(once)
        if code not in (0, -signal.SIGKILL):
            raise StuckError(f"{self.folder} ended with status {code}; its words are in {log}")
        self._look()
        return code == 0

    def _arm(self, armed: Collection[str]) -> tuple[dict[str, str], dict[str, Path]]:
        """The environment of a process in which they are, and the files that say that they were passed."""
        stem = self.folder.parent / self.folder.name
        # a failure may happen again in every life, a death once
        lives = {point: f".{len(self.points)}" if point in failpoint.FAILURES else "" for point in armed}
        once = {point: Path(f"{stem}.{point}{life}.fired") for point, life in lives.items()}
        value = ",".join(f"{point}:1:{once[point]}" for point in armed)
        return {**os.environ, failpoint.VARIABLE: value}, once

    def _count(self, once: Mapping[str, Path]) -> None:
        for point, file in once.items():
            if file.exists() and point not in self.points:
                self.points.append(point)
                self.kills["failpoint"] += point in failpoint.POINTS

    def regrade(self, armed: Sequence[str]) -> None:
        """Make a verdict of the ended run wrong and have it put right, dying at these points: one that was
        never trained on, since the others stay."""
        with Store(self.folder / "run.sqlite") as store:
            scored = [r for r in store.rollouts("eval_before", 0) if r.verdict is not None]
            if not scored or scored[0].verdict is None:
                raise StuckError(f"{self.folder}: no evaluation has a verdict")
            held = scored[0].verdict
            other = Outcome.UNRESOLVED if held.reward else Outcome.RESOLVED
            reward = 1.0 - (held.reward or 0.0)
            wrong = replace(held, outcome=other, reward=reward)
            store.put_reward(replace(scored[0], verdict=wrong, reward=reward))
        command = [sys.executable, "-m", "insitu", "grade", "--write", str(self.folder)]
        for point in armed:
            env, once = self._arm([point])
            with self.folder.with_suffix(".log").open("ab") as out:
                subprocess.run(command, stdout=out, stderr=out, env=env, timeout=LIFE_S, check=False)
            self._count(once)
            self._look()

    def _command(self) -> list[str]:
        insitu = [sys.executable, "-m", "insitu", "train", "--plain", "--json"]
        if self.folder.exists() and has_rollouts(self.folder):
            return [*insitu, "--resume", str(self.folder)]
        return [*insitu, str(self.config), f"run.dir={self.folder}", *self.overrides]

    def _kill(self, child: subprocess.Popen[bytes], kills: Sequence[Victim], chance: random.Random) -> None:
        """Each victim some time after the one before, counted from when rollouts are being made."""
        for victim in kills:
            self._wait_for_work(child, victim)
            end = time.monotonic() + chance.uniform(0.0, 2.5)
            while time.monotonic() < end and child.poll() is None:
                time.sleep(0.02)
            if child.poll() is not None:
                return
            if victim == "engine" and self.engine is not None:
                self.engine.kill()
                time.sleep(chance.uniform(0.0, ABSENT_S))
                self.engine.start()
                self.kills[victim] += 1
                continue
            pid = pick(child.pid, victim, chance)
            if pid is None:
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.kills[victim] += 1
            if victim == "controller":
                return

    def _wait_for_work(self, child: subprocess.Popen[bytes], victim: Victim) -> None:
        """Until the learner is there and something new was written; for an engine, also something in
        sandboxes, which are opened when it has its weights."""
        needed: Sequence[Victim] = ("learner", "agent") if victim == "engine" else ("learner",)
        before, end = self._written(), time.monotonic() + LIFE_S
        while child.poll() is None and time.monotonic() < end:
            there = all(pick(child.pid, one, random.Random(0)) is not None for one in needed)
            if there and self._written() != before:
                return
            time.sleep(0.05)

    def _written(self) -> tuple[int, float]:
        log = self.folder / "run.sqlite-wal"
        try:
            found = log.stat()
        except OSError:
            return 0, 0.0
        return found.st_size, found.st_mtime

    def _bury(self, child: subprocess.Popen[bytes]) -> None:
        """End it if it lives, and see that nothing of it outlives it."""
        renderer = descendants(child.pid)
        if child.poll() is None:
            child.kill()
            child.wait(GONE_S)
        end = time.monotonic() + GONE_S
        while (left := [pid for pid in renderer if _runs(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        if left:
            self.wrong.append(f"{self.folder.name}: processes {left} outlived their controller")

    # ------------------------------------------------------------------ what is on disk

    def _look(self) -> None:
        """With no process alive: does the account balance, and what is graded?"""
        if not has_rollouts(self.folder):
            return
        with read_store(self.folder) as store:
            try:
                store.check_balance()
            except RecordError as error:
                self.wrong.append(f"{self.folder.name}: {error}")
            for name in _graded(store):
                self.seen.setdefault(name, digest(store, name))

    def lost(self) -> list[str]:
        """Rollouts that were graded at some time and are not there unchanged, or have no fate, at the end:
        trained, or discarded for one of the reasons above."""
        found, reasons = list[str](), PLANNED if self.synchronous else (*PLANNED, *AHEAD_OF_TRAINER)
        with read_store(self.folder) as store:
            for name, held in self.seen.items():
                state = store.state(name)
                fate = state is not None and (
                    state.state == "trained" or (state.state == "discarded" and state.reason in reasons)
                )
                if not fate or digest(store, name) != held:
                    found.append(name)
        return found

    def trained_twice(self) -> int:
        """Rollouts that more than one committed step has taken, or one step twice."""
        with read_store(self.folder) as store:
            taken = Counter(r.id for step in store.steps() for r in store.step_rollouts(step.step))
        return sum(count > 1 for count in taken.values())

    def balanced(self) -> bool:
        """At the end no fate is open, and all is accounted for."""
        with read_store(self.folder) as store:
            with closing(sqlite3.connect(self.folder / "run.sqlite")) as db:
                begun = db.execute(BEGUN).fetchone()[0]
            if lost := begun - sum(store.attempts_by_end().values()):
                self.wrong.append(f"{self.folder.name}: {lost} attempts were begun and have no end")
                return False
            try:
                store.ledger()
            except RecordError as error:
                self.wrong.append(f"{self.folder.name}: {error}")
                return False
            left = store.open_rollouts()
        if left:
            self.wrong.append(f"{self.folder.name}: {left[0].rollout_id} is {left[0].state} at the end")
        return not left and not any("does not balance" in line for line in self.wrong)

    def bits(self) -> Mapping[str, Any]:
        """What must be equal in two runs that are equal: plans, weights and every rollout."""
        with read_store(self.folder) as store:
            steps = [(s.step, s.plan_hash, s.metrics["weights"], s.ledger) for s in store.steps()]
            made = {
                r.id: digest(store, r.id)
                for phase, step in store.phases()
                for r in store.rollouts(phase, step)
            }
        return {"steps": steps, "rollouts": made}

    def differing(self) -> int:
        """Steps whose weights are not those that training what their account holds, once, gives."""
        command = [sys.executable, "-m", "insitu", "replay", "--plain", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIFE_S, check=False)
        if done.returncode:
            self.wrong.append(f"{self.folder.name}: {done.stderr.strip()[-300:]}")
        said = done.stdout.splitlines()
        return len(json.loads(said[-1])["differing_steps"]) if said else 1


def pick(controller: int, victim: Victim, chance: random.Random) -> int | None:
    """A process of this kind; None when there is none just now. An `agent` is anything in a sandbox."""
    if victim == "controller":
        return controller
    found: dict[bool, list[int]] = {True: [], False: []}
    for pid in descendants(controller):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if command:
            found[b"insitu_train.learner.main" in command].append(pid)
    among = found[victim == "learner"]
    return chance.choice(among) if among else None


def digest(store: Store, rollout_id: str) -> str:
    """Of what was sampled and what it was worth; the number of the try and the times are not in it."""
    try:
        rollout = store.rollout(rollout_id)
    except RecordError:
        return ""
    held = hashlib.sha256(f"{rollout.id} {rollout.task_id} {rollout.status} {rollout.reward}".encode())
    for turn in rollout.trajectory.turns:
        held.update(turn.context_ids.tobytes() + turn.ids.tobytes() + str(turn.version_runs).encode())
        held.update(b"" if turn.logprobs is None else turn.logprobs.tobytes())
    for path, entry in sorted(rollout.changed.items()):
        held.update(path.encode() + bytes(entry.content))
    return held.hexdigest()


def _graded(store: Store) -> Sequence[str]:
    """What reached a verdict, in the training phase."""
    held = [s.rollout_id for s in store.unused_graded()]
    return held + [
        r.id for step in store.steps() for r in store.step_rollouts(step.step) if r.reward is not None
    ]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
