"""Tasks of the demo with a real model: short Python functions, described in a sentence, with hidden cases.

`TRAINED` has every kind of `KINDS` under several names; a part is held out. `UNSEEN` has kinds that are never
trained. A reward is the share of the cases that pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from insitu.agents.single_turn import code_blocks, target
from insitu.types import Task

ASK = "Write a Python function {name}({args}) that returns {what}. Reply with code only."
ONE: Mapping[str, Callable[[int], object]] = {
    "twice {a}": lambda a: 2 * a,
    "{a} plus 1": lambda a: a + 1,
    "the square of {a}": lambda a: a * a,
    "{a} times 3": lambda a: 3 * a,
    "{a} minus 5": lambda a: a - 5,
    "the negative of {a}": lambda a: -a,
    "the absolute value of {a}": abs,
    "True if {a} is even": lambda a: a % 2 == 0,
    "True if {a} is positive": lambda a: a > 0,
    "the cube of {a}": lambda a: a**3,
    "half of {a}": lambda a: a / 2,
    "{a} modulo 10": lambda a: a % 10,
}
TWO: Mapping[str, Callable[[int, int], object]] = {
    "the sum of {a} and {b}": lambda a, b: a + b,
    "{a} minus {b}": lambda a, b: a - b,
    "the product of {a} and {b}": lambda a, b: a * b,
    "the larger of {a} and {b}": max,
    "the smaller of {a} and {b}": min,
    "True if {a} equals {b}": lambda a, b: a == b,
    "True if {a} is greater than {b}": lambda a, b: a > b,
    "the average of {a} and {b}": lambda a, b: (a + b) / 2,
}
NEW_ONE: Mapping[str, Callable[[int], object]] = {
    "{a} divided by 4": lambda a: a / 4,
    "{a} plus 10": lambda a: a + 10,
    "True if {a} is odd": lambda a: a % 2 == 1,
    "True if {a} is negative": lambda a: a < 0,
    "{a} times {a} plus 1": lambda a: a * a + 1,
}
NEW_TWO: Mapping[str, Callable[[int, int], object]] = {
    "{a} plus twice {b}": lambda a, b: a + 2 * b,
    "True if {a} is less than {b}": lambda a, b: a < b,
    "True if {a} and {b} are different": lambda a, b: a != b,
}
NAMES = ("f", "g", "calc", "solve", "compute", "value", "run", "result", "get", "answer")
ARGUMENTS = (("x", "y"), ("a", "b"), ("n", "m"), ("p", "q"), ("u", "v"))
CASES = 6


def rows(kinds: Mapping[str, Callable[..., object]], names: Sequence[str], count: int) -> Iterator[Any]:
    """Yield a task for each kind, of functions with `count` arguments, under each name."""
    for what, function in kinds.items():
        for name in names:
            rng = random.Random(f"{what} {name}")
            a, b = rng.choice(ARGUMENTS)
            args = [a, b][:count]
            given = [[rng.randint(-20, 40) for _ in args] for _ in range(CASES - 3)]
            # Signs, and equal arguments, would hardly come by chance: without them a constant may pass.
            given += [[-3] * count, [8, 5][:count], [4, 9][:count]]
            yield {
                "id": f"{what.format(a='a', b='b')}/{name}".replace(" ", "-"),
                "prompt": ASK.format(name=name, args=", ".join(args), what=what.format(a=a, b=b)),
                "files": {"solution.py": "# empty\n"},
                "entry": "solution.py",
                "cases": [{"function": name, "args": one, "expected": function(*one)} for one in given],
                "reward": "fraction",
            }


TRAINED = [*rows(ONE, NAMES, 1), *rows(TWO, NAMES, 2)]
UNSEEN = [*rows(NEW_ONE, NAMES[:4], 1), *rows(NEW_TWO, NAMES[:4], 2)]


def first_block(reply: str, task: Task) -> Mapping[str, str]:
    """Return the first code block of a reply, else the reply, as the file under test.

    Small models add examples and explanations behind it, which only cost tokens.
    """
    return {target(task): next(iter(code_blocks(reply)), reply)}
