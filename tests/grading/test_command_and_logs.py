"""Runners `command`, `swebench_log` and `harbor`, for real in local sandboxes."""

from __future__ import annotations

import pytest

from insitu.errors import TaskError
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.sandbox.local import LocalBackend
from insitu.types import (
    Check,
    FileEntry,
    GradingPlan,
    HiddenTests,
    Oracle,
    Outcome,
    RewardKind,
    Task,
    Verdict,
    task_hash,
)
from insitu_tasksets.runners.harbor import read_reward
from insitu_tasksets.runners.swebench_log import lays_tests


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


FILES = {"app.py": text("x = 1\n"), "tests/test_app.py": text("old\n")}


def make(
    runner: str, tests: HiddenTests, reward: RewardKind = "binary", timeout_s: float = 10.0
) -> tuple[Task, Oracle]:
    plan = GradingPlan(runner=runner, timeout_s=timeout_s, reward=reward)
    task = Task(id="t", prompt="p", files=FILES, grading=plan, content_hash=task_hash("p", FILES, plan))
    return task, Oracle(task_id="t", tests=tests, gold={"app.py": text("x = 2\n")})


@pytest.fixture(scope="module")
def grader() -> Grader:
    return Grader(LocalBackend(), GradeConfig(remember=0))


async def judge(grader: Grader, task: Task, oracle: Oracle, app: str) -> Verdict:
    return await grader.grade(task, oracle, {**FILES, "app.py": text(app)})


CHECKS = HiddenTests(
    files={
        "tests/hidden.py": text(
            "import sys; sys.path.append('.')\nimport app\nassert app.x == 2\nprint('fine')\n"
        )
    },
    checks=(
        Check(name="right", command="python3 tests/hidden.py", markers=("fine",), weight=3.0),
        Check(name="there", command="test -f app.py"),
        Check(name="unmarked", command="true", markers=("never",), weight=0.0),
    ),
)


