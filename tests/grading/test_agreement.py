"""How far a judge agrees with labels, in Python and by `insitu tasks judge`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from judge_lab import KEY, judge_at, scored

from insitu.cli import main
from insitu.errors import ConfigError
from insitu_tasksets.judges import Ranking, Rubric, agreement


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def row(number: int, diff: str, label: float) -> dict[str, object]:
    return {"id": f"row{number}", "prompt": "Do it.", "diff": diff, "label": label}


async def test_accuracy_and_kappa_of_a_rubric(tmp_path: Path) -> None:
    async with judge_at(tmp_path, scored(lambda name, diff: 9 if "good" in diff else 1)) as (_, client):
        judge = Rubric(criteria={"right": (1.0, "It is right.")}, endpoint=client)
        rows = [row(n, f"good {n}", 1) for n in range(4)] + [row(n, f"bad {n}", 0) for n in range(4, 8)]
        found = await agreement(judge, rows)
        assert (found.count, found.accuracy, found.kappa, found.failed) == (8, 1.0, 1.0, ())
        rows[0] = row(0, "bad 0", 1.0)
        rows[7] = row(7, "good 7", 0.2)
        found = await agreement(judge, rows)
        assert (found.accuracy, found.kappa, found.disagree) == (0.75, 0.5, ("row0", "row7"))
        always = await agreement(judge, [row(n, f"good {n}", n % 2) for n in range(8)])
        assert (always.accuracy, always.kappa) == (0.5, 0.0)
        with pytest.raises(ConfigError, match="row1: label must be a number from 0 to 1"):
            await agreement(judge, [row(1, "x", 7)])
        with pytest.raises(ConfigError, match="row1: diff must be a text"):
            await agreement(judge, [row(1, "x", 1) | {"diff": None}])


async def test_pairs_for_a_ranking_and_rows_without_a_verdict(tmp_path: Path) -> None:
    async with judge_at(tmp_path, scored(lambda name, text: 30 if text == "odd" else len(text))) as (
        _,
        client,
    ):
        rows = [
            {"prompt": "Do it.", "better": "bbbb", "worse": "a"},
            {"prompt": "Do it.", "better": "a", "worse": "cc"},
            {"prompt": "Do it.", "better": "odd", "worse": "a"},
        ]
        found = await agreement(Ranking(endpoint=client), rows)
        assert (found.count, found.accuracy, found.kappa, found.disagree) == (2, 0.5, 0.0, ("2",))
        assert [line.partition(":")[0] for line in found.failed] == ["3"]


def test_the_verb_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [row(1, "good", 1), row(2, "bad", 0), row(3, "bad 3", 1)]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("JUDGE_MODEL", "judge")
    monkeypatch.setenv("JUDGE_CACHE", str(tmp_path / "cache"))

    async def asked_before() -> None:
        async with judge_at(tmp_path, scored(lambda name, diff: 9 if "good" in diff else 1)) as (_, client):
            monkeypatch.setenv("JUDGE_URL", client.url)
            await agreement(Rubric(endpoint=client), rows)

    asyncio.run(asked_before())
    verb = ["tasks", "judge", "reward.function=rubric", "--labels", "labels.jsonl"]
    assert main(verb) == 0
    assert capsys.readouterr().out == "3 rows: accuracy 0.667, kappa 0.400\n  disagrees: row3\n"
    assert main([*verb, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 3
    assert main([*verb[:2], "--labels", "labels.jsonl"]) == 2
    assert "needs reward.function to be a Rubric" in capsys.readouterr().err
    assert main(verb[:3]) == 2
