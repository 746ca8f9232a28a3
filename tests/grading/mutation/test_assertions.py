"""Turned tests: they expect another value, keep their shape, and fail for whoever is right."""

from __future__ import annotations

import ast
import gzip
import io
import json
import random
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from insitu_tasksets.mutation.assertions import mutable_tests
from insitu_tasksets.mutation.literals import wrong_literal

TESTS = Path(__file__).parents[2]

HEAD = "import pytest\nfrom app import f\n\n\n"


@dataclass(frozen=True)
class Turned:
    text: str
    names: set[str]
    hidden: set[str]
    count: int


def turned(text: str, wanted: list[str], seed: int) -> Turned:
    """`text` with the `wanted` tests turned, each in its first way; a row may have none."""
    source, found = mutable_tests(text, wanted, str(seed), cases={})
    return Turned(
        text=source.edited([edit for test in found for way in test.ways[:1] for edit in way.edits])
        if source
        else text,
        names={test.name for test in found},
        hidden={test.name for test in found if test.hidden},
        count=sum(bool(test.ways) for test in found),
    )


def _grouped(digits: str) -> str:
    return "_".join([digits[:-3], digits[-3:]]) if len(digits) > 3 else digits


TOKEN = (
    st.sampled_from(
        ["True", "False", "0b1101", "0o17", "1e-06", "1.5E+3", ".5", "5.", "0.0", "3J", '""', "1e5"]
    )
    | st.integers(0, 10**12).map(str)
    | st.integers(0, 10**7).map(lambda n: _grouped(str(n)))
    | st.integers(2, 10**9).map(hex)
    | st.integers(2, 10**9).map(lambda n: f"0X{n:08X}")
    | st.floats(2.0**-20, 2.0**40, allow_nan=False, width=32).map(repr)
    | st.tuples(
        st.sampled_from(["", "r", "b", "u", "Rb"]), st.text("abXY019 -(", min_size=1, max_size=8)
    ).map(lambda both: f'{both[0]}"{both[1]}"')
    | st.text("abXY019é\n\t\\\x01", min_size=1, max_size=8).map(repr)
)


@settings(max_examples=300)
@example(token="0xf518a", seed=4863)  # one in the last digit is within the tolerance of `pytest.approx`
@example(token="12345678J", seed=1)
@given(token=TOKEN, seed=st.integers(0, 2**32))
def test_a_near_token_has_the_form_and_another_value(token: str, seed: int) -> None:
    value = ast.literal_eval(token)
    try:
        others = wrong_literal(token, random.Random(seed), 5)
    except ValueError:
        return
    values = [ast.literal_eval(other) for other in others]
    assert len({repr(each) for each in (value, *values)}) == 1 + len(others)
    for other_token, other in zip(others, values, strict=True):
        assert type(other) is type(value)
        if isinstance(value, float | int | complex) and not isinstance(value, bool):
            assert other != pytest.approx(value)
        if not isinstance(value, bool):
            assert len(other_token) == len(token)
            assert sum(a != b for a, b in zip(token, other_token, strict=True)) == 1


def test_an_int_that_no_float_holds_has_near_ones() -> None:
    assert len(wrong_literal("1" + "0" * 400, random.Random(0), 9)) == 8


@pytest.mark.parametrize("token", ["1e-13", "None", '""', "'   '", "0b11", "0e5", "'\\\\'"])
def test_what_has_no_family_has_nothing_near(token: str) -> None:
    with pytest.raises(ValueError, match="no other form"):
        wrong_literal(token, random.Random(0), 1)


