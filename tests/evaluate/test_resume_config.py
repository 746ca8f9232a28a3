"""Which keys a resumed run may change."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from insitu.api import config_from_run
from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu.evaluate.resume import CHANGEABLE, TRAINING, resumed_config
from insitu.storage.run_dir import RunDir, read_config
from insitu.types import Ledger


def stored(tmp_path: Path, *overrides: str) -> Path:
    """Return the directory of a run of four steps that has trained two."""
    config = load_config(None, ["run.steps=4", *overrides, f"run.dir={tmp_path / 'run'}"])
    with RunDir.create(config) as run, run.store() as store:
        for step in (1, 2):
            store.commit_step(step, {}, "", "", Ledger())
        return run.path


def test_a_run_of_an_earlier_version_is_read_by_the_names_of_today(tmp_path: Path) -> None:
    run = stored(tmp_path, "gateway.listen=1", "gateway.public_url=ssh {origin}")
    file = run / "config.toml"
    text = file.read_text().replace('public_url = "ssh', 'public_url = ""\ntunnel = "ssh')
    file.write_text(text.replace("[train]", "[train]\nkl_alarm = 0.5"))
    for config in (read_config(run), resumed_config(run, ["run.steps=6"], TRAINING)):
        assert (config.gateway.public_url, config.run.alarms["kl"]) == ("ssh {origin}", 0.5)
    assert config_from_run(run, "sft")["run"]["alarms"]["kl"] == 0.5


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
        ((), "run.steps=1", "run.steps = 1: the run has 2 steps already"),
        (("train.decay=linear",), "run.steps=6", "run.steps = 6: train.decay linear ends at step 4"),
        (("collect.run=sessions",), "run.steps=6", "run.steps = 6: the stored sessions of the run allow 4"),
        (
            (),
            "train.lr=1",
            r".* keeps its configuration; drop train.lr=1 \(train.on_bad_step, train.ranks, .*",
        ),
        (
            (),
            "model.path=x",
            r"a resumed run keeps its configuration; drop model.path=x \(nothing of model may change\)",
        ),
        ((), "limits.wall_s=9", r".*drop limits.wall_s=9 \(nothing of limits may change\)"),
    ],
)
def test_what_cannot_be_added_is_refused(
    tmp_path: Path, of_run: tuple[str, ...], given: str, why: str
) -> None:
    run = stored(tmp_path, *of_run)
    with pytest.raises(ConfigError, match=f"^{why}$"):
        resumed_config(run, [given], TRAINING)


HARMLESS = [
    'engine.urls=["http://10.0.0.2:8000"]', "engine.call_timeout_s=900", "harness.workers=1",
    "grade.workers=1",
    "train.token_budget=4096", "train.step_timeout_s=9000", "collect.stall_timeout_s=99",
    "sandbox.max_sandboxes=64", "gateway.listen=8081", "run.alarms={kl = 0.0}", "run.keep_checkpoints=9",
]  # fmt: skip


@pytest.mark.parametrize("given", HARMLESS)
def test_what_does_not_change_the_result_may_change(tmp_path: Path, given: str) -> None:
    run = stored(tmp_path, "engine.kind=vllm", 'engine.urls=["http://10.0.0.1:8000"]')
    changed = resumed_config(run, [given], TRAINING)
    assert changed != read_config(run)
    table, _, key = given.partition("=")[0].partition(".")
    assert str(getattr(getattr(changed, table), key)) != str(getattr(getattr(read_config(run), table), key))
    if table not in ("train", "run"):
        assert resumed_config(run, [given], CHANGEABLE) == changed


def test_every_timeout_and_alarm_may_change_but_those_that_decide() -> None:
    tables = {name: field.annotation for name, field in Config.model_fields.items()}
    keys = {
        f"{name}.{key}"
        for name, table in tables.items()
        if isinstance(table, type) and issubclass(table, BaseModel)
        for key in table.model_fields
    }
    assert {key for key in TRAINING if key != "tasks.reference"} <= keys
    assert len(set(TRAINING)) == len(TRAINING)
    kinds = {key for key in keys if key.endswith(("_timeout_s", "_alarm", ".workers"))}
    assert kinds <= set(TRAINING)
    decides = {"limits.wall_s", "grade.timeout_s", "reward.timeout_s", "collect.group_deadline_s"}
    assert decides <= keys - set(TRAINING)


def test_a_run_may_end_at_a_step_that_it_has(tmp_path: Path) -> None:
    assert resumed_config(stored(tmp_path), ["run.steps=2"], TRAINING).run.steps == 2


def test_a_job_that_is_submitted_again_repeats_its_overrides(tmp_path: Path) -> None:
    run = stored(tmp_path)
    again = resumed_config(run, ["run.steps=6", "train.lr=1"], TRAINING, ignore_others=True)
    assert (again.run.steps, again.train.lr) == (6, read_config(run).train.lr)
