"""`insitu push` against a stand-in of the Hub: what arrives, what stays, retries, and no secret anywhere."""

from __future__ import annotations

import io
import json
import logging
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet
from run_lab import make_run

import insitu
from insitu.config import WARM_START
from insitu.errors import ConfigError, RecordError, SetupError
from insitu_bridges import push
from insitu_train import hub_upload
from tests.fakes.hub import TOKEN, FakeHub

# The hub's own client passes `data=` to its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_run(tmp_path_factory.mktemp("runs") / "lab")
    checkpoint = path / "checkpoints" / "step-00003"
    shutil.copytree(WARM_START, checkpoint)
    (checkpoint / "trainer").mkdir()
    (checkpoint / "trainer" / "state.bin").write_bytes(b"optimizer")
    return path


def test_a_checkpoint_is_a_private_model_with_a_card(
    hub: FakeHub, run: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.fail = [503, 429]
    report = insitu.push(run / "checkpoints" / "step-00003", "hub:me/model")
    assert (report["kind"], report["private"], report["left_out"]) == ("model", True, [])
    assert report["url"] == f"{hub.url}/me/model"
    assert hub.repos["me/model"]["visibility"] == "private"
    assert hub.files.keys() == report["files"].keys()
    assert hub.files["model.safetensors"] == (WARM_START / "model.safetensors").read_bytes()
    assert not any("trainer" in name for name in hub.files)
    card = hub.files["README.md"].decode()
    assert card.startswith("---\ntags: [insitu")
    assert "| optimizer steps | 3 of 3 |" in card
    assert sum("/commit/" in request for request in hub.requests) == 3, "busy twice"
    assert hub.tokens == {f"Bearer {TOKEN}"}
    out, err = capfd.readouterr()
    assert TOKEN not in out + err + caplog.text


@pytest.mark.slow
def test_retries_end(hub: FakeHub, run: Path) -> None:
    hub.fail = [503] * 20
    with pytest.raises(SetupError, match="cannot push to me/model: .*503") as raised:
        insitu.push(run / "checkpoints" / "step-00003", "hub:me/model")
    assert "\n" not in str(raised.value)
    assert len(hub.fail) == 20 - hub_upload.ATTEMPTS
    hub.fail = [403] * 9
    with pytest.raises(SetupError, match="403"):
        insitu.push(run / "checkpoints" / "step-00003", "hub:me/model")
    assert len(hub.fail) == 8, "a refusal is not retried"


@pytest.mark.slow
def test_rollouts_with_a_secret_are_left_out(
    hub: FakeHub, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = insitu.open_run(run)
    secret_task = store.rollouts(phase="train")[0].task_id
    whole = insitu.push(run, "hub:me/rollouts")
    assert whole["left_out"] == []
    assert hub.repos["me/rollouts"]["visibility"] == "private"
    ids = set(parquet.read_table(io.BytesIO(hub.files["data/rollouts.parquet"]))["rollout_id"].to_pylist())
    assert ids == set(store.rollouts().ids)
    # As if the id of a task were the key of a provider.
    monkeypatch.setenv("OWN_API_KEY", secret_task)
    report = insitu.push(run, "hub:me/rollouts")
    hidden = set(store.rollouts(task=secret_task).ids)
    assert set(report["left_out"]) == hidden
    for name in ("rollouts", "rows"):
        table = parquet.read_table(io.BytesIO(hub.files[f"data/{name}.parquet"]))
        assert not hidden & set(table["rollout_id"].to_pylist())
        assert table.num_rows
    manifest = json.loads(hub.files["manifest.json"])
    assert manifest["left_out"] == ["***" if secret_task in one else one for one in sorted(hidden)]
    assert secret_task.encode() not in b"".join(hub.files.values())
    assert b"rollouts are left out: they hold" in hub.files["README.md"]
    rows = parquet.read_table(io.BytesIO(hub.files["data/rows.parquet"]))
    counted = parquet.read_table(io.BytesIO(hub.files["data/rollouts.parquet"]))["ledger"].to_pylist()
    assert manifest["rows"] == rows.num_rows
    assert manifest["rollouts"] == len(counted)
    assert manifest["account"]["captured"] == sum(json.loads(one)["captured"] for one in counted)
    # As a download: it is an export like any other.
    for name, content in hub.files.items():
        (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / name).write_bytes(content)
    made = insitu.import_run(tmp_path / "got", tmp_path / "copy")
    assert set(made.rollouts().ids) == set(store.rollouts().ids) - hidden
    assert [step.step for step in made.steps] == [step.step for step in store.steps]
    assert made.ledger.captured < store.ledger.captured


def test_a_public_repository_is_not_filled_by_default(hub: FakeHub, run: Path) -> None:
    hub.repos["me/rollouts"] = {"visibility": "public"}
    with pytest.raises(ConfigError, match="me/rollouts exists and is public: --public uploads there"):
        insitu.push(run, "hub:me/rollouts")
    assert not hub.files
    assert insitu.push(run, "hub:me/rollouts", public=True)["private"] is False
    assert hub.files


def test_a_dry_run_uploads_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "find_spec", lambda name: None)
    report = insitu.push(run, "hub:me/rollouts", dry_run=True, public=True)
    assert (report["url"], report["private"]) == ("", False)
    assert {"README.md", "manifest.json", "data/rows.parquet"} <= report["files"].keys()
    with pytest.raises(ConfigError, match=r"huggingface_hub is not installed: .*\[hub\]"):
        insitu.push(run, "hub:me/rollouts")


def test_wrong_arguments_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--to takes hub:ORG/NAME, got me/model"):
        insitu.push(tmp_path, "me/model")
    with pytest.raises(RecordError, match="is neither a run directory nor a checkpoint"):
        insitu.push(tmp_path, "hub:me/model")