FAMILIES = [
    "0", "7", "42", "105", "1000", "123456789", "0.5", "0.50", "0.0", "-2.5e-3"[1:], "1e5", "0xFF", "0x1b",
    "0b1101", "True", "'hello-world'", "'Zoë'", "'a1'", "'(('", "'\\x1b'", "'\\x11'", "'x\\n'", "b'ab'",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("token", FAMILIES)
def test_a_family_is_drawn_for_each_of_its_members_as_often(token: str, start: int) -> None:
    """So that code that sees the members of a family cannot infer for which of them it was drawn."""
    draws = 800
    category = frozenset([token, *wrong_literal(token, random.Random(start), 1)])
    drawn = [
        sum(category == {one, *wrong_literal(one, random.Random(seed), 1)} for seed in range(draws))
        for one in sorted(category)
    ]
    mean = sum(drawn) / len(drawn)
    assert min(drawn) >= mean - 5 * mean**0.5, dict(zip(sorted(category), drawn, strict=True))


@pytest.mark.parametrize(
    ("token", "form"),
    [
        ("0xFF", r"0x[A-F]F|0xF[A-F]"),
        ("0x00ff", r"0x00[a-f][a-f]"),
        ("1_000_000", r"[2-9]_000_000"),
        ("1.50E+3", r"[1-9]\.[1-9]0E\+3"),
        ('"hello-world"', r'"[a-z]{5}-[a-z]{5}"'),
        ("r'C7'", r"r'C[1-9]'"),
        ('"\\x1b"', r'"\\x1[a-f]"'),
        ("'(('", r"'(\(\)|\)\()'"),
    ],
)
def test_a_near_token_keeps_what_a_person_wrote(token: str, form: str) -> None:
    for seed in range(30):
        for other in wrong_literal(token, random.Random(seed), 3):
            assert re.fullmatch(form, other), other


def whole(body: str) -> str:
    return HEAD + body


HIDDEN = {
    "literal": "def test_a():\n    x = f(1)\n    assert x == 9\n",
    "on the left": "def test_a():\n    assert 'ab' == f(1)\n",
    "not the last": "def test_a():\n    assert f(1) == 9\n    f(2)\n",
    "rows of a loop": (
        "def test_a():\n    for items, want in [([1, 2], 3), ([4], 4)]:\n        assert f(items) == want\n"
    ),
    "an assignment": "def test_a():\n    want = {'a': [1, 'xé']}\n    assert f('é') == want\n",
    "parametrize": (
        "@pytest.mark.parametrize('x, y', [(1, 2), (3, 'abc')])\ndef test_a(x, y):\n    assert f(x) == y\n"
    ),
    "one parameter": (
        "@pytest.mark.parametrize('y', [2, 3], ids=['a', 'b'])\ndef test_a(y):\n    assert f() == y\n"
    ),
    "unittest": "class T:\n    def test_a(self):\n        self.assertEqual(f(3), -5)\n",
    "a wrapper": "def test_a():\n    assert tuple(f(1)) == tuple([1, 2])\n",
    "is": "def test_a():\n    assert f(2) is True\n",
    "approx": "def test_a():\n    assert f(2) == pytest.approx(0.33)\n",
    "a helper": ("def check(g):\n    assert g(1) == [\n        2,\n    ]\n\n\ndef test_a():\n    check(f)\n"),
}


@pytest.mark.parametrize("body", HIDDEN.values(), ids=HIDDEN.keys())
def test_a_turned_test_has_the_shape_of_the_real_one(body: str) -> None:
    text = whole(body)
    name = "T::test_a" if "class T" in body else "test_a"
    for seed in range(20):
        found = turned(text, [name], seed)
        assert found.names == found.hidden == {name}
        assert found.text != text
        assert _shape(found.text) == _shape(text)


FORMS = """
def test_a():
    x = f("it's")
    want = [
        "hello-world",  # the first
        r'\\d+é',
        (0xFF, 1_000_000, -2.50e-3, b"ab"),
    ]
    assert x == want, "no"
"""


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def _changed(real: str, other: str) -> list[str]:
    """What stands in another token's place, where the token streams differ in nothing else."""
    before, after = _tokens(real), _tokens(other)
    assert [token.type for token in before] == [token.type for token in after]
    assert [token.start[0] for token in before] == [token.start[0] for token in after]
    return [new.string for old, new in zip(before, after, strict=True) if old.string != new.string]


def test_one_token_of_the_file_is_another_and_of_the_same_length() -> None:
    text = whole(FORMS)
    for seed in range(40):
        found = turned(text, ["test_a"], seed)
        assert found.hidden == {"test_a"}
        (token,) = _changed(text, found.text)
        assert "'" not in token or token[0] == "r"
        assert list(map(len, found.text.split("\n"))) == list(map(len, text.split("\n")))


def _corpus() -> list[str]:
    """Sources with tests as people write them: some of this project's own and HumanEval's."""
    rows = gzip.decompress((TESTS / "data/HumanEval.jsonl.gz").read_bytes()).decode().splitlines()
    checks = [json.loads(row) for row in rows]
    human = [f"{row['test']}\n\ndef test_it():\n    check({row['entry_point']})\n" for row in checks]
    own = [path.read_text() for path in sorted(TESTS.glob("*/test_*.py"))[::12]]
    return [*human, *own]


@pytest.mark.slow
def test_files_of_people_keep_all_tokens_but_one_for_each_test() -> None:
    turned_tests = 0
    for number, text in enumerate(_corpus()):
        names = [
            n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"
        ]
        before = [(token.type, token.string) for token in _tokens(text)]
        for name in names[:2]:
            found = turned(text, [name], number)
            if not found.hidden:
                continue
            turned_tests += 1
            after = [(token.type, token.string) for token in _tokens(found.text)]
            same = len(before) == len(after)
            assert ast.parse(found.text).body
            if same:
                assert sum(old != new for old, new in zip(before, after, strict=True)) == found.count
            else:  # `not` came or went, or an empty list has something in it
                assert abs(len(before) - len(after)) == 1
    assert turned_tests > 150


def test_what_the_rest_of_the_file_says_is_left_as_it_is_where_another_value_will_do() -> None:
    said = (
        'def test_sums_to_42():\n    """The second is 17."""\n    assert f(1) == 42\n    assert f(2) == 17\n'
        "    assert f(3) == 99  # 99\n    assert f(4) == 23\n    assert f(5) == 66\n\n\n"
        "def test_again():\n    assert f(5) == 66\n"
    )
    for seed in range(20):
        found = turned(whole(said), ["test_sums_to_42"], seed)
        assert "f(4) == 23" not in found.text
    assert turned(whole(said), ["test_again"], 0).hidden == {"test_again"}


ROWS = (
    "@pytest.mark.parametrize('x, y', [(1, 22), (3, 44), (5, 66)])\ndef test_a(x, y):\n    assert f(x) == y\n"
)


@pytest.mark.parametrize("cases", [0, 3])
def test_each_row_that_is_a_test_of_its_own_by_itself(cases: int) -> None:
    source, found = mutable_tests(whole(ROWS), ["test_a"], "0", cases={"test_a": cases}, ways=5)
    assert source is not None
    assert [(test.row, test.hidden, len(test.ways)) for test in found] == [(n, True, 5) for n in range(3)]
    for test in found:
        assert all(len(_changed(whole(ROWS), source.edited(way.edits))) == 1 for way in test.ways)


@pytest.mark.parametrize(
    ("body", "cases"),
    [
        (ROWS, 2),
        ("@pytest.mark.parametrize('x', [2, 4])\ndef test_a(x):\n    assert f(x) == 7\n", 2),
        ("@pytest.mark.parametrize('x', [2, 4])\ndef test_a(x):\n    assert f(x) == 7\n", 0),
        ("def test_a(some):\n    assert f(some) == 7\n", 2),
        (
            "@pytest.fixture(params=[2, 4])\ndef some(request):\n    return request.param\n\n\n"
            "def test_a(some):\n    assert f(some) == 7\n",
            0,
        ),
    ],
)
def test_cases_that_can_only_be_turned_together_are_turned_openly(body: str, cases: int) -> None:
    """A case that the candidate solves would say which are real."""
    _, found = mutable_tests(whole(body), ["test_a"], "0", cases={"test_a": cases})
    assert [(test.row, test.hidden) for test in found] == [(None, False)]


@pytest.mark.parametrize(("row", "hidden", "nothing"), [("None", False, True), ("g(2)", None, None)])
def test_a_row_without_another_form(row: str, *, hidden: bool | None, nothing: bool | None) -> None:
    text = whole(ROWS.replace("(3, 44)", f"(3, {row})"))
    _, found = mutable_tests(text, ["test_a"], "0", cases={"test_a": 3})
    assert [(test.hidden, test.nothing) for test in found if test.row == 1] == [(hidden, nothing)] * (
        hidden is not None
    )


def _shape(text: str) -> list[str]:
    """The kinds of nodes, without what literals hold."""
    kinds: list[str] = []

    def visit(node: ast.AST) -> None:
        try:
            ast.literal_eval(node)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            kinds.append(type(node).__name__)
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(text))
    return kinds


