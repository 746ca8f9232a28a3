"""A run with sub-agents, folded branches, truncated, ungraded and failed rollouts, for reading; a Hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_lab import Flavour, make_rollout, make_run

from insitu.capture.ledger import reassign
from insitu.storage.run_dir import RunDir
from insitu.types import FileEntry, Status
from insitu_train import hub_upload
from tests.fakes.hub import TOKEN, FakeHub, fake_hub


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_run(tmp_path_factory.mktemp("runs") / "lab")
    with RunDir.open(path) as opened, opened.store() as store:
        for slot in range(3):
            made = make_rollout(Flavour(), "train", 9, 0, slot, solved=slot == 0)
            made = replace(made, changed={"a.bin": FileEntry(content=b"\x00\xff", executable=True)})
            if slot == 1:
                ledger = reassign(made.trajectory.ledger, "infra")
                failed = replace(made.trajectory, ledger=ledger)
                made = replace(
                    made, status=Status.INFRA_FAILED, reward=None, verdict=None, trajectory=failed, attempt=2
                )
                store.put_attempt(replace(made, attempt=1, error="the sandbox vanished"))
            if slot == 0:
                rows = [
                    replace(row, experts=np.full((len(row.ids), 3, 2), slot, np.int16))
                    for row in made.trajectory.segments
                ]
                made = replace(made, trajectory=replace(made.trajectory, segments=tuple(rows)))
            if slot == 2:
                made = replace(made, reward=None, verdict=None, diff=None, began_s=None)
            store.put_rollout("train", 9, 0, slot, made)
        store.discard(["train/00009/000/00", "train/00009/000/02"], "stale")
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hub_upload, "FIRST_S", 0.01)
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
