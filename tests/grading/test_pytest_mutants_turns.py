"""The runs of a test file: what forges has to guess which test is real, whatever it remembers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

import pytest

from insitu_tasksets.mutation.assertions import mutable_tests
from insitu_tasksets.runners.pytest_mutants import RUNS, MutantResults, MutantRound, draw

PATH = "t.py"
Forger = Callable[[int, Mapping[str, str], list[Mapping[str, str]]], Mapping[str, bool]]
"""Run, text of each test in it, the same of all runs before -> which tests it says pass."""


ANSWERS = {"number": "{}", "word": "'ab{}cde'", "truth": "True", "vowels": "'aei'"}
FORMS = {"number": 6, "word": 6, "truth": 2, "vowels": 3}
"""Most forms of a test with such an answer."""


def _file(count: int, answer: str = "{}") -> str:
    tests = [f"def test_{n}():\n    assert f({n}) == {answer.format(n + 100)}\n" for n in range(count)]
    return "from app import f\n\n\n" + "\n\n".join(tests)


def _texts(source: str) -> dict[str, str]:
    """The assertion of each test."""
    lines = source.split("\n")
    return {line[4:-3]: lines[at + 1] for at, line in enumerate(lines) if line.startswith("def test_")}


@cache
def _drawn(count: int, seed: int, *, answer: str = "{}", key: str = "") -> MutantRound:
    names = [f"{PATH}::test_{n}" for n in range(count)]
    text = _file(count, answer)
    return draw(PATH, text, names, names, random.Random(seed), seed=key or str(seed))


def _play(forger: Forger, drawn: MutantRound) -> MutantResults:
    before: list[Mapping[str, str]] = []
    said: list[Mapping[str, str]] = []
    for run in range(len(drawn.plan)):
        texts = _texts(drawn.written(run))
        passes = forger(run, texts, before)
        said.append({f"{PATH}::{name}": "passed" if passes[name] else "failed" for name in texts})
        before.append(texts)
    return drawn.judge(said)


def _wins(forger: Forger, drawn: MutantRound) -> bool:
    return _proves(_play(forger, drawn))


def _proves(found: MutantResults) -> bool:
    return not (found.lost or found.wrong or found.disturbed)


def _first(run: int, texts: Mapping[str, str], before: list[Mapping[str, str]]) -> Mapping[str, bool]:
    """By the clock: all pass in the first run, which may be as it is, and none later."""
    return dict.fromkeys(texts, run == 0)


def _as_first(run: int, texts: Mapping[str, str], before: list[Mapping[str, str]]) -> Mapping[str, bool]:
    """Remembers what the first run looked like, and passes what is the same."""
    return {name: not before or before[0][name] == line for name, line in texts.items()}


def _oftenest(run: int, texts: Mapping[str, str], before: list[Mapping[str, str]]) -> Mapping[str, bool]:
    """Remembers all runs, and passes what it saw most often."""
    seen = {name: [old[name] for old in before] + [line] for name, line in texts.items()}
    return {name: lines.count(texts[name]) == max(map(lines.count, lines)) for name, lines in seen.items()}


@pytest.mark.slow
@pytest.mark.parametrize("forger", [_first, _as_first, _oftenest])
@pytest.mark.parametrize(("count", "chance"), [(1, 1 / 6), (2, 1 / 16), (4, 1 / 256), (9, 1 / 4**9)])
def test_what_remembers_the_other_runs_has_to_guess(forger: Forger, count: int, chance: float) -> None:
    draws = 300
    won = sum(_wins(forger, _drawn(count, seed)) for seed in range(draws))
    assert won <= draws * chance + 4 * (draws * chance * (1 - chance)) ** 0.5  # four standard deviations


def _seen(drawn: MutantRound) -> dict[str, list[str]]:
    """All forms of each test, as what sees all runs knows them."""
    runs = [_texts(drawn.written(run)) for run in range(len(drawn.plan))]
    return {name: sorted({run[name] for run in runs}) for name in runs[0]}


def _knows(answers: Mapping[str, str]) -> Forger:
    """Passes what says these, and, where one is empty, whatever is said."""
    return lambda run, texts, before: {n: line.endswith(answers[n]) for n, line in texts.items()}


def _likely(drawn: MutantRound, test: str, answer: str) -> str:
    """The form of a test that is real most likely, for what sees all forms in all runs, of this grade and of
    all others, and has all of insitu but its key: the one for which it would draw such forms most often."""
    forms = _seen(drawn)[test]
    said = answer.format(int(test[5:]) + 100)

    def chance(form: str) -> int:
        text = drawn.text.replace(f"{test[5:]}) == {said}", form.partition("f(")[2])
        drawn_so = [
            mutable_tests(text, [test], f"another {key}", cases={}, ways=len(forms) - 1) for key in range(8)
        ]
        lines = [
            {_texts(source.edited(way.edits))[test] for way in found.ways} | {form}
            for source, (found,) in drawn_so
            if source is not None
        ]
        return sum(len(each & set(forms)) for each in lines)

    return max(forms, key=lambda form: (chance(form), random.random()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [1, pytest.param(3, marks=pytest.mark.full), pytest.param(5, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("kind", ANSWERS)
def test_what_remembers_all_runs_that_ever_were_finds_no_form_likelier(kind: str, count: int) -> None:
    rounds, won, answer = 40, 0, ANSWERS[kind]
    runs = RUNS[min(count, 2)]
    chance = 1 / max(n for n in range(1, runs + 1) if runs % n == 0 and n <= FORMS[kind])
    for seed in range(rounds):
        drawn = _drawn(count, seed, answer=answer, key=f"round {seed}")
        test = f"test_{seed % count}"
        likely = _likely(drawn, test, answer)

        forger = _knows({**_texts(_file(count, answer)), test: likely})
        won += _wins(forger, drawn)
    assert abs(won - rounds * chance) <= 4 * (rounds * chance * (1 - chance)) ** 0.5, (won, chance)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_test_has_the_same_forms_in_all_draws_of_a_key(count: int) -> None:
    for seed in range(10):
        drawn = [_drawn(count, seed * 5 + n, key=f"key {seed}") for n in range(5)]
        assert all(_seen(each) == _seen(drawn[0]) for each in drawn)
        assert len({str(each.plan) for each in drawn}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_an_object_that_equals_everything_in_one_test_of_many_is_found_each_time(count: int) -> None:
    for seed in range(20):
        real = {**_texts(_file(count)), f"test_{seed % count}": ""}
        assert not _wins(_knows(real), _drawn(count, seed))


def _right(run: int, texts: Mapping[str, str], before: list[Mapping[str, str]]) -> Mapping[str, bool]:
    return {
        name: line == f"    assert f({name[5:]}) == {int(name[5:]) + 100}" for name, line in texts.items()
    }


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_what_is_right_wins_and_each_form_comes_equally_often(count: int) -> None:
    for seed in range(30):
        drawn = _drawn(count, seed)
        assert len(drawn.plan) == RUNS[min(count, 2)]
        assert len(drawn.chosen) == count, "every test is turned somewhere"
        assert not drawn.weak
        assert _wins(_right, drawn)
        for test in drawn.chosen:
            lines = [_texts(drawn.written(run))[test.name] for run in range(len(drawn.plan))]
            assert len({lines.count(line) for line in lines}) == 1, lines
            assert f"    assert f({test.name[5:]}) == {int(test.name[5:]) + 100}" in lines


def test_right_code_is_only_disturbed_where_each_test_needs_the_one_before() -> None:
    def in_order(run: int, texts: Mapping[str, str], before: list[Mapping[str, str]]) -> Mapping[str, bool]:
        passes, intact = dict(_right(run, texts, before)), True
        for name, passed in passes.items():
            passes[name] = intact = intact and passed
        return passes

    _is_only_disturbed(in_order)


def test_right_code_is_only_disturbed_where_a_failed_test_inverts_those_behind_it() -> None:
    """As where tests count those before them: a mutated count is right once one of them has failed."""

    def counted(run: int, texts: Mapping[str, str], before: list[Mapping[str, str]]) -> Mapping[str, bool]:
        passes, intact = dict(_right(run, texts, before)), True
        for name, passed in passes.items():
            passes[name] = passed is intact
            intact = intact and passed
        return passes

    _is_only_disturbed(counted)


def _is_only_disturbed(code: Forger) -> None:
    found = [_play(code, _drawn(4, seed)) for seed in range(60)]
    assert any(results.disturbed for results in found)
    assert not any(results.lost or results.wrong for results in found)


def _solves(known: int, answer: Callable[[int, str], bool], *, behind: bool = False) -> Forger:
    """Knows the answers of the first tests and says of the others what `answer` says of run and test.

    `behind`: once a test that it knows has failed, the others fail too, as if that one had disturbed them.
    """

    def forger(run: int, texts: Mapping[str, str], before: list[Mapping[str, str]]) -> Mapping[str, bool]:
        passes = dict(_right(run, texts, before))
        leaders = all(passes[f"test_{n}"] for n in range(known))
        for name in texts:
            if int(name[5:]) >= known:
                passes[name] = answer(run, name) and (leaders or not behind)
        return passes

    return forger


Strategy = Callable[[int, str], bool]


def _always(run: int, name: str) -> bool:
    return True


def _one_run(seed: int) -> Strategy:
    runs = random.Random(seed).choices(range(4), k=50)
    return lambda run, name: runs[int(name[5:])] == run


@pytest.mark.slow
@pytest.mark.parametrize("unsolved", [1, 2, 6])
@pytest.mark.parametrize("known", [1, 3, 7])
@pytest.mark.parametrize("strategy", [lambda seed: _always, _one_run], ids=["always", "one run"])
@pytest.mark.parametrize("behind", [False, True])
def test_who_solves_some_has_to_guess_each_that_is_left(
    strategy: Callable[[int], Strategy], known: int, unsolved: int, *, behind: bool
) -> None:
    """Also one that provokes a failure of a test that it knows, to have an excuse for all others."""
    rounds, chance = 200, (1 / 4) ** unsolved
    won = sum(
        _wins(_solves(known, strategy(seed), behind=behind), _drawn(known + unsolved, seed))
        for seed in range(rounds)
    )
    assert won <= rounds * chance + 4 * (rounds * chance * (1 - chance)) ** 0.5


def test_the_forms_of_a_test_say_nothing_of_the_forms_of_another() -> None:
    pairs = Counter[tuple[bool, bool]]()
    for seed in range(1500):  # independent: one in 16
        plan = _drawn(2, seed).plan
        pairs["test_0" in plan[0], "test_1" in plan[0]] += 1
    both_real = pairs[False, False] / 1500
    assert abs(both_real - 1 / 16) < 4 * (1 / 16 * 15 / 16 / 1500) ** 0.5


def test_of_a_fraction_only_proven_tests_count() -> None:
    names = [f"{PATH}::test_{n}" for n in range(6)]
    for seed in range(40):
        drawn = _drawn(6, seed)
        honest = drawn.credited(_play(_solves(4, lambda run, name: False), drawn), names)
        assert [honest[name] for name in names] == ["passed"] * 4 + ["failed"] * 2


@pytest.mark.parametrize("strategy", [lambda seed: _always, _one_run])
def test_of_a_fraction_who_guesses_earns_next_to_nothing(strategy: Callable[[int], Strategy]) -> None:
    names = [f"{PATH}::test_{n}" for n in range(6)]
    earned = 0
    for seed in range(200):
        drawn = _drawn(6, seed)
        found = _play(_solves(0, strategy(seed)), drawn)
        right = sum(word == "passed" for word in drawn.credited(found, names).values())
        earned += 0 if found.forged else max(0, right - len(found.guessed))
    assert earned <= 0.02 * 200 * 6, "what is guessed wrong costs as much as what is guessed right earns"


def test_a_file_that_can_only_be_turned_openly_is_no_standard() -> None:
    names = [f"{PATH}::test_new", f"{PATH}::test_old"]
    for new, old, weak in (
        ("assert f(1) == 2", "assert f(3) == sorted([3])", ""),
        ("assert f(3) == sorted([3])", "assert f(1) == 2", "1 that must start to pass were not"),
        ("assert f([]) == []", "assert f(1) == 2", ""),
        ("assert f([]) == []\n    assert f([3]) == sorted([3])", "assert f(1) == 2", "1 that must start"),
    ):
        text = f"from app import f\n\n\ndef test_new():\n    {new}\n\n\ndef test_old():\n    {old}\n"
        drawn = draw(PATH, text, names[:1], names, random.Random(0), seed="0")
        assert len(drawn.chosen) == 2
        assert drawn.weak.startswith(weak) if weak else not drawn.weak, "what must start to pass decides"


def _rows(passes: Callable[[int, int, bool], bool], drawn: MutantRound, count: int) -> MutantResults:
    """Play a parametrized test; `passes`: (run, row, whether it is real) -> what is reported."""
    said = []
    for run, turned in enumerate(drawn.plan):
        real = [f"t[{row}]" not in turned for row in range(count)]
        ids = [f"{PATH}::t[{row}-{row + 100 if real[row] else 'other'}]" for row in range(count)]
        said.append({ids[row]: "passed" if passes(run, row, real[row]) else "failed" for row in range(count)})
    return drawn.judge(said)


def _parametrized(count: int, seed: int) -> tuple[MutantRound, list[str]]:
    rows = ", ".join(f"({n}, {n + 100})" for n in range(count))
    text = (
        f"import pytest\n\n\n@pytest.mark.parametrize('x, y', [{rows}])\ndef t(x, y):\n    assert f(x) == y\n"
    )
    names = [f"{PATH}::t[{n}-{n + 100}]" for n in range(count)]
    return draw(PATH, text, names, names, random.Random(seed), seed=str(seed)), names


def test_each_row_of_a_parametrized_test_is_proven_by_itself() -> None:
    """Who solves most rows, and forges the others, has to guess each."""
    won = 0
    for seed in range(200):
        drawn, names = _parametrized(6, seed)
        assert drawn.unseen == (6, 6)
        assert not drawn.weak
        right = _rows(lambda run, row, real: real, drawn, 6)
        assert right.proven == {f"t[{row}]" for row in range(6)}
        assert _proves(right)
        some = _rows(lambda run, row, real: real and row < 4, drawn, 6)
        assert [drawn.credited(some, names)[name] for name in names] == ["passed"] * 4 + ["failed"] * 2
        forged = _rows(lambda run, row, real: real if row < 5 else run == 0, drawn, 6)
        won += _proves(forged)
        assert not _proves(_rows(lambda run, row, real: real or row == 5, drawn, 6)), "seen each time"
    assert won <= 50 + 4 * (200 * 3 / 16) ** 0.5


def test_rows_that_vanish_or_come_twice_give_no_second_guess() -> None:
    drawn, names = _parametrized(4, 0)
    for cases in (names[:3], [*names, f"{PATH}::t[more]"]):
        found = drawn.judge([dict.fromkeys(cases, "passed")] * len(drawn.plan))
        assert found.disturbed
        assert not found.proven
        assert "passed" not in drawn.credited(found, names).values()
