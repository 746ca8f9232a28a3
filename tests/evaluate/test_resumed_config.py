"""Which keys a resumed run may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.errors import ConfigError
from insitu.evaluate.resume import TRAINING, resumed_config
from insitu.storage.run_dir import RunDir


def stored(tmp_path: Path, *overrides: str) -> Path:
    """Return the directory of a run of four steps."""
    with RunDir.create(load_config(None, ["run.steps=4", *overrides, f"run.dir={tmp_path / 'run'}"])) as run:
        return run.path


@pytest.mark.parametrize(
    "given", [["run.steps=6", "run.stop_after_evals=2"], {"run.steps": 6, "run.stop_after_evals": 2}]
)
def test_a_run_may_become_longer(tmp_path: Path, given: list[str] | dict[str, int]) -> None:
    run = stored(tmp_path, "eval.every_steps=1")
    changed = resumed_config(run, given, TRAINING).run
    assert (changed.steps, changed.stop_after_evals, changed.dir) == (6, 2, str(run))


@pytest.mark.parametrize(
    ("of_run", "given", "why"),
    [
        ((), "run.steps=3", "run.steps = 3: the run is one of 4 steps, and a resume can only add some"),
        (("train.decay=linear",), "run.steps=6", "run.steps = 6: train.decay linear ends at step 4"),
        (("collect.run=sessions",), "run.steps=6", "run.steps = 6: the stored sessions of the run allow 4"),
        (
            (),
            "train.lr=1",
            r"a resumed run keeps its configuration; drop train.lr=1 \(changeable: run.steps, .*",
        ),
    ],
)
def test_what_cannot_be_added_is_refused(
    tmp_path: Path, of_run: tuple[str, ...], given: str, why: str
) -> None:
    run = stored(tmp_path, *of_run)
    with pytest.raises(ConfigError, match=f"^{why}$"):
        resumed_config(run, [given], TRAINING)
