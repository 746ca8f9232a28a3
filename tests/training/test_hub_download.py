"""`model.path = "hub:ORG/NAME"`, against a stand-in of the Hub on loopback: none reaches the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_lab import model_folder

from insitu.config import load_config
from insitu.config import model_folder as folder_of
from insitu.errors import ConfigError, SetupError
from insitu.storage.run_dir import name_run
from insitu_train.hub_download import hub_folder
from tests.fakes.hub import COMMIT, FakeHub, only_hub

# The hub's own client passes `data=` to its HTTP library.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with only_hub(monkeypatch, tmp_path / "hub") as server:
        source = model_folder(tmp_path / "model", "llama")
        server.repos["me/small"] = {"name": "small", "visibility": "public"}
        server.files = {path.name: path.read_bytes() for path in source.iterdir()}
        server.files["pytorch_model.bin"] = b"the weights once more"
        yield server


def test_a_model_is_downloaded_once_and_then_read_without_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    said: list[str] = []
    folder = hub_folder("hub:me/small", said.append)
    assert said == ["downloading hub:me/small", f"hub:me/small is at revision {COMMIT}"]
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not (folder / "pytorch_model.bin").exists()
    asked = len(hub.requests)
    config = name_run(load_config(None, {"model.path": "hub:me/small", "run.dir": str(tmp_path / "run")}))
    assert config.model.path == "hub:me/small"
    assert folder_of(config) == folder
    assert hub_folder(f"hub:me/small@{COMMIT}", said.append) == folder
    assert len(hub.requests) == asked, "offline"


def test_an_interrupted_download_goes_on(hub: FakeHub) -> None:
    file = hub_folder("hub:me/small", lambda text: None) / "model.safetensors"
    file.resolve().unlink()
    file.unlink()  # as if the process had been killed before the last file
    assert hub_folder("hub:me/small", lambda text: None) == file.parent
    assert file.read_bytes() == hub.files["model.safetensors"]


def test_what_is_not_there_is_one_line(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="^model.path takes hub:ORG/NAME"):
        hub_folder("hub:small", lambda text: None)
    with pytest.raises((ConfigError, SetupError)) as absent:
        hub_folder("hub:me/none", lambda text: None)
    assert "hub:me/none" in str(absent.value)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SetupError) as refused:
        hub_folder("hub:me/small", lambda text: None)
    assert str(refused.value).startswith("cannot fetch hub:me/small: no hub can be reached: ")
    assert "\n" not in str(refused.value)
