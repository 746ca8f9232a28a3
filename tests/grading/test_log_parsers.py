# ruff: noqa: E501, RUF001
"""Every format on a log in its shape; none of them reads an id that is not there."""

from __future__ import annotations

import pytest

from insitu.grading.runners.log_parsers import PARSERS, read_log

LOGS = {
    "pytest": (
        "tests/a.py ..F [100%]\n=== short test summary info ===\nPASSED tests/a.py::test_a\n"
        "FAILED tests/a.py::test_b[x - y] - assert 1 == 2\nSKIPPED [1] tests/a.py:3: no\n"
        "ERROR tests/a.py::test_c - KeyError\nXFAIL tests/a.py::test_d - known\n1 passed",
        {"tests/a.py::test_a": "PASSED", "tests/a.py::test_b[x - y]": "FAILED", "tests/a.py::test_c": "ERROR",
         "tests/a.py::test_d": "XFAIL"},
    ),
    "pytest_verbose": (
        "tests/a.py::test_a \x1b[32mPASSED\x1b[0m      [ 50%]\ntests/a.py::test_b[a b] FAILED [100%]\n"
        "tests/a.py::test_c SKIPPED (no network)\nFAILED tests/a.py::test_b[a b] - x",
        {"tests/a.py::test_a": "PASSED", "tests/a.py::test_b[a b]": "FAILED", "tests/a.py::test_c": "SKIPPED"},
    ),
    "pytest_options": (
        "PASSED t.py::a[/tmp/x/y.fits]\nPASSED t.py::b[//host]\nPASSED t.py::c[1]",
        {"t.py::a[/y.fits]": "PASSED", "t.py::b[//host]": "PASSED", "t.py::c[1]": "PASSED"},
    ),
    "r2e": ("PASSED t.py::T::a\nFAILED t.py::b - no", {"T.a": "PASSED", "b": "FAILED"}),
    "django": (
        "test_a (app.tests.T) ... ok\ntest_b (app.tests.T) ... FAIL\ntest_c (app.tests.T) ... skipped 'why'\n"
        "What it does. ... ok\ntest_d (app.tests.T) ... some noise\nok\ntest_e (a.T) ... expected failure\n"
        "======\nERROR: test_f (a.T)\n",
        {"test_a (app.tests.T)": "PASSED", "test_b (app.tests.T)": "FAILED", "test_c (app.tests.T)": "SKIPPED",
         "What it does.": "PASSED", "test_d (app.tests.T)": "PASSED", "test_e (a.T)": "XFAIL",
         "test_f (a.T)": "ERROR"},
    ),
    "sympy": (
        "sympy/core/tests/test_x.py[3]\ntest_a ok\ntest_b F\ntest_c f\n[FAIL]\n____ sympy/core/tests/test_x.py:test_a ____",
        {"test_a": "FAILED", "test_b": "FAILED", "test_c": "XFAIL"},
    ),
    "js_4": (
        "Suite\n  ✔ adds (3ms)\n  ✓ [chrome]: subtracts\n  × divides 12 ms\n  ✘ : roots\n  ○ later\nmaybe [todo]\nnoise",
        {"adds": "PASSED", "subtracts": "PASSED", "divides": "FAILED", "roots": "FAILED", "later": "SKIPPED",
         "maybe": "SKIPPED"},
    ),
    "go": (
        "=== RUN   TestA\n--- PASS: TestA (0.00s)\n    --- FAIL: TestA/sub_1 (1.20s)\n--- SKIP: TestB (0.0s)\nok pkg 1s",
        {"TestA": "PASSED", "TestA/sub_1": "FAILED", "TestB": "SKIPPED"},
    ),
    "go_json": (
        '{"Action":"pass","Package":"p","Test":"A"}\n{"Action":"pass","Package":"p"}\nnoise\n{"Action":"fail","Package":"p","Test":"B"}',
        {"p/A": "PASSED", "p/B": "FAILED"},
    ),
    "cargo": (
        "running 3 tests\ntest a::b ... ok\ntest c - should panic ... FAILED\ntest d ... ignored, slow\ntest result: ok. 1 passed",
        {"a::b": "PASSED", "c": "FAILED", "d": "SKIPPED"},
    ),
    "jest": (
        "PASS src/a.test.js\n  sums\n    ✓ adds (3 ms)\n    ✕ takes away\n    ○ skipped later\nTests: 1 failed",
        {"adds": "PASSED", "takes away": "FAILED", "later": "SKIPPED"},
    ),
    "vitest": (" ✓ src/a.test.ts > sums > adds 3ms\n × src/a.test.ts > b", {"src/a.test.ts > sums > adds": "PASSED", "src/a.test.ts > b": "FAILED"}),
    "jest_json": (
        '{"testResults": [{"assertionResults": [{"fullName": "sums adds", "status": "passed"}, {"fullName": "b", "status": "failed"}]}]}',
        {"sums adds": "PASSED", "b": "FAILED"},
    ),
    "mocha": (
        "  sums\n    ✔ adds (12ms)\n    1) takes\n    - later\n\n  1 passing (3ms)\n  1 failing\n\n  1) sums\n       takes:",
        {"adds": "PASSED", "takes": "FAILED", "later": "SKIPPED"},
    ),
    "tap": (
        "TAP version 13\n1..4\nok 1 - a\nnot ok 2 - b\nok 3 - c # SKIP no\nnot ok 4 - d # TODO later\n# done",
        {"a": "PASSED", "b": "FAILED", "c": "SKIPPED", "d": "XFAIL"},
    ),
    "gtest": (
        "[ RUN      ] S.A\n[       OK ] S.A (1 ms)\n[  FAILED  ] S.B (0 ms)\n[  PASSED  ] 1 test.\n[  FAILED  ] S.B",
        {"S.A": "PASSED", "S.B": "FAILED"},
    ),
    "ctest": (
        "1/2 Test #1: unit_a .......   Passed    0.01 sec\n2/2 Test #2: unit_b .......***Failed    0.10 sec",
        {"unit_a": "PASSED", "unit_b": "FAILED"},
    ),
    "gradle": ("ATest > a() PASSED\nATest > b() FAILED\n> Task :test", {"ATest > a()": "PASSED", "ATest > b()": "FAILED"}),
    "minitest": ("ATest#test_a = 0.00 s = .\nATest#test_b = 0.01 s = F", {"ATest#test_a": "PASSED", "ATest#test_b": "FAILED"}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LOGS))
def test_a_log_in_its_shape_is_read(name: str) -> None:
    log, expected = LOGS[name]
    assert read_log(name, log) == expected
    assert read_log(name, log.replace("\n", "\r\n")) == expected


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_noise_names_no_test(name: str) -> None:
    assert read_log(name, "") == {}
    assert read_log(name, "PASSED\nok\n--- PASS:\n{}\n[]\n{\n" + "(" * 5000 + "\n\x1b]0;x\x07\n") == {}


def test_an_id_with_two_outcomes_has_failed() -> None:
    assert read_log("pytest", "PASSED a\nFAILED a\nPASSED a\nPASSED b\nPASSED b") == {
        "a": "FAILED",
        "b": "PASSED",
    }
