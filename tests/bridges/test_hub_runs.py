"""Checkpoints at a stand-in of the Hub: pushed whole or not at all, fetched, checked, resumed."""

from __future__ import annotations

import asyncio
import filecmp
import logging
from pathlib import Path

import pytest

import insitu
from insitu.cli import main
from insitu.config import load_config
from insitu.errors import ConfigError, RecordError, SetupError
from insitu.storage.run_dir import read_store
from insitu_train import hub_runs
from insitu_train.api import from_hub
from tests.fakes.hub import TOKEN, FakeHub

# The hub's own client passes `data=` to its HTTP library.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning"),
]
KEYS = {
    "harness.agent": "script",
    "harness.mode": "warm",
    "harness.workers": 2,
    "run.steps": 1,
    "eval.count": 0,
    "collect.groups_per_step": 1,
    "collect.group_size": 2,
    "model.max_context_tokens": 2048,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that was stopped after the first."""
    path = tmp_path_factory.mktemp("runs") / "main"
    insitu.train(None, overrides=KEYS | {"run.dir": str(path)})
    config = path / "config.toml"
    config.write_text(config.read_text().replace("\nsteps = 1", "\nsteps = 2"))
    (path / "summary.json").unlink()
    return path


@pytest.mark.full
def test_a_pushed_run_is_fetched_bit_by_bit_and_resumed(
    hub: FakeHub, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert asyncio.run(hub_runs.push_run(trained, "me/run")) == 1
    assert hub.repos["me/run"]["visibility"] == "private"
    assert TOKEN not in caplog.text
    run = tmp_path / "fetched"
    assert hub_runs.fetch_run("hub:me/run", run)
    [checkpoint] = (run / "checkpoints").iterdir()
    for path in checkpoint.rglob("*"):
        if path.is_file():
            assert filecmp.cmp(path, trained / path.relative_to(run), shallow=False), path
    insitu.train(resume=run)
    with read_store(run) as store:
        assert [record.step for record in store.steps()] == [1, 2]


@pytest.mark.full
def test_nothing_half_is_resumed(hub: FakeHub, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "fetched"
    assert not hub_runs.fetch_run("hub:me/nothing", run)
    hub.fail = [503] * 20
    with pytest.raises(SetupError, match="cannot push to me/run"):
        asyncio.run(hub_runs.push_run(trained, "me/run"))
    assert not hub_runs.fetch_run("hub:me/run", run)
    hub.fail = []
    asyncio.run(hub_runs.push_run(trained, "me/run"))
    assert not list(trained.glob("hub.part*"))
    whole = dict(hub.files)
    name = next(name for name in whole if name.endswith("model.safetensors"))
    for broken, said in (
        ({**whole, name: whole[name][:-1] + b"x"}, "is not the file that was pushed"),
        ({key: data for key, data in whole.items() if key != name}, "is incomplete"),
        ({"README.md": b"hello"}, "holds no run"),
    ):
        hub.files = broken
        with pytest.raises(RecordError, match=said):
            hub_runs.fetch_run("hub:me/run", run)
        assert list(tmp_path.iterdir()) == []
    hub.files = whole
    run.mkdir()
    with pytest.raises(ConfigError, match="exists"):
        hub_runs.fetch_run("hub:me/run", run)


@pytest.mark.full
async def test_checkpoints_are_pushed_in_the_background_and_failures_are_said(
    hub: FakeHub, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_runs, "LOOK_S", 0.01)
    said: list[str] = []
    config = load_config(None, {"run.hub": "me/run", "run.dir": str(trained)})
    hub.fail = [403]
    async with hub_runs.pushing_checkpoints(config, said.append):
        async with asyncio.timeout(60):
            while not hub.files:  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0.01)
    assert len(said) == 1
    assert said[0].startswith("checkpoint not pushed: cannot push to me/run")
    assert sum("/commit/" in request for request in hub.requests) == 2, "once for a checkpoint"


def test_a_run_begins_where_there_is_no_checkpoint_yet(hub: FakeHub, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[run]\ndir = "{tmp_path}/main"\n')
    config, found = from_hub("hub:me/run", file)
    assert (config.run.dir, found) == (str(tmp_path / "main"), False)
    asyncio.run(hub_runs.push_run(trained, "me/run"))
    config, found = from_hub("hub:me/run", file)
    assert (config.run.dir, config.run.steps, found) == (str(tmp_path / "main"), 2, True)


def test_bad_input_is_one_line(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "hub:me/nothing"]) == 1
    assert capsys.readouterr().err == "insitu: hub:me/nothing has no checkpoint of a run\n"
    assert main(["train", "--resume", "hub:nothing"]) == 2
    assert "--resume takes a run directory or hub:ORG/NAME" in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="run.hub: no token of the Hub: set HF_TOKEN"):
        hub_runs.check_hub(load_config(None, {"run.hub": "me/run"}))
