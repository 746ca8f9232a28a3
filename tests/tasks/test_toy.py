"""Toy tasks: real faults, hidden cases apart from visible ones, splits that share nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from insitu.errors import TaskError
from insitu.tasks.toy import (
    FAMILIES,
    FUNCTIONS,
    MODULES,
    OPERATORS,
    VARIABLES,
    ToySource,
    call_function,
    check_output,
    make_problem,
    split_of,
    to_oracle,
    visible_inputs,
)
from insitu.types import Limits, task_hash

SEEDS = range(400)


def test_every_family_occurs() -> None:
    assert {make_problem(seed).category for seed in SEEDS} == set(FAMILIES)
    assert len(FAMILIES) >= 6


@pytest.mark.parametrize("seed", SEEDS)
def test_problem_is_a_real_fault(seed: int) -> None:
    problem = make_problem(seed)
    wrong, right = problem.text(solved=False), problem.text(solved=True)
    assert 3 <= len([line for line in wrong.splitlines() if line]) <= 12
    assert wrong.count(problem.fault.old) == 1
    assert wrong.replace(problem.fault.old, problem.fault.new) == right
    cases = to_oracle(problem).cases
    assert all(call_function(right, c.function, c.args) == c.expected for c in cases)
    assert any(call_function(wrong, c.function, c.args) != c.expected for c in cases)


@pytest.mark.parametrize("seed", range(60))
def test_hidden_inputs_are_not_visible_ones(seed: int) -> None:
    problem = make_problem(seed)
    shown = visible_inputs(problem)
    assert all(max(shown) < min(c.args) for c in to_oracle(problem).cases)  # type: ignore[type-var]


def test_a_problem_is_a_function_of_its_seed() -> None:
    assert [make_problem(s) for s in range(20)] == [make_problem(s) for s in range(20)]


def test_issue_names_no_operand_and_no_operation() -> None:
    """Beside the module's and the function's names every issue is the same text."""
    seen = {make_problem(s).prompt.replace(make_problem(s).path, "M", 1) for s in range(300)}
    shapes = {re.sub(rf"\b({'|'.join(FUNCTIONS)})\b", "F", text) for text in seen}
    assert shapes == {"Fix M: F must return what its comment says."}
    assert not set(VARIABLES) & set(FUNCTIONS)


@pytest.mark.slow
def test_no_answer_that_was_learned_by_heart_solves_a_task() -> None:
    """Whoever gives each issue the solution most frequent among its tasks, by whatever edit and knowing the
    order of the parameters, solves less than one task in fifty."""
    solutions: dict[str, Counter[str]] = {}
    for seed in range(3_000):
        problem = make_problem(seed)
        solutions.setdefault(problem.prompt, Counter())[problem.faulty.right] += 1
    assert len(solutions) == len(MODULES) * len(FUNCTIONS)
    # Of the most frequent, one is the task that it would have been learned from.
    by_heart = sum(found.most_common(1)[0][1] - 1 for found in solutions.values())
    assert by_heart / 3_000 < 0.02


@pytest.mark.slow
def test_one_comment_goes_with_several_wrong_lines() -> None:
    """The comment alone cannot give the edit: what it must replace has to be read."""
    shapes: dict[str, set[str]] = {}
    for seed in range(2000):
        problem = make_problem(seed, ["operator", "swapped"])
        first, word, second = re.split(r" ([a-z ]+) ", problem.faulty.meaning)
        old = problem.fault.old
        shapes.setdefault(word, set()).add(old.replace(first, "A").replace(second, "B"))
    assert set(shapes) == set(OPERATORS.values())
    assert all(len(found) >= 4 for found in shapes.values())


@pytest.mark.slow
def test_splits_share_no_content() -> None:
    sources = [ToySource(Limits(), seed=seed) for seed in (0, 1)]
    train = {t.content_hash for s in sources for t in s.tasks("train", 0, 600)}
    held = {t.content_hash for t in sources[0].tasks("eval", 0, 200)}
    assert not train & held
    assert {split_of(h) for h in held} == {"eval"}
    assert {split_of(h) for h in train} == {"train"}
    assert len(held) == 200


def test_eval_tasks_do_not_depend_on_the_seed() -> None:
    first, second = (ToySource(Limits(), seed=s).tasks("eval", 0, 50) for s in (0, 7))
    assert list(first) == list(second)


def test_tasks_are_the_same_in_any_order_of_asking() -> None:
    one, other = ToySource(Limits()), ToySource(Limits())
    late = other.tasks("train", 40, 10)
    assert list(one.tasks("train", 0, 50)[40:]) == list(late)


def test_content_hash_names_the_content() -> None:
    for task in ToySource(Limits()).tasks("train", 0, 20):
        assert task.content_hash == task_hash(task.prompt, task.files, task.grading)


def test_a_foreign_task_has_no_oracle() -> None:
    task = ToySource(Limits(), kinds=["operator"]).tasks("train", 0, 1)[0]
    with pytest.raises(TaskError, match="does not come from this source"):
        ToySource(Limits(), kinds=["swapped"]).oracle(task)


def test_unknown_family_is_named() -> None:
    with pytest.raises(TaskError, match="unknown toy family colour"):
        ToySource(Limits(), kinds=["colour"])


@pytest.mark.slow
@pytest.mark.parametrize("solved", [False, True])
def test_check_script_prints_what_the_demonstrator_expects(tmp_path: Path, solved: bool) -> None:
    source = ToySource(Limits())
    for task in source.tasks("train", 0, 14):
        problem = source.problem(task)
        text = problem.text(solved=solved)
        for name, entry in task.files.items():
            (tmp_path / name).write_bytes(entry.content)
        (tmp_path / problem.path).write_text(text)
        command = [sys.executable, "-B", "check.py"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True)
        assert run.stdout == check_output(problem, text)
        assert run.stdout.startswith("pass" if solved else "fail")