OPEN = {
    "no literal": "def test_a():\n    assert f(2) == sorted([2])\n",
    "a tolerance of its own": "def test_a():\n    assert 5 == pytest.approx(f(2), abs=3)\n",
    "used twice": "def test_a():\n    want = 3\n    assert f(want) == want\n",
    "set twice": "def test_a():\n    want = 3\n    want = f(1)\n    assert f(2) == want\n",
    "indirect": "@pytest.mark.parametrize('y', [2], indirect=True)\ndef test_a(y):\n    assert f() == y\n",
    "another": "def test_a():\n    assert f(2) != 3\n",
    "nothing": "def test_a():\n    assert f(2) == None\n",
    "an empty list": "def test_a():\n    assert f(2) == []\n",
    "a sum": "def test_a():\n    assert f(2) + f(3)\n",
}


@pytest.mark.parametrize("body", OPEN.values(), ids=OPEN.keys())
def test_what_cannot_be_turned_unseen_is_turned_openly(body: str) -> None:
    found = turned(whole(body), ["test_a"], 3)
    assert found.names == {"test_a"}
    assert found.hidden == set()
    assert found.text != whole(body)


FLIPS = {
    "assert f(2)": "assert not f(2)",
    "assert not f(2)": "assert f(2)",
    "assert abs(f(2) - 1.5) < 1e-6": "assert abs(f(2) - 1.5) >= 1e-6",
    "assert (f(2) in\n        [1])  # so": "assert (f(2) not in\n        [1])  # so",
    "assert (f(2) <= 0x0F), 'no'": "assert (f(2) > 0x0F), 'no'",
    "assert f(2)  is  not None": "assert f(2)  is None",
    "assert f(2) not in (1,  2)": "assert f(2) in (1,  2)",
    "assert not(f(2))": "assert (f(2))",
    "assert f(2).ok": "assert not f(2).ok",
}