@pytest.mark.slow
async def test_a_program_that_the_sandbox_lacks_is_no_failure_of_the_candidate(grader: Grader) -> None:
    own = 'test -f app.py && python3 -c "import app, os; os.execvp(app.run, [app.run])"'
    lacking = HiddenTests(checks=(Check(name="own", command=own), Check(name="julia", command="no-such x")))
    verdict = await judge(grader, *make("command", lacking), "run = 'true'\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)
    assert verdict.reason == "the sandbox has no no-such, which a check calls"
    # A program that only the candidate calls is its own fault.
    task, oracle = make("command", HiddenTests(checks=lacking.checks[:1]))
    verdict = await judge(grader, task, oracle, "run = 'no-such'\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0)


@pytest.mark.slow
async def test_commands_pass_by_exit_code_and_marker_and_count_by_weight(grader: Grader) -> None:
    task, oracle = make("command", CHECKS, "fraction")
    solved = await judge(grader, task, oracle, "x = 2\n")
    assert (solved.outcome, solved.passed, solved.total) == (Outcome.UNRESOLVED, 2, 3)
    assert solved.reward == 1.0
    assert (await judge(grader, task, oracle, "x = 3\n")).reward == 0.25
    assert (await judge(grader, task, oracle, "import os; os._exit(0)\n")).reward == 0.25
    task, oracle = make("command", HiddenTests(files=CHECKS.files, checks=CHECKS.checks[:2]))
    assert (await judge(grader, task, oracle, "x = 2\n")).outcome is Outcome.RESOLVED
    assert (await judge(grader, task, oracle, "x = 3\n")).reward == 0.0
    await grader.validate(task, oracle, repeats=1)


@pytest.mark.slow
async def test_a_command_without_end_is_a_timeout(grader: Grader) -> None:
    checks = HiddenTests(
        checks=(Check(name="one", command="python3 app.py"), Check(name="two", command="true"))
    )
    task, oracle = make("command", checks, "fraction", timeout_s=1.0)
    verdict = await judge(grader, task, oracle, "while True: pass\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.TEST_TIMEOUT, 0.5), verdict


def log_task(script: str, *, parser: str = "pytest", **more: object) -> tuple[Task, Oracle]:
    tests = HiddenTests(
        script=script,
        parser=parser,
        fail_to_pass=("a::new",),
        pass_to_pass=("a::old",),
        **more,  # type: ignore[arg-type]
    )
    return make("swebench_log", tests)


GOOD = "PASSED a::new\\nPASSED a::old\\n"


@pytest.mark.parametrize(
    ("script", "own"),
    [
        ("git apply -v - <<'EOF'\nx\nEOF\npytest", True),
        ("cd /testbed && git checkout abc tests/a.py", True),
        ("if true; then\n\tgit reset --hard\nfi", True),
        ("# no git apply here\n  # git checkout abc\n\t#git reset\npytest", False),
        ("git diff; pytest", False),
    ],
)
def test_only_a_script_that_lays_its_tests_may_write_them(script: str, own: bool) -> None:
    assert lays_tests(script) is own


@pytest.mark.slow
async def test_a_script_that_uses_up_its_cpu_time_is_a_timeout(grader: Grader) -> None:
    tests = HiddenTests(script="python3 app.py", parser="pytest", fail_to_pass=("a::new",))
    task, oracle = make("swebench_log", tests, timeout_s=1.0)
    verdict = await judge(grader, task, oracle, "while True: pass\n")
    assert (verdict.outcome, verdict.reason) == (Outcome.TEST_TIMEOUT, "out of CPU time"), verdict
    assert (await judge(grader, task, oracle, "print('PASSED a::new')\n")).outcome is Outcome.RESOLVED


@pytest.mark.slow
async def test_a_log_is_read_between_the_hosts_own_lines(grader: Grader) -> None:
    task, oracle = log_task("set -x; echo noise; python3 app.py; exit 3")
    assert (await judge(grader, task, oracle, f"print('{GOOD}')\n")).outcome is Outcome.RESOLVED
    missing = await judge(grader, task, oracle, "print('PASSED a::newer\\nPASSED a::old')\n")
    assert (missing.outcome, missing.reason) == (Outcome.UNRESOLVED, "1 of 2 tests pass, 1 are missing")
    odd = f"import sys\nsys.stdout.buffer.write(b'\\xff\\0\\n{GOOD}')\n"
    assert (await judge(grader, task, oracle, odd)).outcome is Outcome.RESOLVED
    nothing = await judge(grader, task, oracle, "pass\n")
    assert nothing.reason == "0 of 2 tests pass: none of them ran, 2 are missing and 0 were skipped"
    app = "print('SKIPPED a::new - no browser\\nSKIPPED a::old - no')\n"
    skipped = await judge(grader, task, oracle, app)
    assert skipped.outcome is Outcome.UNRESOLVED
    assert "none of them ran, 0 are missing and 2 were skipped" in skipped.reason
    both = await judge(grader, task, oracle, f"print('{GOOD}FAILED a::new - no')\n")
    assert (both.outcome, both.fail_to_pass) == (Outcome.UNRESOLVED, (0, 1))
    assert (await judge(grader, task, oracle, "pass\n")).outcome is Outcome.UNRESOLVED


@pytest.mark.slow
@pytest.mark.parametrize(
    "app",
    [
        "import os, signal\nos.killpg(0, 9)\n",
        "import os\nos.kill(os.getppid(), 9)\n",
        "print('x' * (33 << 20))\n" + f"print('{GOOD}')\n",
        f"print('{GOOD}')\nimport os\nos.kill(-1, 9)\n",
        "print('\\x1b[2J\\xff' + 'SKIPPED [1] a::new\\nPASSED a::old')\n",
    ],
    ids=["group", "parent", "flood", "all", "skip"],
)
async def test_a_log_without_its_end_passes_nothing(grader: Grader, app: str) -> None:
    task, oracle = log_task("python3 app.py")
    verdict = await judge(grader, task, oracle, app)
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0), verdict


@pytest.mark.slow
async def test_only_the_framed_part_counts_where_the_script_frames_one(grader: Grader) -> None:
    script = (
        "python3 app.py\necho '>>>>> Start Test Output'\necho PASSED a::old\necho '>>>>> End Test Output'\n"
    )
    task, oracle = log_task(script)
    verdict = await judge(grader, task, oracle, f"print('{GOOD}')\n")
    assert (verdict.outcome, verdict.passed) == (Outcome.UNRESOLVED, 1)


@pytest.mark.slow
async def test_what_a_runner_prints_outside_of_the_frame_counts_where_nothing_is_inside(
    grader: Grader,
) -> None:
    script = "python3 app.py\necho '>>>>> Start Test Output'\necho '>>>>> End Test Output'\n"
    assert (await judge(grader, *log_task(script), f"print('{GOOD}')\n")).outcome is Outcome.RESOLVED


@pytest.mark.slow
async def test_ids_that_a_set_cut_are_found_in_the_log(grader: Grader) -> None:
    tests = HiddenTests(
        script="python3 app.py",
        parser="pytest",
        fail_to_pass=("t.py::a[x",),
        pass_to_pass=("t.py::a[x", "t.py::b[1]"),
    )
    task, oracle = make("swebench_log", tests)
    both = "PASSED t.py::a[x y]\\nPASSED t.py::a[x z]\\n"
    solved = await judge(grader, task, oracle, f"print('{both}PASSED t.py::b[1]')")
    assert (solved.outcome, solved.passed, solved.total) == (Outcome.RESOLVED, 3, 3), solved
    for lines in (f"{both}FAILED t.py::a[x w] - no\\nPASSED t.py::b[1]", f"{both}PASSED t.py::b[1] more"):
        assert (await judge(grader, task, oracle, f"print('{lines}')")).outcome is Outcome.UNRESOLVED
    twice = HiddenTests(script="x", parser="pytest", fail_to_pass=("a",), pass_to_pass=("a",))
    with pytest.raises(TaskError, match="a test id is required twice"):
        runner_for(*make("swebench_log", twice))


@pytest.mark.slow
async def test_a_test_that_must_not_break_has_to_run(grader: Grader) -> None:
    task, oracle = log_task("python3 app.py")
    for reason, outcome in (("known", Outcome.RESOLVED), ("[NOTRUN] slow", Outcome.UNRESOLVED)):
        app = f"print('PASSED a::new\\nXFAIL a::old - {reason}')\n"
        assert (await judge(grader, task, oracle, app)).outcome is outcome


@pytest.mark.slow
async def test_a_fraction_of_a_log_is_the_share_fixed_times_the_share_kept(grader: Grader) -> None:
    tests = HiddenTests(
        script="python3 app.py", parser="pytest", fail_to_pass=("a", "b"), pass_to_pass=("c", "d", "e", "f")
    )
    task, oracle = make("swebench_log", tests, "fraction")
    said = "PASSED a\\nFAILED b\\nPASSED c\\nPASSED d\\nPASSED e\\nFAILED f"
    verdict = await judge(grader, task, oracle, f"print('{said}')\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, pytest.approx(1 / 2 * 3 / 4))


@pytest.mark.slow
async def test_a_patch_of_the_tests_meets_the_bases_version_of_them(grader: Grader) -> None:
    patch = "--- a/tests/test_app.py\n+++ b/tests/test_app.py\n@@ -1 +1 @@\n-old\n+PASSED a::new\n"
    task, oracle = log_task("cat tests/test_app.py; echo; echo PASSED a::old", patch=patch)
    after = {"app.py": text("x = 2\n"), "tests/test_app.py": text("mine\n")}
    assert (await grader.grade(task, oracle, after)).outcome is Outcome.RESOLVED
    task, oracle = log_task("true", patch=patch.replace("-old", "-other"))
    with pytest.raises(TaskError, match=r"does not apply: tests/test_app.py"):
        await grader.grade(task, oracle, after)


@pytest.mark.slow
async def test_a_set_that_grades_by_equality_wants_every_outcome_as_expected(grader: Grader) -> None:
    tests = HiddenTests(script="python3 app.py", parser="r2e", expected=(("T.a", "PASSED"), ("b", "FAILED")))
    task, oracle = make("swebench_log", tests)
    right = "PASSED t.py::T::a\\nFAILED t.py::b - why"
    assert (await judge(grader, task, oracle, f"print('{right}')")).outcome is Outcome.RESOLVED
    more = await judge(grader, task, oracle, f"print('{right}\\nPASSED t.py::c')")
    assert (more.outcome, more.passed) == (Outcome.UNRESOLVED, 2)
    assert (await judge(grader, task, oracle, "print('PASSED t.py::b')")).passed == 0
    map_of_the_set = (("p[a - b]", "FAILED"), ("q", "PASSED"), ("", "ERROR"))
    tests = HiddenTests(script="python3 app.py", parser="r2e", expected=map_of_the_set)
    log = "FAILED t.py::p[a - b] - why\\nPASSED t.py::q\\nERROR t_2.py - no\\nXFAIL t.py::x - no"
    assert (await judge(grader, *make("swebench_log", tests), f"print('{log}')")).outcome is Outcome.RESOLVED


def harbor(script: str, reward: RewardKind = "binary") -> tuple[Task, Oracle]:
    files = {"tests/test.sh": text(script), "tests/data.txt": text("2")}
    return make("harbor", HiddenTests(files=files), reward)


COUNT = "grep -q x.=.$(cat /tests/data.txt) app.py && echo 1 > /logs/verifier/reward.txt\n"


@pytest.mark.slow
async def test_a_reward_file_is_read(grader: Grader) -> None:
    task, oracle = harbor(COUNT)
    assert (await judge(grader, task, oracle, "x = 2\n")).outcome is Outcome.RESOLVED
    nothing = await judge(grader, task, oracle, "x = 3\n")
    assert (nothing.outcome, nothing.reason) == (Outcome.UNRESOLVED, "the tests left no reward file")
    await grader.validate(task, oracle, repeats=1)
    task, oracle = harbor("echo '{\"reward\": 0.25}' > /logs/verifier/reward.json", "fraction")
    verdict = await judge(grader, task, oracle, "x = 2\n")
    assert (verdict.outcome, verdict.reward, verdict.trust) == (Outcome.UNRESOLVED, 0.25, "weak")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("head -c 100000 /dev/zero | tr '\\0' 1 > /logs/verifier/reward.txt", Outcome.REFUSED),
        ("echo nan > /logs/verifier/reward.txt", Outcome.REFUSED),
        ("echo no > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", Outcome.REFUSED),
        ("echo 1 > /tmp/r; ln -s /tmp/r /logs/verifier/reward.txt", Outcome.UNRESOLVED),
        ("mkfifo /logs/verifier/reward.txt", Outcome.UNRESOLVED),
        ("mkdir /logs/verifier/reward.json", Outcome.UNRESOLVED),
        ("rmdir /logs/verifier; echo 1 > /tmp/reward.txt; ln -s /tmp /logs/verifier", Outcome.UNRESOLVED),
    ],
)
async def test_what_is_no_reward_file_earns_nothing(grader: Grader, script: str, outcome: Outcome) -> None:
    task, oracle = harbor(script)
    verdict = await judge(grader, task, oracle, "x = 2\n")
    assert (verdict.outcome, verdict.reward) == (outcome, 0.0), verdict


@pytest.mark.parametrize(
    "content",
    ["NaN", "Infinity", "1e309", "2.0", "-1", "1_0", "\u0661",
     '"1.0"', "1" * 4000, '{"reward": 1, "reward": 0}', "[1]",
     "{}", '{"a": 1, "b": 2}', '{"a": 1, "b": NaN}', '{"a": 1, "b": "1"}',
     "null", "true", "", "{", '{"reward": "1"}', "1.0.0", "[" * 3000],
)  # fmt: skip
def test_a_reward_is_a_plain_number_from_0_to_1(content: str) -> None:
    for is_json in (True, False):
        with pytest.raises(ValueError):
            read_reward(content.encode(), is_json=is_json)


@pytest.mark.parametrize(
    ("content", "reward"),
    [("1", 1.0), (" 0.5\n", 0.5), ("5e-05", 5e-05), ("1E0", 1.0), ("1.0000000000000000000000", 1.0)],
)
def test_rewards_as_programs_print_them(content: str, reward: float) -> None:
    assert [read_reward(content.encode(), is_json=is_json) for is_json in (True, False)] == [reward, reward]


def test_rewards_of_one_kind_of_file_only() -> None:
    assert [read_reward(text.encode(), is_json=False) for text in ("+1", "1.", ".5")] == [1.0, 1.0, 0.5]
    assert read_reward(b'{"reward": true, "style": 0.1}', is_json=True) == 1.0
    assert read_reward(b'{"tests": 1.0, "style": 0.5}', is_json=True) == 0.75
    assert read_reward(b'{"tests": 1, "style": 1.0, "speed": true}', is_json=True) == 1.0


PYTHON = """\
#!/usr/bin/env python3
import os, pathlib
good = pathlib.Path("app.py").read_text() == os.environ["WANT"]
pathlib.Path("/logs/verifier/reward.txt").write_text(str(int(good)))
"""


@pytest.mark.slow
async def test_a_script_runs_by_its_own_first_line_with_its_variables(grader: Grader) -> None:
    tests = HiddenTests(files={"tests/test.sh": text(PYTHON)}, env={"WANT": "x = 'a b'\n"})
    task, oracle = make("harbor", tests)
    assert (await judge(grader, task, oracle, "x = 'a b'\n")).outcome is Outcome.RESOLVED
    assert (await judge(grader, task, oracle, "x = 2\n")).outcome is Outcome.UNRESOLVED


@pytest.mark.slow
async def test_tests_that_fetch_their_runner_fail_the_solution_by_name(grader: Grader) -> None:
    """A pipe from a download that fails ends with 0, and the script says 0 to every change."""
    script = "curl -LsSf http://127.0.0.1:9/uv.sh | sh\nuvx-no-such pytest && ok=1\n"
    task, oracle = harbor(script + "echo ${ok:-0} > /logs/verifier/reward.txt\n")
    said = r"the gold fails \(unresolved\): the tests gave 0; the output ends: .*uvx-no-such"
    with pytest.raises(TaskError, match=said):
        await grader.validate(task, oracle, repeats=1)


@pytest.mark.slow
async def test_the_json_file_wins_against_the_text_file(grader: Grader) -> None:
    both = "echo 0 > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"
    assert (await judge(grader, *harbor(both), "x = 2\n")).outcome is Outcome.UNRESOLVED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "tests", "why"),
    [
        ("command", HiddenTests(), "no command"),
        ("command", HiddenTests(checks=(Check(name="c", command=" "),)), "has no command"),
        ("command", HiddenTests(checks=(Check(name="c", command="x", weight=float("nan")),)), "bad weight"),
        ("command", HiddenTests(checks=(Check(name="c", command="x", weight=0.0),)), "no check has a weight"),
        ("swebench_log", HiddenTests(script="x", parser="nose", fail_to_pass=("a",)), "no log parser 'nose'"),
        ("swebench_log", HiddenTests(parser="go", fail_to_pass=("a",)), "no script"),
        ("swebench_log", HiddenTests(script="x", parser="go"), "no test that must change"),
        ("harbor", HiddenTests(), "no tests/test.sh"),
        ("harbor", HiddenTests(files={"tests/test.sh": text(""), "x": text("")}), "not below tests/"),
    ],
)
async def test_rows_that_cannot_be_graded_are_refused(
    grader: Grader, runner: str, tests: HiddenTests, why: str
) -> None:
    task, oracle = make(runner, tests)
    with pytest.raises(TaskError, match=why):
        await judge(grader, task, oracle, "x = 2\n")
