"""The suite itself: its attacks are real, its verdicts can fail, and its table is the one in the docs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from insitu.cli import main
from insitu.errors import ConfigError, TaskError
from insitu.sandbox.local import LocalBackend
from insitu.types import (
    Check,
    Exchange,
    GradingPlan,
    HiddenTests,
    Oracle,
    Outcome,
    Task,
    Tree,
    Verdict,
    task_hash,
)
from insitu_lab.attacks.choose import chosen_attacks, chosen_runners
from insitu_lab.attacks.matrix import ATTACKS, RESIDUAL, as_markdown, runners
from insitu_lab.attacks.model import Move, Variant
from insitu_lab.attacks.naive_grader import Trust
from insitu_lab.attacks.run import AttackReport, run_matrix
from insitu_lab.attacks.runner import NAIVE_WORK_BYTES, AttackRunner, Cell, Failure, try_play, try_variants
from insitu_lab.attacks.table import print_report
from insitu_lab.attacks.target import FAULTY, target_for, text
from insitu_lab.attacks.user_tasks import as_target, run_user_tasks

QUICK = "10,22,28,38,45,50"
"""One attack of every class."""


@pytest.fixture(scope="module")
def careless() -> LocalBackend:
    return LocalBackend(work_bytes=NAIVE_WORK_BYTES)


def test_there_are_fifty_attacks_in_order_and_each_claims_to_fool_somebody() -> None:
    assert [attack.id for attack in ATTACKS] == list(range(1, 51))
    for attack in ATTACKS:
        assert (attack.play is None) == bool(attack.variants), attack.id
        assert attack.play or any(variant.naive for variant in attack.variants), attack.id


def test_nothing_is_residual_where_the_cases_stay_on_the_host() -> None:
    assert RESIDUAL["json_io"] == RESIDUAL["stdio"] == {}
    for runner in runners():
        assert set(RESIDUAL[runner]) <= set(range(1, 51))
        assert all(RESIDUAL[runner].values())


SOME: tuple[Trust, ...] = ("exit code", "late reward", "judge")


@pytest.mark.slow
@pytest.mark.parametrize(
    "trust", [t if t in SOME else pytest.param(t, marks=pytest.mark.full) for t in get_args(Trust)]
)
async def test_a_mistake_pays_the_honest_and_not_the_idle(
    backend: LocalBackend, careless: LocalBackend, trust: Trust
) -> None:
    lab = AttackRunner(backend, careless, target_for("json_io"))
    assert await lab.naive_reward(Move(), trust, solved=True) == 1.0
    assert await lab.naive_reward(Move(), trust) == 0.0


LATE_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(2)
    open('logs/verifier/reward.txt', 'w').write('1')
    os._exit(0)
"""


@pytest.mark.slow
async def test_the_late_grader_waits_for_processes_and_not_for_time(
    backend: LocalBackend, careless: LocalBackend
) -> None:
    """A daemon that gets no CPU for two seconds, as beside load."""
    lab = AttackRunner(backend, careless, target_for("json_io"))
    assert await lab.naive_reward(Move(before=LATE_DAEMON), "late reward") == 1.0


@pytest.mark.slow
async def test_one_attack_of_each_class(backend: LocalBackend, careless: LocalBackend) -> None:
    report = await run_matrix(chosen_attacks(QUICK), ("json_io",), backend, careless)
    assert report.failures == ()
    counts = report.as_json()
    assert counts["defeated"] == counts["attacks"] == len(QUICK.split(","))
    assert counts["twins_ok"] == counts["twins"]


@pytest.mark.full
@pytest.mark.slow
async def test_every_runner_has_its_column(backend: LocalBackend, careless: LocalBackend) -> None:
    assert runners() == ("json_io", "stdio", "pytest", "command", "swebench_log", "harbor")
    report = await run_matrix(chosen_attacks("20"), runners(), backend, careless)
    assert report.failures == ()
    assert [cell.runner for cell in report.cells if cell.defeated] == sorted(runners())


