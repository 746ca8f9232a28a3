"""The soak runs, counts, and finds what it looks for."""

from __future__ import annotations

import json

import pytest

from benchmarks.soak import Soak, main

pytestmark = pytest.mark.slow


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code = main(list(arguments))
    result: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, result
    return result


@pytest.mark.full
@pytest.mark.case(41, 42, 43)
def test_a_few_sessions_for_a_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "--minutes", "0.05", "--sessions", "8", "--seed", "3")
    did = result["did"]
    assert isinstance(did, dict)
    assert {"call", "drop", "retry", "edit"} <= set(did)
    assert isinstance(result["ledger"], dict)
    assert result["ledger"]["trained"] > 0


@pytest.mark.full
@pytest.mark.case(38, 41, 42, 43, 56)
def test_two_hundred_sessions_for_most_of_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "--minutes", "0.75", "--sessions", "200")
    assert isinstance(result["sessions"], int)
    assert result["sessions"] >= 200


def test_leaks_defects_and_growth_are_blamed() -> None:
    class NoGateway:
        pass

    soak = Soak(NoGateway(), 0)  # type: ignore[arg-type]
    first = {"tasks": 3, "descriptors": 9, "defects": 0}
    soak.marks = [{"rss_bytes": size} for size in (1, 1, 100 << 20, 100 << 20, 120 << 20, 120 << 20)]
    soak._check(first, {"tasks": 4, "descriptors": 10, "defects": 2})
    assert [line.split(":")[0].split(" ")[0] for line in soak.tally.wrong] == [
        "2",
        "tasks",
        "descriptors",
        "memory",
    ]
