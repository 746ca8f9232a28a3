"""A whole run with ranks of two hosts, namespaces with addresses, process tables and files of their own: a
slow host, a killed one, a pulled cable, a killed learner, a frozen host and Ctrl-C, one after the other."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from benchmarks._chaos_run import Run
from insitu.errors import SetupError
from insitu.storage.run_dir import read_store
from insitu_train.channel.host_link import SECRET
from sources import SOURCES
from tests.fakes.net_hosts import SHORT_RUN, NetHost, net_hosts, until

pytestmark = pytest.mark.full

AT = "10.77.0.1:29400"
STEPS = 100_000
"""More than any machine trains until the test ends it: a quick one did 65 while host two had to wait."""
BOTH = "train.ranks: 2 ranks, 1 here, 1 of two (10.77.0.2)"
ALONE = "train.ranks: 1 ranks, 1 here"
SILENCE = "host two is lost: nothing was heard for 15 s"
TABLES = """
ranks = "1+1@10.77.0.1:29400"
threads = 1
step_timeout_s = 60
restarts = 3
"""


@pytest.fixture
def hosts() -> Iterator[tuple[NetHost, NetHost]]:
    with ExitStack() as stack:
        try:
            one, two = stack.enter_context(net_hosts("one", "two"))
        except SetupError as error:
            pytest.skip(f"no hosts here: {error}")
        yield one, two


class Watched:
    """A run in a folder, from outside."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log

    def steps(self) -> int:
        """Steps that are committed."""
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return sum(json.loads(line)["event"] == "step" for line in lines if line.endswith("}"))

    def said(self, line: str) -> int:
        return self.log.read_text(errors="replace").count(line)

    def after_steps(self, more: int = 1) -> None:
        wanted = self.steps() + more
        until(lambda: self.steps() >= wanted, f"no step {wanted}: {self.log.read_text()[-3000:]}", 300.0)

    def says(self, line: str, times: int) -> None:
        until(
            lambda: self.said(line) >= times,
            f"not said {times} times: {line}",
            200.0,
        )


def test_a_run_over_two_hosts_survives_what_happens_to_one(
    hosts: tuple[NetHost, NetHost], tmp_path: Path
) -> None:
    one, two = hosts
    work = tmp_path / "learner"
    work.mkdir()
    config = work / "mine.toml"
    config.write_text(SHORT_RUN.replace("steps = 3", f"steps = {STEPS}\ncheckpoint_every_steps = 2") + TABLES)
    # Host two sees nothing of the learner's folder.
    two.run("mount", "-t", "tmpfs", "none", str(work))
    variables = {**os.environ, SECRET: "a secret", "PYTHONPATH": SOURCES}
    run = Watched(work / "run", tmp_path / "run.log")
    insitu = [sys.executable, "-m", "insitu"]
    ranks = [*insitu, "ranks", AT]
    log = tmp_path / "ranks.log"
    with ExitStack() as stack:
        agent = stack.enter_context(two.started(*ranks, log=log, env=variables))
        words = ["train", str(config), f"run.dir={run.folder}", "--plain"]
        training = stack.enter_context(one.started(*insitu, *words, log=run.log, env=variables, cwd=work))
        run.after_steps()
        assert run.said(BOTH) == 1

        two.slow(5)
        run.after_steps()
        assert run.said("is lost") == 0, "a slow host is no lost one"

        two.signal(signal.SIGKILL)
        agent.wait(30)
        stack.enter_context(two.started(*ranks, log=log, env=variables))
        run.says("restarting it", 1)
        run.says(BOTH, 2)
        run.after_steps(2)

        two.cable(up=False)
        run.says(SILENCE, 1)
        run.says(ALONE, 1)
        run.after_steps()
        two.cable(up=True)
        run.says(BOTH, 3)  # lost twice, it takes part after a minute, at a checkpoint

        (learner,) = one.processes(b"insitu_train.learner.main")
        os.kill(learner, signal.SIGKILL)
        run.says(BOTH, 4)
        run.after_steps()

        two.signal(signal.SIGSTOP)
        run.says(SILENCE, 2)
        run.says(ALONE, 2)
        two.signal(signal.SIGCONT)
        run.after_steps()
        (controller,) = (pid for pid in one.processes(b"insitu\0train") if pid != training.pid)
        os.kill(controller, signal.SIGINT)
        assert training.wait(120) == 130, run.log.read_text()[-3000:]
        steps = run.steps() + 2
        again = [*insitu, "train", "--resume", str(run.folder), f"run.steps={steps}", "--plain"]
        one.run(*again, env=variables, cwd=work)
    print(run.log.read_text())
    print(log.read_text())
    assert log.read_text().rstrip().endswith("the run ended")
    nothing_is_lost_or_twice(run.folder, steps)


def nothing_is_lost_or_twice(folder: Path, steps: int) -> None:
    seen = Run(folder=folder, config=folder, overrides=())
    assert seen.balanced(), seen.wrong
    assert not seen.trained_twice()
    with read_store(folder) as store:
        assert [step.step for step in store.steps()] == list(range(1, steps + 1))
    with closing(sqlite3.connect(folder / "run.sqlite")) as db:
        groups = db.execute(
            "SELECT step, group_no, COUNT(*), COUNT(DISTINCT slot) FROM rollouts WHERE phase = 'train'"
            " GROUP BY step, group_no"
        ).fetchall()
        graded = db.execute(
            "SELECT COUNT(*), COUNT(DISTINCT rollout_id) FROM verdicts JOIN rollouts USING (rollout_id)"
            " WHERE phase = 'train'"
        ).fetchone()
        most = "SELECT MAX(attempt) FROM rollouts WHERE step <= ?"
        assert db.execute(most, (steps - 2,)).fetchone() == (1,), "none was repeated but those of Ctrl-C"
    assert len(groups) == 2 * steps
    assert all(row[2:] == (4, 4) for row in groups)
    assert graded == (8 * steps, 8 * steps)
    kept = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in kept if row["event"] == "step"] == list(range(1, steps + 1))