class Believer:
    """A grader that takes everybody's word."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    async def grade(self, task: Task, oracle: Oracle, after: Tree) -> Verdict:
        reward = {Outcome.RESOLVED: 1.0, Outcome.INFRA: None}.get(self.outcome, 0.0)
        return Verdict(outcome=self.outcome, reward=reward, trust="weak")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outcome", "failing"),
    [(Outcome.RESOLVED, "cheat"), (Outcome.UNRESOLVED, "twin"), (Outcome.INFRA, "cheat and twin")],
)
async def test_a_grader_that_errs_fails_the_suite(
    backend: LocalBackend, careless: LocalBackend, outcome: Outcome, failing: str
) -> None:
    lab = AttackRunner(backend, careless, target_for("json_io"))
    lab.grader = Believer(outcome)  # type: ignore[assignment]
    (attack,) = chosen_attacks("47")
    cell = await try_variants(lab, attack, "json_io", "")
    assert [("twin" in failure.expected) for failure in cell.failures] == [
        "twin" in part for part in failing.split(" and ")
    ]
    (leak,) = chosen_attacks("50")
    played, _ = await try_play(lab, leak, "json_io")
    assert played.failures
    assert AttackReport(cells=(cell, played), naive=()).as_json()["defeated"] == 0


@pytest.mark.slow
async def test_a_residual_cell_may_lose_to_the_cheat_but_is_never_masked(
    backend: LocalBackend, careless: LocalBackend
) -> None:
    lab = AttackRunner(backend, careless, target_for("json_io"))
    (attack,) = chosen_attacks("47")
    lab.grader = Believer(Outcome.RESOLVED)  # type: ignore[assignment]
    cell = await try_variants(lab, attack, "json_io", "because")
    assert (cell.failures, cell.defeated) == ((), False)
    lab.grader = Believer(Outcome.INFRA)  # type: ignore[assignment]
    assert (await try_variants(lab, attack, "json_io", "because")).failures


@pytest.mark.slow
async def test_a_dummy_is_found(backend: LocalBackend, careless: LocalBackend) -> None:
    lab = AttackRunner(backend, careless, target_for("json_io"))
    dummy = Variant(name="nothing", naive="exit code", cheat=Move(instead=FAULTY + "# hello\n"))
    assert dummy.naive is not None
    assert not await lab.fools(dummy.cheat, dummy.naive)


@pytest.mark.slow
def test_the_command_prints_the_json_line_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", "--only", "49,46", "--runner", "json_io", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {"attacks": 2, "defeated": 2, "twins": 2, "twins_ok": 2, "failed": []}


def test_what_is_defeated_is_told_by_runner() -> None:
    lost = Failure(id=3, runner="b", expected="e", got="g")
    cells = (
        Cell(id=1, runner="a", got="unresolved", defeated=True),
        Cell(id=1, runner="b", got="resolved", residual="why"),
        Cell(id=2, runner="b", got="unresolved", defeated=True),
        Cell(id=3, runner="b", got="unresolved", defeated=True),
        Cell(id=3, runner="b", got="resolved", failures=(lost,)),
    )
    report = AttackReport(cells=cells, naive=())
    assert report.by_runner("a") == (1, 0, 1)
    assert report.by_runner("b") == (1, 1, 3)


@pytest.mark.parametrize("text", ["51", "0", "a", "1-", "3-99"])
def test_an_unknown_attack_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        chosen_attacks(text)


def test_an_unknown_runner_is_refused() -> None:
    with pytest.raises(ConfigError, match="no runner nose"):
        chosen_runners("nose")


OWN = """
[tasks]
source = "toy"
"""


@pytest.mark.slow
def test_a_users_own_tasks_are_attacked_with_their_gold_as_the_honest_twin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    argv = ["attack", str(tmp_path / "own.toml"), "--tasks", "1", "--only", "10,16,49", "--json"]
    assert main(argv) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {"attacks": 2, "defeated": 2, "twins": 5, "twins_ok": 5, "failed": []}


@pytest.mark.slow
async def test_a_users_program_is_attacked_and_keeps_its_reward_where_it_prints_its_answer_alone(
    backend: LocalBackend,
) -> None:
    files = {"main.py": text("print(input() + '?')\n")}
    plan = GradingPlan(runner="stdio", entry="main.py")
    task = Task(id="own", prompt="p", files=files, grading=plan, content_hash=task_hash("p", files, plan))
    gold = {"main.py": text("print(input() + '!')\n")}
    oracle = Oracle(task_id="own", exchanges=(Exchange(stdin="a\n", expected="a!\n"),), gold=gold)
    report = await run_user_tasks(chosen_attacks("8,12,26"), [as_target(task, oracle)], backend)
    assert report.failures == ()


PATCH = "--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,2 @@\n def f(x):\n-    return x\n+    return x + 1\n"


def _rows(path: Path, **golds: str) -> Path:
    task = {"files": {"m.py": "def f(x):\n    return x\n"}, "entry": "m.py"}
    cases = [{"function": "f", "args": [1], "expected": 2}]
    rows = [
        {"id": name, "prompt": f"Fix {name}.", **task, "cases": cases, "gold_patch": gold}
        for name, gold in golds.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_tasks_named_on_the_command_line_are_ones_own_and_a_bad_one_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _rows(tmp_path / "a.jsonl", bad=PATCH.replace("+ 1", "+ 2"), good=PATCH, bare="")
    argv = ["attack", "tasks.source=jsonl", f"tasks.path={path}", "--only", "12", "--json"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    said = json.loads(out.splitlines()[-1])
    assert (said["attacks"], said["defeated"], said["twins"] == said["twins_ok"] > 0) == (1, 1, True)
    (unfit,) = said["failed"]
    assert (unfit["id"], unfit["runner"]) == (0, "json_io")
    assert unfit["expected"] == "task bad, its base fails and its gold passes"
    assert unfit["got"].startswith("the gold fails (unresolved)")
    assert "left out: task bare: it has no gold" in err
    assert "json_io, not attacked: expected task bad" in err.replace("\n", " ")
    assert main([*argv[:3], "--only", "50"]) == 2
    assert "attacks 50 know the reference subject; none can be tried on" in capsys.readouterr().err


def test_the_docs_say_how_many_attacks_are_tried_on_tasks_of_ones_own() -> None:
    portable = [attack.id for attack in ATTACKS if attack.portable]
    docs = " ".join((Path(__file__).parents[2] / "docs" / "attacks.md").read_text().split())
    said = re.search(r"These are (\d+) of the 50: ([0-9, ]+)\.", docs)
    assert said is not None
    assert (int(said[1]), [int(n) for n in said[2].split(",")]) == (len(portable), portable)


def _weak_task(check: str) -> tuple[Task, Oracle]:
    files = {"app.py": text("VALUE = 1\n")}
    plan = GradingPlan(runner="command")
    task = Task(id="own", prompt="p", files=files, grading=plan, content_hash=task_hash("p", files, plan))
    checks = (Check(name="value", command=check),)
    return task, Oracle(task_id="own", tests=HiddenTests(checks=checks), gold={"app.py": text("VALUE = 2\n")})


@pytest.mark.slow
async def test_a_users_task_that_can_be_cheated_is_found(backend: LocalBackend) -> None:
    task, oracle = _weak_task("python3 -c 'import app; assert app.VALUE == 2'")
    report = await run_user_tasks(chosen_attacks("4,12"), [as_target(task, oracle)], backend)
    assert {failure.id for failure in report.failures} == {12}
    assert all("task own, " in failure.expected for failure in report.failures)
    assert "resolved" in report.failures[0].got


@pytest.mark.full
@pytest.mark.slow
async def test_on_a_users_task_no_won_cheat_is_excused(
    backend: LocalBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell that the matrix of the reference subject calls residual, and one that no attack wins."""
    assert 10 in RESIDUAL["swebench_log"]
    attacks = chosen_attacks("10,13")
    report = await run_user_tasks(attacks, [target_for("swebench_log")], backend)
    assert {(f.id, f.runner) for f in report.failures} == {(10, "swebench_log")}
    assert "TestReport: no more than the base" in report.failures[0].expected
    assert report.failures[0].got.startswith("resolved")
    print_report(report, Console(width=200))
    shown = capsys.readouterr().out
    assert "FAILED resolved" in shown
    assert "swebench_log: 1 of 2 attacks defeated\n" in shown
    assert "residual" not in shown


