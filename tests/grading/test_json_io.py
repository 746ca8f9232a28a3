from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.grading.grader import Grader
from insitu.grading.runners.json_io import ChannelTampered, judge, read_claims
from insitu.grading.runners.json_io_worker import MAX_NODES, encode
from insitu.grading.runners.json_values import LONG, Digits, check_value, equal, parse, same, shown
from insitu.grading.trust import trust_of
from insitu.sandbox.base import ExecResult
from insitu.sandbox.local import LocalBackend
from insitu.tasks.row_files import MAX_DIGITS
from insitu.types import Case, FileEntry, GradingPlan, Oracle, Outcome, Task, task_hash
from insitu_tasksets.contests import _call


class Whole(int):
    pass


class Text(str):
    pass


class Always:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def circle() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


def deep() -> list[object]:
    found: list[object] = []
    for _ in range(100):
        found = [found]
    return found


NOT_JSON = [
    {Text("a"): 1}, Whole(1), Text("a"), Always(), [Always()], (Always(),), {Whole(1)}, b"a", 1j, circle(),
    deep(), float("nan"), float("inf"), [0] * (MAX_NODES + 1), object, 10**MAX_DIGITS, -(10**MAX_DIGITS),
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
IDS = ["n-0", "n-1"]
CPU_S = 4
CASES = [Case(function="f", args=(), expected=1), Case(function="f", args=(), expected="b")]
RIGHT = b'["n"]\n["n-0",true,1]\n["n-1",true,"b"]\n'


@given(JSON)
def test_the_worker_writes_what_json_reads_back(value: object) -> None:
    assert same(json.loads(encode(value, 0, [MAX_NODES])), value)


@given(JSON, JSON)
def test_equality_is_that_of_canonical_json_text(one: object, other: object) -> None:
    texts = [json.dumps(v, sort_keys=True).replace("-0.0", "0.0") for v in (one, other)]
    assert same(one, other) == (texts[0] == texts[1])


@pytest.mark.parametrize(
    ("claimed", "expected", "right"),
    [
        ((1, "a"), (1, "a"), True),
        ([1, "a"], (1, "a"), False),
        ((1, "a"), [1, "a"], False),
        ([(1, 2)], [(1, 2.0)], True),
        ({2, 1}, {1, 2}, True),
        ({1}, [1], False),
        ({1: "a", (2,): "b"}, {(2,): "b", 1: "a"}, True),
        ({1: "a"}, {"1": "a"}, False),
    ],
)
def test_tuples_sets_and_keys_compare_as_an_assert_would(
    claimed: object, expected: object, right: bool
) -> None:
    case = Case(function="f", args=(), expected=expected, exact=False)
    assert equal(json.loads(encode(claimed, 0, [MAX_NODES])), case) is right


@pytest.mark.parametrize(
    ("claimed", "expected", "tolerance", "right"),
    [
        (1.0000001, 1.0, 1e-6, True),
        (1.00001, 1.0, 1e-6, False),
        ([1, {"a": 2.0000001}], [1.0, {"a": 2}], 1e-6, True),
        ([1, 2], [1], 1e-6, False),
        ({"a": 1}, {"b": 1}, 1e-6, False),
        ("1", 1, 1e-6, False),
        (10**400, 1.5, 1e-6, False),
        (10**400, 10**400, 1e-6, True),
        ("a", "a", 1e-6, True),
    ],
)
def test_numbers_may_differ_where_a_case_says_so(
    claimed: object, expected: object, tolerance: float, right: bool
) -> None:
    case = Case(function="f", args=(), expected=expected, exact=False, tolerance=tolerance)
    assert equal(claimed, case) is right


def test_the_first_of_a_list_counts_where_a_case_says_so() -> None:
    case = Case(function="f", args=(), expected=[3], exact=False, wrapped=True)
    assert [equal(value, case) for value in (3, [3], 4, [4], [[3]])] == [True, True, False, False, False]
    longer = replace(case, expected=[3, 4])
    assert [equal(value, longer) for value in (3, [3], [3, 4])] == [False, False, True]


WRAPPED = {  # outputs of a row, solution -> answers that are right, answers that are wrong, trust
    "values that no set wraps": ([[1, 2], [1]], "[1, 2] if n == 0 else [1]", [], ["1", "[1]"], "strong"),
    "a solution that returns lists": ([[7], [7]], "[7]", [], ["7", "[[7]]"], "strong"),
    "a solution that returns values": ([[7], [7]], "7", [], ["[7]"], "strong"),
    "lists in lists": ([[[1, 2]], [[1, 2]]], "[1, 2]", ["(1, 2)"], ["[[1, 2]]", "1"], "strong"),
    "no solution, and values that no set wraps": ([[1, 2, 5], [1]], "", [], ["1"], "strong"),
    "no solution": ([[7], [7]], "", ["7", "[7]"], ["8"], "standard"),
    "a solution that is wrong": ([[7], [7]], "8", ["7", "[7]"], ["8"], "standard"),
    "dictionaries": ([{"1": [2]}, {"1": [2]}], "{1: [2]}", [], ["[{1: [2]}]", "{'1': [2]}"], "strong"),
    "dictionaries in lists": ([[{"1": 2}, {"3": 4}]] * 2, "[{1: 2}, {3: 4}]", [], ["[{1: 2}]"], "strong"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
async def test_the_solution_says_whether_a_set_wraps_its_values(name: str) -> None:
    outputs, solution, right, wrong, trust = WRAPPED[name]
    files = {"app.py": FileEntry(content=b"def f(n):\n    pass\n")}
    plan = GradingPlan(entry="app.py")
    task = Task(id="t", prompt="p", files=files, grading=plan, content_hash=task_hash("p", files, plan))

    def returns(value: str) -> dict[str, FileEntry]:
        return {"app.py": FileEntry(content=f"def f(n):\n    return {value}\n".encode())}

    oracle = Oracle(
        task_id="t",
        cases=tuple(_call("f", [n], value) for n, value in enumerate(outputs)),
        gold=returns(solution) if solution else {},
    )
    grader = Grader(LocalBackend())
    for value in [*right, *([solution] if solution and trust == "strong" else [])]:
        verdict = await grader.grade(task, oracle, returns(value))
        assert (verdict.outcome, verdict.trust) == (Outcome.RESOLVED, trust), (value, verdict)
    for value in wrong:
        verdict = await grader.grade(task, oracle, returns(value))
        assert (verdict.outcome, verdict.trust) == (Outcome.UNRESOLVED, trust), (value, verdict)
    if name != "a solution that is wrong":  # which only a run tells
        assert trust_of(task, oracle)[0] == trust
    if solution and trust == "strong":
        await grader.validate(task, oracle, repeats=1)


@pytest.mark.parametrize(
    ("claimed", "expected"),
    [((1, 2), [1, 2]), ([(1, 2), (3,)], [[1, 2], [3]]), ({"a": (1,)}, {"a": [1]}), ({1: "a"}, {1: "a"})],
)
def test_a_tuple_counts_as_a_list_where_a_case_says_so(claimed: object, expected: object) -> None:
    case = Case(function="f", args=(), expected=expected, exact=False, lists=True)
    answer = json.loads(encode(claimed, 0, [MAX_NODES]))
    assert equal(answer, case)
    assert equal(answer, replace(case, lists=False)) is (claimed == expected)


def test_an_answer_that_nests_without_end_is_wrong() -> None:
    case = Case(function="f", args=(), expected=[1], lists=True)
    assert not equal(json.loads("[" * 900 + "]" * 900), case)


@pytest.mark.parametrize("value", NOT_JSON, ids=lambda value: type(value).__name__)
def test_what_is_no_plain_value_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        encode(value, 0, [MAX_NODES])


def test_an_integer_of_the_most_digits_is_written() -> None:
    assert len(encode(1 - 10**MAX_DIGITS, 0, [MAX_NODES])) == 1 + MAX_DIGITS


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        ("1", 1),
        (None, False),
        ([1], [True]),
        ({"a": 1}, {"a": 1.0}),
        ([], {}),
    ],
)
def test_types_are_part_of_equality(one: object, other: object) -> None:
    assert not same(one, other)
    assert same(one, one)


def finding(stdout: bytes, exit_code: int = 0, timed_out: bool = False, truncated: bool = False) -> Outcome:
    result = ExecResult(
        exit_code=exit_code, stdout=stdout, stderr=b"", timed_out=timed_out, truncated=truncated
    )
    return judge(CASES, IDS, result, CPU_S).outcome


@pytest.mark.parametrize(
    ("out_of_memory", "outcome", "word"),
    [(True, Outcome.UNRESOLVED, "(-9, out of memory)"), (False, Outcome.TEST_TIMEOUT, "out of CPU time")],
)
def test_a_late_kill_is_one_for_memory_only_if_the_sandbox_says_so(
    out_of_memory: bool, outcome: Outcome, word: str
) -> None:
    late = ExecResult(
        exit_code=-9, stdout=b'["n"]\n', stderr=b"", duration_s=2.0 * CPU_S, out_of_memory=out_of_memory
    )
    report = judge(CASES, IDS, late, CPU_S)
    assert report.outcome is outcome
    assert word in report.reason


def test_right_answers_and_a_clean_end_resolve() -> None:
    assert finding(RIGHT) is Outcome.RESOLVED


@pytest.mark.parametrize(
    ("stdout", "exit_code", "outcome"),
    [
        (RIGHT, 1, Outcome.UNRESOLVED),
        (RIGHT, -9, Outcome.UNRESOLVED),
        (RIGHT[:-1], 0, Outcome.UNRESOLVED),
        (b'["n"]\n', 0, Outcome.UNRESOLVED),
        (b'["n"]\n["n-0",true,1]\n["n-1",true,"c"]\n', 0, Outcome.UNRESOLVED),
        (b'["n"]\n["n-0",true,1]\n["n-1",false,"ValueError"]\n', 0, Outcome.UNRESOLVED),
    ],
)
def test_less_than_all_is_unresolved(stdout: bytes, exit_code: int, outcome: Outcome) -> None:
    assert finding(stdout, exit_code) is outcome


def test_failing_cases_are_kept_with_both_values() -> None:
    stdout = b'["n"]\n["n-0",true,"\\ud800"]\n["n-1",false,"ValueError"]\n'
    found = judge(CASES, IDS, ExecResult(exit_code=0, stdout=stdout, stderr=b""), CPU_S).failing
    assert [(check.outcome, check.got) for check in found] == [
        ("wrong", r"'\ud800'"),
        ("raised ValueError", ""),
    ]
    assert [check.expected for check in found] == [repr(case.expected) for case in CASES]
    assert found[0].name.startswith("case 0: ")


@pytest.mark.parametrize(
    "line",
    [
        b"PASSED", b"", b"{}", b"[]", b'["n-0",true]', b'["n-0",true,1,2]', b'["n-0",1,1]',
        b'["n-0","true",1]',
        b'["n-0",true,NaN]', b'["n-0",true,-Infinity]', b'["n-0",true,{"a":1,"a":2}]', b'["n-1",true,"b"]',
        b'["x-0",true,1]', b'["n-0",false,"a b"]', b'["n-0",false,7]', b"\xff\xfe", b"[" * 100_000,
        b'["n-0",true,' + b"9" * (MAX_DIGITS + 1) + b"]",
    ],
    ids=range(18),
)  # fmt: skip
def test_a_line_the_worker_cannot_have_sent_is_tampering(line: bytes) -> None:
    with pytest.raises(ChannelTampered):
        read_claims(line + b"\n", IDS)
    assert finding(b'["n"]\n' + line + b'\n["n-1",true,"b"]\n') is Outcome.TAMPERED


def test_repeated_swapped_and_surplus_answers_are_tampering() -> None:
    head, one, two, _ = RIGHT.split(b"\n")
    for lines in ([one, one], [two, one], [one, two, two], [one, two, b""]):
        assert finding(b"\n".join([head, *lines, b""])) is Outcome.TAMPERED
    assert finding(RIGHT, truncated=True) is Outcome.TAMPERED


@pytest.mark.parametrize("forged", [b"1e309", b"2.0", b"1.0", b"-1", b"true", b'"1"', b"[1]", b"null"])
def test_a_claim_that_only_looks_right_is_wrong(forged: bytes) -> None:
    report = judge(
        CASES,
        IDS,
        ExecResult(exit_code=0, stdout=RIGHT.replace(b"true,1]", b"true," + forged + b"]"), stderr=b""),
        CPU_S,
    )
    assert (report.outcome, report.passed) == (Outcome.UNRESOLVED, 1)


@given(st.binary(max_size=60), st.integers(-30, 3), st.booleans())
def test_no_bytes_whatever_raise_or_resolve(noise: bytes, exit_code: int, timed_out: bool) -> None:
    outcome = finding(b'["n"]\n' + noise, exit_code, timed_out)
    assert outcome not in (Outcome.RESOLVED, Outcome.INFRA)


@pytest.mark.parametrize(
    ("exit_code", "timed_out", "duration_s", "outcome", "certain"),
    [
        (-9, True, 6.0, Outcome.TEST_TIMEOUT, False),
        (-signal.SIGXCPU, False, 4.1, Outcome.TEST_TIMEOUT, True),
        (-signal.SIGXCPU, False, 2.1, Outcome.TEST_TIMEOUT, True),
        (-9, False, 5.1, Outcome.TEST_TIMEOUT, True),
        (-9, False, 0.1, Outcome.UNRESOLVED, False),
    ],
)
def test_time_is_told_apart_from_failure(
    exit_code: int, timed_out: bool, duration_s: float, outcome: Outcome, certain: bool
) -> None:
    """Two threads use up CPU time twice as fast as the clock. `certain`: CPU time, not the host's load."""
    stdout = b'["n"]\n["n-0",true,1]\n'
    result = ExecResult(
        exit_code=exit_code, stdout=stdout, stderr=b"", timed_out=timed_out, duration_s=duration_s
    )
    report = judge(CASES, IDS, result, CPU_S)
    assert (report.outcome, report.passed, report.complete) == (outcome, 1, certain)


HUGE = "9" * MAX_DIGITS


@pytest.mark.parametrize(
    ("claimed", "expected", "right"),
    [
        (HUGE, 10**MAX_DIGITS - 1, True),
        ("-" + HUGE, 10**MAX_DIGITS - 1, False),
        (f"[{HUGE}, 1]", [10**MAX_DIGITS - 1, 1], True),
        (HUGE, 3, False),
        ("3", 10**LONG, False),
        (str(10**LONG), 10**LONG, True),
        (str(10 ** (LONG - 1)), 10 ** (LONG - 1), True),
        (f'{{"\\u0000dict":[[{HUGE},1]]}}', {10**MAX_DIGITS - 1: 1}, True),
        (HUGE, 1e300, False),
        ("1" + "0" * 300, 1e300, False),
    ],
)
@pytest.mark.parametrize("rule", [{}, {"exact": False}, {"exact": False, "tolerance": 1e-6}])
def test_long_integers_are_compared_by_their_digits(
    claimed: str, expected: object, right: bool, rule: dict[str, Any]
) -> None:
    case = Case(function="f", args=(), expected=expected, **rule)
    close = claimed.startswith("10") and expected == 1e300 and "tolerance" in rule
    assert equal(parse(claimed), case) is (right or close)


@pytest.mark.parametrize(
    "text",
    [HUGE + "9", "NaN", "Infinity", "-Infinity", "[" * 100_000, "01"],
)
def test_what_the_worker_does_not_write_is_no_answer(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse(text)
    with pytest.raises(ChannelTampered):
        read_claims(f'["a",true,{text}]\n'.encode(), ["a"])


@pytest.mark.parametrize("digits", [LONG + 1, LONG + 2, 4301, 20_000])
def test_digits_equal_their_integer_alone(digits: int) -> None:
    for value in (10 ** (digits - 1), 10**digits - 1, -(10 ** (digits - 1)), 1 - 10**digits):
        text = Digits(str(value))
        assert text == value
        assert [text == other for other in (value + 1, -value, value * 10, value // 10, 1, "1")] == [
            False
        ] * 6
        assert text == Digits(str(value)) != Digits(str(value + 1))
        case = Case(function="f", args=(), expected=[value, {"a": (value,)}])
        assert equal(parse(encode([value, {"a": (value,)}], 0, [MAX_NODES])), case)


def test_values_that_cannot_be_asked_for_are_named_without_writing_them() -> None:
    check_value({"a": [10**MAX_DIGITS - 1, (2, {3: 4})]})
    for value in (
        10 ** (MAX_DIGITS + 1),
        [float("nan")],
        {"a": object()},
        nested(100),
        [10**MAX_DIGITS * 10],
    ):
        with pytest.raises((TypeError, ValueError)):
            check_value(value)


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1." + "3" * 1000])
@pytest.mark.parametrize("expected", [1.5, 10**400, 0])
def test_a_float_that_is_none_of_the_workers_equals_nothing(text: str, expected: object) -> None:
    for rule in ({}, {"exact": False}, {"exact": False, "tolerance": 1e300}):
        assert not equal(parse(text), Case(function="f", args=(), expected=expected, **rule))  # type: ignore[arg-type]


def test_the_beginning_of_a_value_is_shown() -> None:
    small = {"a": [1, 2.5, None, True, "x'y"], "b": (1, {"c": set()})}
    assert shown(small) == "{'a': [1, 2.5, None, True, \"x'y\"], 'b': (1, {'c': {}})}"
    assert shown(Digits("9" * 5000)) == "9" * 2048
    assert shown(10**5000) == "an integer of 16610 bits"
    assert len(shown(["x" * 10_000_000] * 1000)) == 2048
    assert shown(nested(5000)).startswith("[[[[")


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_wrong_answers_of_many_digits_are_judged_and_shown_in_part() -> None:
    cases = [Case(function="f", args=(10**5000, n), expected=10**5000) for n in range(3)]
    answers = "".join(f'["{n}",true,{HUGE}]\n' for n in range(3))
    report = judge(
        cases, ["0", "1", "2"], ExecResult(exit_code=0, stdout=f'["x"]\n{answers}'.encode(), stderr=b""), 1
    )
    assert (report.outcome, report.passed) == (Outcome.UNRESOLVED, 0)
    assert report.failing[2].name == "case 2: f(an integer of 16610 bits, 2)"
    assert report.failing[0].got == HUGE[:2048]
    assert report.failing[0].expected == "an integer of 16610 bits"