@pytest.mark.parametrize(("real", "flipped"), FLIPS.items())
def test_what_asks_a_question_asks_the_opposite(real: str, flipped: str) -> None:
    text = whole(f"def test_a():\n    {real}\n    f(1)\n")
    found = turned(text, ["test_a"], 0)
    assert found.hidden == {"test_a"}
    assert found.text == text.replace(real, flipped)


METHODS = {
    "self.assertTrue(f(2), 'no')": "self.assertFalse(f(2), 'no')",
    "self.assertIn(f(2), [1])": "self.assertNotIn(f(2), [1])",
    "self.assertIsNone( f(2) )": "self.assertIsNotNone( f(2) )",
    "self.assertLess(f(2), f(3))": "self.assertGreaterEqual(f(2), f(3))",
    "self.assertIs(f(2), True)": "self.assertIs(f(2), False)",
}


@pytest.mark.parametrize(("real", "flipped"), METHODS.items())
def test_a_question_of_unittest_asks_the_opposite(real: str, flipped: str) -> None:
    text = whole(f"class Case:\n    def test_a(self):\n        {real}\n        f(1)\n")
    found = turned(text, ["Case::test_a"], 0)
    assert found.hidden == {"Case::test_a"}
    assert found.text == text.replace(real, flipped)


MADE = [
    ("self.assertEqual(f(2), Point(3, 4))", r"Point\(\d, 4\)"),
    ("self.assertEqual(f(2), [Point(x=3), Point(x=4)])", r"\[Point\(x=\d\), Point\(x=4\)\]"),
    ("self.assertEqual(f(2), date(2020, 1, 7))", r"date\(2020, 1, \d\)"),
    ("self.assertEqual(f(2), Tree(Tree(5), Tree(6)))", r"Tree\(Tree\(\d\), Tree\(6\)\)"),
    ("self.assertEqual(f(2), {3} | Numbers([1, 2]))", None),
    ("self.assertEqual(f(2), Numbers([1, 1, 2]))", None),
    ("self.assertEqual(f(2), max([1, 2]))", None),
    ("self.assertAlmostEqual(f(2), 14.5)", r"self.assertAlmostEqual\(f\(2\), \d+\.\d\)"),
    ("self.assertAlmostEqual(f(2), 14.5, places=1)", None),
    ("self.assertAlmostEqual(f(2), 14.5, delta=20)", None),
]


