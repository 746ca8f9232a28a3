"""Long tests that a change touches come first, and those left out are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from changed import nearest
from time_budget import ROOT, distance, order

TESTS = sorted(ROOT.glob("tests/full/test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "changed", "away"),
    [
        ("tests/full/test_real_vllm.py", "tests/full/test_real_vllm.py", 0),
        ("tests/full/test_real_vllm.py", "src/insitu/engines/vllm.py", 0),
        ("tests/full/test_real_vllm.py", "src/insitu/engines/vllm_weights.py", 1),
        (
            "tests/gateway/test_token_backend_hot_path.py",
            "packages/insitu-tasksets/src/insitu_tasksets/validate.py",
            2,
        ),
        ("tests/full/test_real_vllm.py", "README.md", 2),
        # Modules right below src/insitu, scripts, helpers of tests, and what a helper imports.
        # Who imports the package does not start its command line.
        ("tests/capture/test_forest.py", "src/insitu/cli/verbs.py", 2),
        # One of the public API's tools starts it: gpu-check.
        ("tests/api/test_api.py", "src/insitu/cli/verbs.py", 1),
        ("tests/test_failpoint.py", "src/insitu/failpoint.py", 0),
        ("tests/scripts/test_exercises.py", "scripts/exercises.py", 0),
        ("tests/tasks/test_swe.py", "tests/tasks/swe_rows.py", 0),
        # A program that is started, and what its verbs import when they run.
        ("tests/cli/test_cli.py", "src/insitu/__main__.py", 0),
        ("tests/cli/test_cli.py", "packages/insitu-tasksets/src/insitu_tasksets/runners/stdio.py", 1),
        ("tests/full/test_chaos.py", "benchmarks/chaos.py", 0),
    ],
)
def test_a_test_is_touched_by_what_it_names_and_by_what_that_imports(
    test: str, changed: str, away: int
) -> None:
    assert (ROOT / changed).is_file()
    assert distance(ROOT / test, {changed}) == away


def test_touched_files_come_first_and_the_rest_in_another_order_for_each_commit() -> None:
    changed = {"tests/full/test_real_harbor.py"}
    orders = [order(TESTS, changed, seed) for seed in ("a", "b", "c", "d")]
    for each in orders:
        assert each[0].name == "test_real_harbor.py"
        assert sorted(each) == TESTS
    assert orders[0] == order(reversed(TESTS), changed, "a")
    assert len({tuple(each) for each in orders}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "touched_share", "away", "summary", "line"),
    [
        ("1e-9", "2", 2, "2 skipped", "left out: 2 of test_two.py\n"),
        ("1e-9", "2", 1, "2 skipped", "left out: 2 of test_two.py, which the change touches\n"),
        ("1e-9", "2", 0, "2 skipped", "left out: 2 of test_two.py, which the change touches\n"),
        ("1e-9", "1e12", 1, "2 skipped", "left out: 2 of test_two.py, which the change touches\n"),
        ("1e-9", "1e12", 0, "2 passed", ""),
        ("60", "2", 2, "1 passed, 1 skipped", "left out: 1 of test_two.py\n"),
        ("60", "2", 0, "2 passed", ""),
    ],
)
def test_what_is_left_out_once_the_time_is_over_is_named(
    tmp_path: Path, seconds: str, touched_share: str, away: int, summary: str, line: str
) -> None:
    (tmp_path / "test_two.py").write_text(
        "import pytest\ndef test_first():\n    pass\n@pytest.mark.takes(90)\ndef test_second():\n    pass\n"
    )
    program = (
        "import pytest, sys, time_budget;"
        "budget = time_budget.TimeBudget(float(sys.argv[1]), float(sys.argv[3]));"
        "time_budget.changed_files = set; time_budget.distance = lambda *_: int(sys.argv[2]);"
        "options = ['-p', 'no:cacheprovider', '-q', '-rs', '--rootdir=.', 'test_two.py'];"
        "sys.exit(pytest.main(options, plugins=[budget]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, seconds, str(away), touched_share],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert summary in done.stdout, done.stdout + done.stderr
    assert line in done.stdout
    assert ("left out: " in done.stdout) == bool(line)


@pytest.mark.slow
def test_the_tests_of_a_change_are_those_that_it_reaches_the_nearest_first() -> None:
    found = [str(path.relative_to(ROOT)) for path in nearest({"src/insitu/failpoint.py"})]
    assert "tests/test_failpoint.py" in found[:12]
    assert found.index("tests/test_failpoint.py") < found.index("tests/cli/test_cli.py")
    assert "tests/test_backoff.py" not in found
    assert nearest({"tests/test_backoff.py"}) == [ROOT / "tests" / "test_backoff.py"]
    assert nearest({"README.md"}) == []
