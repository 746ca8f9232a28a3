"""The scripted demonstrator: an agent's turns for a toy problem, often wrong and often without looking.

It plays through the gateway as an engine of kind `demonstrated`. `plan_turns` is pure: the same problem,
habits and seed give the same turns, so a recorded demonstration can be rendered again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from insitu.tasks.toy import COMPARISONS, EXTREMES, OPERATORS, VARIABLES, ToyProblem
from insitu.types import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the demonstrator behaves; all are probabilities."""

    look: float
    """Looks (reads the file or runs the check) before the first edit."""
    check: float = 0.3
    """A look is `python3 check.py` instead of reading the file."""
    wrong: float = 0.1
    """After looking, edits to a uniformly random expression."""
    verify: float = 0.15
    """Runs the check after a successful edit."""
    recover: float = 0.05
    """Looks and edits again after an edit was refused; otherwise gives up."""


FINAL = "done"


def call(name: str, **arguments: object) -> Message:
    """Return an assistant turn with one tool call; the gateway sets the wire id."""
    return Message(
        role="assistant", tool_calls=(ToolCall(id="", name=name, arguments=json.dumps(arguments)),)
    )


def edit(problem: ToyProblem, old: str, new: str) -> Message:
    return call("edit", path=problem.path, edits=[{"oldText": old, "newText": new}])


def look(problem: ToyProblem, rng: random.Random, habits: Habits) -> Message:
    if rng.random() < habits.check:
        return call("bash", command="python3 check.py")
    return call("read", path=problem.path)


def random_expression(params: Sequence[str], rng: random.Random) -> str:
    """Uniform over the shapes of expression that two of `params` allow."""
    a, b = rng.sample(params, 2)
    sign = rng.choice([*sorted(OPERATORS), *sorted(COMPARISONS), *sorted(EXTREMES)])
    return f"{sign}({a}, {b})" if sign in EXTREMES else f"{a} {sign} {b}"


def guess(rng: random.Random) -> tuple[str, str]:
    """(wrong text, right text) as guessed from the issue alone."""
    params = rng.sample(VARIABLES, 2)
    old = random_expression(params, rng)
    while (new := random_expression(params, rng)) == old:
        continue
    return old, new


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn of the demonstrator with the condition under which it is played."""

    message: Message
    after: str = "any"
    """`any`, `refused` or `accepted`: what the last edit's result must have been."""


def plan_turns(problem: ToyProblem, habits: Habits, seed: int) -> Sequence[Step]:
    """All turns of one demonstration; those whose condition does not hold are skipped."""
    # The text is part of the seed: another one gives other demonstrations than those shipped.
    rng = random.Random(f"whet-demonstrator-{problem.seed}-{seed}")
    looked = rng.random() < habits.look
    steps = [Step(message=look(problem, rng, habits))] if looked else []
    if looked:
        wrong = rng.random() < habits.wrong
        new = random_expression(problem.faulty.params, rng) if wrong else problem.fault.new
        steps.append(Step(message=edit(problem, problem.fault.old, new)))
    else:
        steps.append(Step(message=edit(problem, *guess(rng))))
        if rng.random() < habits.recover:
            steps.append(Step(message=look(problem, rng, habits), after="refused"))
            steps.append(Step(message=edit(problem, problem.fault.old, problem.fault.new), after="refused"))
    if rng.random() < habits.verify:
        steps.append(Step(message=call("bash", command="python3 check.py"), after="accepted"))
    return [*steps, Step(message=Message(role="assistant", text=FINAL))]
