"""Turned tests: they expect another value, keep their shape, and fail for whoever is right."""

from __future__ import annotations

import ast
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.grade.near import near
from whet.grade.turning import turned

HEAD = "import pytest\nfrom app import f\n\n\n"

LITERAL = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(max_size=6)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.sets(st.integers(0, 3), max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(value=LITERAL, seed=st.integers(0, 2**32))
def test_a_near_value_is_another_one_of_the_same_type(value: object, seed: int) -> None:
    other = near(value, random.Random(seed))
    assert other != value
    assert ast.literal_eval(repr(other)) == other
    if value is not None:
        assert type(other) is type(value)
    if isinstance(value, float | int) and not isinstance(value, bool):
        assert other != pytest.approx(value)


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
        found = turned(text, [name], random.Random(seed))
        assert found.names == found.hidden == {name}
        assert found.text != text
        assert _shape(found.text) == _shape(text)


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
    "a sum": "def test_a():\n    assert f(2) + f(3)\n",
}


@pytest.mark.parametrize("body", OPEN.values(), ids=OPEN.keys())
def test_what_cannot_be_turned_unseen_is_turned_openly(body: str) -> None:
    found = turned(whole(body), ["test_a"], random.Random(3))
    assert found.names == {"test_a"}
    assert found.hidden == set()
    assert found.text != whole(body)


FLIPS = {
    "assert f(2)": "assert not f(2)",
    "assert not f(2)": "assert f(2)",
    "assert abs(f(2) - 1.5) < 1e-6": "assert abs(f(2) - 1.5) >= 1e-06",
    "assert (f(2) in\n        [1])": "assert (f(2) not in [1])",
    "assert f(2) != 3": "assert f(2) == 3",
}


@pytest.mark.parametrize(("real", "flipped"), FLIPS.items())
def test_what_asks_a_question_asks_the_opposite(real: str, flipped: str) -> None:
    text = whole(f"def test_a():\n    {real}\n    f(1)\n")
    found = turned(text, ["test_a"], random.Random(0))
    assert found.hidden == {"test_a"}
    assert found.text == text.replace(real, flipped)


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
    found = turned(whole(body), ["test_a"], random.Random(3))
    assert found.names == set()
    assert found.text == whole(body)


def test_no_more_than_four_and_the_unseen_first() -> None:
    tests = [f"def test_{n}():\n    assert f({n}) == {n}\n" for n in range(6)]
    tests.append("def test_open():\n    assert f(9)\n")
    names = [*(f"test_{n}" for n in range(6)), "test_open"]
    found = turned(whole("\n\n".join(tests)), names, random.Random(0))
    assert len(found.names) == 4
    assert found.hidden == found.names
    tests[-1] = "def test_open():\n    assert f(9) + 1\n"
    few = turned(whole("\n\n".join(tests[5:])), names, random.Random(0))
    assert few.names == {"test_5", "test_open"}
    assert few.hidden == {"test_5"}
