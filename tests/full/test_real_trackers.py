"""wandb, trackio and TensorBoard offline: what they wrote, read back with their own readers."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from insitu.config import load_config
from insitu.storage.metrics import read_metrics
from insitu.storage.run_dir import RunDir
from insitu_view.tracking.names import numbers
from sources import SOURCES

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
BLOCK = 32768


@pytest.fixture(scope="module")
def packages() -> str:
    done = subprocess.run(
        [ROOT / "scripts" / "setup-extras"], stdout=subprocess.PIPE, text=True, timeout=900, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was stopped after two steps."""
    config = load_config(None, [f"run.dir={tmp_path / 'a run'}"])
    with RunDir.create(config) as created, created.store(), created.metrics() as metrics:
        metrics.write({"event": "eval_before", "step": 0, "solved": 1, "total": 4, "reward_mean": 0.25})
        for step in (1, 2):
            metrics.write({"event": "step", "step": step, "loss": 0.5 / step, "reward_mean": 0.25 * step})
    return created.path


def again(path: Path) -> None:
    """Continue the run: one more step, and its end."""
    with RunDir.open(path) as run, run.metrics() as metrics:
        metrics.write({"event": "step", "step": 3, "loss": 0.1, "reward_mean": 0.75})
        metrics.write({"event": "eval_after", "step": 3, "solved": 3, "total": 4, "reward_mean": 0.75})
        run.write_summary({"heldout_after": 0.75})


def track(run: Path, packages: str, name: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([SOURCES, packages]),
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
        "TRACKIO_DIR": str(run.parent / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "insitu", "track", str(run), "--to", name]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def twice(run: Path, packages: str, name: str) -> dict[int, dict[str, float]]:
    """Send a run, send it again, continue it and send it; return what was to be sent."""
    assert track(run, packages, name) == f"{name}: 3 lines sent"
    assert track(run, packages, name) == f"{name}: 0 lines sent"
    again(run)
    assert track(run, packages, name) == f"{name}: 2 lines sent"
    wanted: dict[int, dict[str, float]] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        wanted.setdefault(line["step"], {}).update(numbers(line))
    return wanted


def in_packages(packages: str, code: str, *arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": packages}, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


_EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
found.Reload()
print(json.dumps([[t, e.step, e.value] for t in found.Tags()["scalars"] for e in found.Scalars(t)]))
"""


def test_tensorboard_reads_the_event_files(run: Path, packages: str) -> None:
    wanted = twice(run, packages, "tensorboard")
    found = in_packages(packages, _EVENTS, run / "trackers" / "tensorboard")
    values = [(tag, step) for tag, step, _ in found]
    assert len(values) == len(set(values))
    read: dict[int, dict[str, float]] = {}
    for tag, step, value in found:
        if not tag.startswith("summary/"):
            read.setdefault(step, {})[tag] = pytest.approx(value)
    assert wanted == read


def test_the_database_of_trackio_holds_one_run(run: Path, packages: str) -> None:
    wanted = twice(run, packages, "trackio")
    with closing(sqlite3.connect(run.parent / "trackio" / "insitu.db")) as db:
        rows = db.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    read: dict[int, dict[str, float]] = {}
    for _, step, metrics in rows:
        for name, value in json.loads(metrics).items():
            if not name.startswith("summary/"):
                assert name not in read.setdefault(step, {})
                read[step][name] = value
    assert wanted == read


def chunks(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log after wandb's head of 7 bytes: checksum, length and type before each part."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


_RECORDS = """
import base64, json, sys
from wandb.proto.wandb_internal_pb2 import Record
ids, rows, summary = set(), [], {}
for text in json.load(open(sys.argv[1])):
    record = Record.FromString(base64.b64decode(text))
    kind = record.WhichOneof("record_type")
    if kind == "run":
        ids.add(record.run.run_id)
    if kind == "history":
        items = record.history.item
        rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    if kind == "summary":
        items = record.summary.update
        summary.update({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
print(json.dumps([sorted(ids), rows, summary]))
"""


def test_the_offline_files_of_wandb_hold_one_run(run: Path, packages: str, tmp_path: Path) -> None:
    wanted = twice(run, packages, "wandb")
    files = sorted((run / "trackers" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one for each process"
    ids, read, summaries = set(), {}, {}
    for file in files:
        records = tmp_path / "records.json"
        records.write_text(json.dumps([base64.b64encode(r).decode() for r in chunks(file.read_bytes())]))
        found, rows, summary = in_packages(packages, _RECORDS, records)
        ids |= set(found)
        summaries |= summary
        for row in rows:
            values = {name: value for name, value in row.items() if not name.startswith("_")}
            step = values.pop("step")
            assert not read.setdefault(step, {}).keys() & values.keys()
            read[step] |= values
        assert b"0123456789abcdef0123456789abcdef01234567" not in file.read_bytes()
    assert len(ids) == 1
    assert read == wanted
    assert summaries["summary/heldout_after"] == 0.75
