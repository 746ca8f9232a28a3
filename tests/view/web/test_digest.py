"""What a language model reads about a run: complete, bounded, and with commands that work."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from insitu.cli import main
from insitu.config import load_config
from insitu.storage.run_dir import RunDir
from insitu_view.digest import BYTES_PER_TOKEN, digest
from insitu_view.web.runs import one_run

Capture = pytest.CaptureFixture[str]


def test_it_says_what_the_run_is_whether_it_learns_and_what_is_wrong(lab_run: Path, capsys: Capture) -> None:
    assert main(["digest", str(lab_run)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# lab: train run, finished, step 3 of 3, 56 rollouts\nagent pi; ")
    for line in (
        "collect.group_size = 4",
        "eval_before step 0: 1 of 4 (0.25)",
        "eval_after step 3: 2 of 4 (0.50)",
        "step 3: solved 6 of 16 (0.38)",
        "alarm tamper in 1 steps, 2 to 2",
        "evidence of cheating, no verdict on its own: tampered: 3 rollouts",
        "tokens of steps: 1956 captured, 516 degenerate, 1440 trained",
    ):
        assert f"\n{line}\n" in text, line
    assert "### train/00003/003/03: the most frequent cause: 29 of 35 unsolved\n" in text
    assert "NOT SOLVED: unresolved, reward 0, 1 of 4 checks" in text


@pytest.mark.parametrize("tokens", [500, 1000, 4000, 100_000])
def test_it_stays_within_its_tokens(tokens: int, lab_run: Path, hostile_run: Path, mixed_run: Path) -> None:
    for run in (lab_run, hostile_run, mixed_run):
        text = digest(one_run(run), tokens).text()
        assert len(text.encode()) <= tokens * BYTES_PER_TOKEN, run.name
        assert "## look further\n" in text
        assert all(c.isprintable() or c == "\n" for c in text)
        assert not [line for line in text.splitlines() if line.startswith("## ") and "rollouts" not in line
                    and line[3:] not in ("curve", "findings", "look further",
                                         "configuration that differs from the defaults")]  # fmt: skip


def test_little_room_has_one_rollout_and_more_has_more(lab_run: Path) -> None:
    counts = [len(digest(one_run(lab_run), tokens).rollouts) for tokens in (800, 4000, 50_000)]
    assert 1 == counts[0] < counts[1] <= counts[2]


def test_json_has_the_parts_and_the_commands_run(lab_run: Path, capsys: Capture) -> None:
    assert main(["digest", str(lab_run), "--json", "--tokens", "2000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] <= 2000
    assert list(found) == [
        "run", "head", "config", "curve", "findings", "rollouts", "commands", "tokens",
    ]  # fmt: skip
    assert {one["id"].partition("/")[0] for one in found["rollouts"]} <= {
        "train",
        "eval_before",
        "eval_after",
    }
    for command in found["commands"]:
        verb = [word.replace("OTHER_RUN", str(lab_run)) for word in shlex.split(command)[1:]]
        assert main(verb) == 0, command
        assert capsys.readouterr().out


def test_a_run_without_rollouts_and_what_cannot_be_read(tmp_path: Path, capsys: Capture) -> None:
    RunDir.create(load_config(None, [f"run.dir={tmp_path / 'new'}"])).close()
    assert main(["digest", str(tmp_path / "new")]) == 0
    text = capsys.readouterr().out
    assert "problem: no rollouts yet" in text
    assert "insitu train --resume" in text
    assert main(["digest", str(tmp_path / "new"), "--tokens", "5"]) == 2
    assert capsys.readouterr().err == "insitu: --tokens takes 500 at least\n"
    assert main(["digest", str(tmp_path / "none")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
