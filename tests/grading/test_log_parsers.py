# ruff: noqa: E501, RUF001
"""Every format on a log in its shape; none of them reads an id that is not there."""

from __future__ import annotations

import pytest

from insitu_tasksets.runners.log_parsers import PARSERS, parse_log

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
    assert parse_log(name, log).outcomes == expected
    assert parse_log(name, log.replace("\n", "\r\n")).outcomes == expected


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_noise_names_no_test(name: str) -> None:
    assert parse_log(name, "").outcomes == {}
    assert (
        parse_log(name, "PASSED\nok\n--- PASS:\n{}\n[]\n{\n" + "(" * 5000 + "\n\x1b]0;x\x07\n").outcomes == {}
    )


ODD = {
    "a failed part of a test, listed apart": (
        "pytest",
        "SUBFAIL tests/a.py::t - AssertionError\n[what it is] (i=0) SUBFAIL tests/a.py::v - no\n"
        "SUBFAILED[a b] (i=1) tests/a.py::w[x y] - no\nPASSED tests/a.py::t\nPASSED tests/a.py::u\n"
        "PASSED tests/a.py::v\nPASSED tests/a.py::w[x y]\nNo SUBFAIL here\nXSUBFAIL a.py::z",
        {"tests/a.py::t": "FAILED", "tests/a.py::u": "PASSED", "tests/a.py::v": "FAILED", "tests/a.py::w[x y]": "FAILED"},
    ),
    "the same, verbose": (
        "pytest_verbose",
        "tests/a.py::t [msg] (i=0) SUBFAIL [ 50%]\ntests/a.py::t PASSED [100%]\n"
        "tests/a.py::u[a b] SUBFAILED[msg] (i=0) [100%]\ntests/a.py::u[a b] PASSED [100%]\ntests/a.py::v PASSED",
        {"tests/a.py::t": "FAILED", "tests/a.py::u[a b]": "FAILED", "tests/a.py::v": "PASSED"},
    ),
    "expected failures that never ran": (
        "pytest",
        "XFAIL a.py::a - [NOTRUN] \nXFAIL a.py::b\n  reason: [NOTRUN] slow\nXFAIL a.py::c - known\nXFAIL a.py::d\n  reason: known",
        {"a.py::a": "NOTRUN", "a.py::b": "NOTRUN", "a.py::c": "XFAIL", "a.py::d": "XFAIL"},
    ),
    "the same, verbose ": ("pytest_verbose", "a.py::a XFAIL ([NOTRUN] slow) [ 50%]\na.py::b XFAIL (known)", {"a.py::a": "NOTRUN", "a.py::b": "XFAIL"}),
    "several processes": (
        "pytest",
        "[gw0] [ 50%] PASSED tests/a.py::t \n[gw11] [100%] FAILED tests/a.py::u[a b] \n[gw0] linux -- Python 3.11",
        {"tests/a.py::t": "PASSED", "tests/a.py::u[a b]": "FAILED"},
    ),
    "the same, verbose  ": ("pytest_verbose", "[gw0] [ 50%] PASSED tests/a.py::t", {"tests/a.py::t": "PASSED"}),
    "a mark of progress": ("pytest", "PASSED                    [100%]\nPASSED a.py::t", {"[100%]": "PASSED", "a.py::t": "PASSED"}),
    "skipped tests, folded and not": ("pytest", "SKIPPED [2] a.py:3: no\nSKIPPED a.py::t - no", {"a.py::t": "SKIPPED"}),
    "brackets and dashes in parameters": (
        "pytest",
        "FAILED t.py::t[a[0] - x] - E\nFAILED t.py::t[x - y] - a[1] - b\nFAILED t.py::t[[] - E\nFAILED t.py::u - a[1] - b\nFAILED t.py::v[1]",
        {"t.py::t[a[0] - x]": "FAILED", "t.py::t[x - y]": "FAILED", "t.py::t[[]": "FAILED", "t.py::u": "FAILED", "t.py::v[1]": "FAILED"},
    ),
    "a parameter that is an outcome": ("pytest_verbose", "a.py::t[a PASSED b] FAILED [ 1%]\na.py::u[PASSED] PASSED", {"a.py::t[a PASSED b]": "FAILED", "a.py::u[PASSED]": "PASSED"}),
    "escapes": (
        "pytest",
        "\x1b(B\x1b[38:5:1mPASSED\x1b(B\x1b[m a.py::a\n\x1b]8;;file:///x\x1b\\PASSED a.py::b\x1b]8;;\x1b\\\n"
        "\x1b]0;never ended\nPASSED a.py::c\n\x1b]0;ended\x07PASSED a.py::d\x1b=\n\x1bP1$r\x1b\\PASSED a.py::e",
        dict.fromkeys(["a.py::a", "a.py::b", "a.py::c", "a.py::d", "a.py::e"], "PASSED"),
    ),
    "only the first summary counts": (
        "r2e",
        "PASSED t.py::shown\n== short test summary info ==\nPASSED t.py::T::a\nXFAIL t.py::T::x - no\nXPASS t.py::T::y\n"
        "ERROR t_2.py - ImportError\nERROR t_3.py - ImportError\nFAILED t.py::p[a - b] - no\nPASSED t.py::q[c - d]\n"
        "SKIPPED [1] t.py:3: no\n== short test summary info ==\nPASSED t.py::b",
        {"T.a": "PASSED", "": "ERROR", "p[a": "FAILED", "q[c": "PASSED"},
    ),
    "durations of jest alone": (
        "jest",
        "  ✓ waits 5 ms\n  ✓ waits 10 ms (3 ms)\n  ✓ adds more \n  ✓ cost is (5 ms\n  ✓ keeps (2 s) (1.204 s)\n  ✓ skipped rows",
        dict.fromkeys(["waits 5 ms", "waits 10 ms", "adds more", "cost is (5 ms", "keeps (2 s)", "skipped rows"], "PASSED"),
    ),
    "durations of vitest alone": (
        "vitest",
        " ✓ src/a.test.ts > waits 5 ms 12ms\n ✓ src/a.test.ts > keeps (3 ms)\n ✓ src/a.test.ts > b   \n ↓ src/a.test.ts > c",
        {"src/a.test.ts > waits 5 ms": "PASSED", "src/a.test.ts > keeps (3 ms)": "PASSED", "src/a.test.ts > b": "PASSED", "src/a.test.ts > c": "SKIPPED"},
    ),
    "durations of others": ("mocha", "  ✔ waits (5ms) (12ms)\n  1) fails (1s)", {"waits (5ms)": "PASSED", "fails": "FAILED"}),
    "cargo with times": ("cargo", "test a::b ... ok <0.012s>\ntest c ... FAILED (3 ms)\ntest src/lib.rs - f (line 3) ... ok", {"a::b": "PASSED", "c": "FAILED", "src/lib.rs - f (line 3)": "PASSED"}),
    "names in tap": ("tap", "ok 1 - C# works\nok 2 - fixes # time=3ms\nnot ok 3 plain (4 ms)\nok 4 - # SKIP\nok 5", {"C# works": "PASSED", "fixes": "PASSED", "plain": "FAILED"}),
    "go behind output": (
        "go",
        "foo--- PASS: TestB (0.10s)\n--- FAIL: TestA (0.00s)more\n    --- PASS: TestC/a_b (1.20s)\nsee --- FAIL: TestB now\n--- SKIP: TestD",
        {"TestB": "PASSED", "TestA": "FAILED", "TestC/a_b": "PASSED", "TestD": "SKIPPED"},
    ),
    "gradle between output": (
        "gradle",
        "a.B > one()\nPicked up X\n PASSED\na.B > two() + : 'end'\nFAILED\na.B > three() PASSEDPicked up X\na.B > four() PASSED (0.1s)\n"
        "a.B > five() STANDARD_OUT\n    PASSED\na.B > five() FAILED\na.B > has PASSED in it SKIPPED\n> Task :x > y\nPASSED\na.B > six() SKIPPED",
        {"a.B > one()": "PASSED", "a.B > two()": "FAILED", "a.B > two() + : 'end'": "FAILED", "a.B > three()": "PASSED",
         "a.B > four()": "PASSED", "a.B > five()": "FAILED", "a.B > has PASSED in it": "SKIPPED", "a.B > six()": "SKIPPED"},
    ),
    "a part of a test that failed, in one line with the next test": (
        "unittest",
        "test_a (app.T) ... test_b (app.T) ... noise\nok\ntest_c (app.T) ... test_d (app.T) ... ok\n"
        "FAIL: test_a (app.T) (i=1)\nERROR: test_c (app.T) [what] (i=1)",
        {"test_a (app.T)": "FAILED", "test_b (app.T)": "PASSED", "test_c (app.T)": "ERROR", "test_d (app.T)": "PASSED",
         "test_c (app.T) ... test_d (app.T)": "PASSED", "test_a (app.T) (i=1)": "FAILED", "test_c (app.T) [what] (i=1)": "ERROR"},
    ),
    "inherited tests": (
        "pytest_verbose",
        "a.py::T::t <- base.py PASSED\na.py::t[x <- y] FAILED\na.py::T::u[x <- y] <- base.py FAILED [ 3%]",
        {"a.py::T::t": "PASSED", "a.py::t[x <- y]": "FAILED", "a.py::T::u[x <- y]": "FAILED"},
    ),
    "one name in two suites": ("mocha", "  a\n    ✔ adds (1ms)\n  b\n    ✖ adds (2ms)\n    ✖ takes", {"adds": "FAILED", "takes": "FAILED"}),
    "jest's report as lines": ("jest_json", "[PASSED] a b\n[FAILED] c", {"a b": "PASSED", "c": "FAILED"}),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_lines_are_read(case: str) -> None:
    parser, log, expected = ODD[case]
    assert parse_log(parser, log).outcomes == expected


@pytest.mark.parametrize(
    ("parser", "line", "ids"),
    [
        ("jest", "  ✓ waits (3 ms)", ["waits", "waits (3 ms)", "waits (9 ms)"]),
        ("vitest", " ✓ a > waits 5ms", ["a > waits 5ms", "a > waits", "a > waits 7ms"]),
        ("vitest", " ✓ a > waits 5ms 12ms", ["a > waits 5ms"]),
        ("js_4", "  × waits 12 ms", ["waits 12 ms", "waits"]),
        ("go", "--- PASS: TestA (0.10s)", ["TestA", "TestA (0.10s)", "TestA (0.00s)"]),
        ("mocha", "  ✔ adds (12ms)", ["adds", "adds (3ms)"]),
        ("cargo", "test a - should panic ... ok", ["a", "a - should panic"]),
        ("tap", "ok 1 - adds # time=3ms", ["adds", "- adds # time=3ms", "- adds # time=4ms"]),
    ],
)
def test_a_required_id_may_have_a_duration_of_its_own_or_of_the_runner(
    parser: str, line: str, ids: list[str]
) -> None:
    log = parse_log(parser, line)
    assert {log.outcome(name) for name in ids} == {"FAILED" if "×" in line else "PASSED"}
    assert log.outcome("other") is None


def test_two_names_that_differ_in_a_duration_are_two_tests() -> None:
    log = parse_log("vitest", " ✓ a > waits 5ms\n × a > waits 9ms")
    assert (log.outcome("a > waits 5ms"), log.outcome("a > waits 9ms")) == ("PASSED", "FAILED")
    log = parse_log("jest", "  ✓ waits 5 ms\n  ✕ waits 9 ms (3 ms)")
    assert (log.outcome("waits 5 ms"), log.outcome("waits 9 ms")) == ("PASSED", "FAILED")


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        (["PASSED t.py::a[x y]"], "PASSED"),
        (["PASSED t.py::a[x y]", "PASSED t.py::a[x z]"], "PASSED"),
        (["PASSED t.py::a[x y]", "XFAIL t.py::a[x z]"], "PASSED"),
        (["XFAIL t.py::a[x y]", "XFAIL t.py::a[x z]"], "XFAIL"),
        (["PASSED t.py::a[x y]", "FAILED t.py::a[x z] - no"], "FAILED"),
        (["PASSED t.py::a[x y]", "SKIPPED t.py::a[x z]"], "FAILED"),
        (["PASSED t.py::a[x y]", "XFAIL t.py::a[x z] - [NOTRUN]"], "FAILED"),
        (["ERROR t.py::a[x y]"], "ERROR"),
        (["PASSED t.py::a[y z]"], None),
        (["FAILED t.py::a[x", "PASSED t.py::a[x y]"], "FAILED"),
    ],
)
def test_an_id_that_was_cut_inside_a_parameter_stands_for_all_that_begin_with_it(
    lines: list[str], outcome: str | None
) -> None:
    assert parse_log("pytest", "\n".join(lines)).outcome("t.py::a[x") == outcome


def test_a_whole_id_is_no_beginning_of_others() -> None:
    log = parse_log("pytest", "PASSED t.py::a[x] more\nPASSED t.py::ab\nPASSED handles foo] and more")
    assert [log.outcome(name) for name in ("t.py::a[x]", "t.py::a", "handles foo]")] == [None] * 3


def test_long_lines_of_a_candidate_take_no_time() -> None:
    for parser in PARSERS:
        for line in ("(" * 4000 + "1 ms", "a.py::t" + " PASSED (" * 400, "[" * 4000, "✓ " + " " * 4000 + "x"):
            parse_log(parser, f"{line}\n{line * 500}")


def test_an_id_with_two_outcomes_has_failed() -> None:
    assert parse_log("pytest", "PASSED a\nFAILED a\nPASSED a\nPASSED b\nPASSED b").outcomes == {
        "a": "FAILED",
        "b": "PASSED",
    }