@pytest.mark.parametrize(("real", "form"), MADE)
def test_an_object_is_made_with_another_first_argument(real: str, form: str | None) -> None:
    """Where another argument surely makes another object; `form` None: only openly."""
    text = whole(f"class Case:\n    def test_a(self):\n        {real}\n")
    found = turned(text, ["Case::test_a"], 0)
    assert found.hidden == ({"Case::test_a"} if form else set())
    if form:
        assert re.search(form, found.text), found.text
        assert found.text != text


@pytest.mark.parametrize("how", ["pytest.raises(KeyError)", "self.assertRaises(KeyError) as caught"])
def test_an_expected_error_is_another_one(how: str) -> None:
    text = whole(f"class Case:\n    def test_a(self):\n        with {how}:\n            f(2)\n")
    seen = {turned(text, ["Case::test_a"], seed).text for seed in range(60)}
    assert len(seen) == 6, "each other error of those of which none is a kind of another"
    assert text not in seen
    twice = text + "        assert type(caught.exception) is KeyError\n"
    assert "is not KeyError" in turned(twice, ["Case::test_a"], 0).text, "it would say which one is meant"


@pytest.mark.parametrize(
    ("body", "nothing"),
    [
        ("self.assertEqual(f(2), [])", True),
        ("want = ['', None]\n        self.assertEqual(f(2), want)", True),
        ("self.assertEqual(f(2), {'a': None})", False),
        ("helper(f(3))\n        self.assertEqual(f(2), [])", False),
        ("self.assertCountEqual(f(2), set())\n        assert f(3) == None", True),
        ("self.assertEqual(f(2), [])\n        self.assertEqual(f(3), sorted([3]))", False),
        ("self.assertEqual(f(2), [])\n        self.check(f(3))", False),
        ("self.assertEqual(f(2), [0])", False),
        ("f(2)", False),
    ],
)
def test_a_test_that_expects_nothing_is_known(body: str, *, nothing: bool) -> None:
    text = whole(f"def helper(x):\n    assert x\n\n\nclass Case:\n    def test_a(self):\n        {body}\n")
    _, found = mutable_tests(text, ["Case::test_a"], "0", cases={})
    assert any(test.nothing for test in found) is nothing


NEVER = {
    "may end before": "def test_a():\n    if f(0):\n        return\n    assert f(1) == 9\n",
    "no assertion": "def test_a():\n    with f(1):\n        pass\n",
    "a loop that may be empty": "def test_a():\n    for x in f():\n        assert x == 3\n",
    "a helper that others call": (
        "def check(g):\n    assert g(1) == 2\n\n\n"
        "def test_a():\n    check(f)\n\n\ndef test_b():\n    check(f)\n"
    ),
}


@pytest.mark.parametrize("body", NEVER.values(), ids=NEVER.keys())
def test_what_a_pass_does_not_prove_to_have_run_is_left_alone(body: str) -> None:
    found = turned(whole(body), ["test_a"], 3)
    assert found.names == set()
    assert found.text == whole(body)


def test_every_test_and_the_unseen_first() -> None:
    tests = [f"def test_{n}():\n    assert f({n}) == {n}\n" for n in range(6)]
    tests.insert(0, "def test_open():\n    assert f(9) + 1\n")
    names = ["test_open", *(f"test_{n}" for n in range(6))]
    source, found = mutable_tests(whole("\n\n".join(tests)), names, "0", cases={}, ways=5)
    assert source is not None
    assert [test.name for test in found] == [*names[1:], "test_open"]
    assert [test.hidden for test in found] == [True] * 6 + [False]
    assert [len(test.ways) for test in found] == [5] * 6 + [1]


def test_a_value_that_stands_elsewhere_too_is_left_where_another_will_do() -> None:
    body = 'def test_a():\n    assert f("spam") == ["spam", 100, "eggs"]\n    assert f(100) == 42\n'
    seen = {turned(whole(body), ["test_a"], seed).text for seed in range(40)}
    assert all('== ["spam", 100, ' in text for text in seen)
    assert len(seen) > 5


def test_what_the_text_of_an_f_string_says_is_said() -> None:
    """From Python 3.12 on its text is a token of another kind."""
    body = 'def test_a():\n    print(f"{f(1)} is no 777")\n    assert f(1) == 777\n    assert f(2) == 42\n'
    texts = {turned(whole(body), ["test_a"], seed).text for seed in range(20)}
    assert all("f(1) == 777" in text for text in texts)