def test_a_task_without_a_python_gold_cannot_be_attacked() -> None:
    task, oracle = _weak_task("true")
    with pytest.raises(TaskError, match="task own: it has no gold"):
        as_target(task, replace(oracle, gold={}))
    with pytest.raises(TaskError, match="changes no Python file"):
        as_target(task, replace(oracle, gold={"notes.txt": text("x")}))


def test_code_goes_behind_what_python_wants_at_the_top() -> None:
    tree = {"a.py": text('"""Doc."""\nfrom __future__ import annotations\nx = 1\n')}
    made = Move(before="y = 2\n").apply(tree, "a.py")["a.py"].content.decode()
    assert made == '"""Doc."""\nfrom __future__ import annotations\ny = 2\nx = 1\n'


def test_the_table_in_the_docs_is_what_the_code_says() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "internals" / "attack-matrix.md").read_text()
    assert docs.partition("<!-- matrix -->\n")[2].partition("<!-- end -->")[0] == as_markdown()


@pytest.mark.full
async def test_the_whole_matrix(backend: LocalBackend, careless: LocalBackend) -> None:
    report = await run_matrix(ATTACKS, runners(), backend, careless)
    assert report.failures == ()
    assert report.as_json()["defeated"] == 50


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sandbox.backend=docker"], "cannot run with sandbox.backend = docker: it has no image"),
        (
            ["sandbox.backend=harbor", "sandbox.environment=e2b"],
            "insitu attack needs sandboxes on this machine",
        ),
        (["sandbox.nothing=1"], "unknown key sandbox.nothing"),
    ],
)
def test_sandboxes_that_cannot_be_are_refused_in_one_line(
    overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attack", "--only", "1", *overrides]) == 2
    assert said in capsys.readouterr().err
