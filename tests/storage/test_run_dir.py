"""The run directory: one writer, one config, atomic files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_record import make_rollout

from insitu.config import Config, load_config
from insitu.config.tables import ALARMS
from insitu.errors import ConfigError, RecordError
from insitu.storage.files import write_text
from insitu.storage.metrics import MetricsFile, read_metrics
from insitu.storage.run_dir import (
    RunDir,
    has_rollouts,
    name_run,
    read_config,
    read_store,
    read_summary,
)
from insitu.storage.ulid import new_ulid


def config(path: Path) -> Config:
    return load_config(None, [f"run.dir={path}", "run.seed=7"])


@pytest.mark.parametrize("name", ["a" * 256, "/".join(["b" * 100] * 6), "\N{SNOWMAN}" * 100])
def test_a_path_that_is_too_long_is_one_line_and_makes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^run.dir: .* is too long: at most 255 bytes"):
        RunDir.create(load_config(None, {"run.dir": str(tmp_path / name)}))
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    with RunDir.create(load_config(None, {"run.dir": str(tmp_path / "runs" / "r")})) as run:
        assert run.path.stat().st_mode & 0o777 == 0o700


def test_a_run_is_created_and_opened_again(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path / "r")) as run:
        run.store().close()
        run.write_summary({"seed": 7})
        assert run.logs.is_dir()
        assert run.checkpoints.is_dir()
    with RunDir.open(tmp_path / "r") as again:
        assert again.config == run.config
        assert again.config.run.seed == 7
    assert read_summary(tmp_path / "r") == {"seed": 7}
    read_store(tmp_path / "r").close()


def test_an_unnamed_run_gets_a_ulid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir.create(Config()) as run:
        assert run.path.parent == tmp_path / "runs"
        assert len(run.path.name) == 26
        assert run.config.run.dir == str(run.path)


def test_a_run_can_be_continued_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir.create(load_config(None, ["run.dir=r", "model.path=models/m"])) as run:
        assert run.config.model.path == str(tmp_path / "models" / "m")
        assert run.config.run.dir == str(tmp_path / "r")
    assert read_config(tmp_path / "r") == run.config


def test_a_moved_run_knows_its_new_place(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path / "old")).close()
    (tmp_path / "old").rename(tmp_path / "new")
    assert read_config(tmp_path / "new").run.dir == str(tmp_path / "new")


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path / "r")) as run, run.store() as store:
        store.put_rollout("train", 1, 0, 0, make_rollout("a"))
    with pytest.raises(RecordError, match="holds a run already.*--resume .*resume="):
        RunDir.create(config(tmp_path / "r"))
    with RunDir.open(tmp_path / "r"):
        pass  # the refusal has given the lock back


def test_a_run_that_ended_before_its_first_rollout_may_be_started_again(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path / "r")) as run, run.store() as store, run.metrics() as metrics:
        store.set_meta("wall_s", "12")
        metrics.write({"event": "old"})
        with pytest.raises(RecordError, match="in use by process"):
            RunDir.create(config(tmp_path / "r"))
    again = load_config(None, [f"run.dir={tmp_path / 'r'}", "run.seed=8"])
    with RunDir.create(again) as run, run.store() as store:
        assert "wall_s" not in store.meta()
    assert read_config(tmp_path / "r").run.seed == 8
    assert list(read_metrics(tmp_path / "r" / "metrics.jsonl")) == []


def test_a_run_that_died_while_it_made_its_store_may_be_started_again(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path / "r")).close()
    (tmp_path / "r" / "run.sqlite").touch()
    assert not has_rollouts(tmp_path / "r")
    with pytest.raises(RecordError, match=r"run\.sqlite holds no rollouts yet$"):
        read_store(tmp_path / "r")
    RunDir.create(config(tmp_path / "r")).close()


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not a run directory"):
        RunDir.open(tmp_path)
    with pytest.raises(RecordError, match="no run.sqlite"):
        read_store(tmp_path)
    assert read_summary(tmp_path) is None


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        RunDir.create(config(tmp_path / "file" / "r"))


HOLDER = """
import sys, time
from pathlib import Path
from insitu.storage.run_dir import RunDir
run = RunDir.open(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_two_processes_never_hold_one_run_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path / "r")).close()
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "r")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=dict(os.environ)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(RecordError, match=f"in use by process {child.pid}"):
            RunDir.open(tmp_path / "r")
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=10)
    RunDir.open(tmp_path / "r").close()


def test_full_disk_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(RecordError, match="disk full while writing /dev/full"),
        MetricsFile(Path("/dev/full")) as m,
    ):
        m.write({"x": 1})


def test_write_text_replaces_whole_files(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")
    write_text(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_metrics_survive_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write({"step": 1, "loss": 0.5, "nan": float("nan")})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1]
    with MetricsFile(path) as metrics:
        metrics.write({"step": 2})
    lines = list(read_metrics(path))
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["schema_version"] == 1
    assert lines[0]["nan"] is None


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \n')
    with pytest.raises(RecordError, match=r"^cannot read .*metrics\.jsonl: line 2 is damaged"):
        list(read_metrics(path))


def test_a_torn_first_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 70000)
    with MetricsFile(path) as metrics:
        metrics.write({"step": 1})
    assert len(list(read_metrics(path))) == 1
    assert list(read_metrics(tmp_path / "none")) == []


def test_ulids_sort_by_creation() -> None:
    ids = [new_ulid() for _ in range(1000)]
    assert ids == sorted(set(ids))
    assert {len(i) for i in ids} == {26}


def test_a_data_set_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = name_run(load_config(None, ["tasks.source=humaneval", "tasks.path=rows.jsonl", "run.dir=r"]))
    assert config.task_set.path == str(tmp_path / "rows.jsonl")
    assert config.task_set.assets == ""


def test_every_path_of_a_run_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = [
        "engine.kind=vllm",
        "engine.urls=http://127.0.0.1:1",
        "engine.publish_dir=out",
        "model.path=start",
    ]
    more = [
        "train.loss=dppo",
        "train.kl=k3",
        "train.kl_weight=0.1",
        "train.reference=ref",
        "gateway.tools=t.json",
    ]
    RunDir.create(load_config(None, [*engine, *more, "run.dir=r"])).close()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    kept = read_config(tmp_path / "r")
    found = [kept.engine.publish_dir, kept.train.reference, kept.gateway.tools, kept.model.path]
    assert found == [str(tmp_path / name) for name in ("out", "ref", "t.json", "start")]
    monkeypatch.chdir(tmp_path)
    unset = name_run(load_config(None, ["run.dir=r"]))
    assert (unset.engine.publish_dir, unset.train.reference, unset.gateway.tools) == ("", "", "")


def test_a_run_with_keys_that_became_constants_is_read(tmp_path: Path) -> None:
    sets = [
        {"name": "a", "harness": {"agent": "pi"}},
        {"name": "b", "agents": [{"agent": "pi"}, {"agent": "script"}]},
    ]
    RunDir.create(load_config(None, [f"run.dir={tmp_path / 'r'}"], {"tasks": sets})).close()
    kept, text = read_config(tmp_path / "r"), (tmp_path / "r" / "config.toml").read_text()
    earlier = text.replace("[engine]", "[engine]\nretries = 3").replace('"pi"}', '"pi", artifact_files = 9}')
    assert earlier.count("artifact_files") == 2
    (tmp_path / "r" / "config.toml").write_text(earlier)
    assert read_config(tmp_path / "r") == kept


EARLIER = """
[engine]
kind = "upstream"
url = "http://a"
model = "m"
input_price = 2.0
train_price = 0.0
[collect]
reward_alarm = 0.0
[train]
loss = "{loss}"
clip_low = 0.25
clip_high = 0.3
dppo_low = 0.1
dppo_high = 0.15
gspo_low = 1e-3
gspo_high = 2e-3
cispo_cap = 3.0
"""


@pytest.mark.parametrize(
    ("loss", "clips"),
    [("ppo_clip", (0.25, 0.3)), ("dppo", (0.1, 0.15)), ("gspo", (1e-3, 2e-3)), ("cispo", (0.0, 2.0))],
)
def test_a_run_with_bounds_and_prices_of_their_own_keeps_them(
    tmp_path: Path, loss: str, clips: tuple[float, float]
) -> None:
    (tmp_path / "config.toml").write_text(EARLIER.replace("{loss}", loss))
    kept = read_config(tmp_path)
    assert (kept.engine.prices, kept.run.alarms) == ({"input": 2.0}, {**ALARMS, "reward": 0.0})
    assert kept.train.clip == clips


JOINED = """
[gateway]
host = "0.0.0.0"
port = 8000
[engine]
kind = "vllm"
tensor_parallel = 1
[train]
start_timeout_s = 700.0
step_timeout_s = 90.0
overlong_tokens = 120
overlong_margin_tokens = 96
{loss}
"""
CORRECTED = """loss = "ppo_clip"
ratio = "trainer"
clip_low = 0.1
clip_high = 0.0
correction = "{}"
correction_low = 0.4
correction_high = {}"""


@pytest.mark.parametrize(
    ("loss", "clip", "bounds"),
    [
        (CORRECTED.format("icepop", 0.0), (0.1, 0.28), (0.4, 5.0)),
        (CORRECTED.format("tis", 2.5), (0.1, 0.28), (0.0, 2.5)),
        (CORRECTED.format("none", 0.0), (0.1, 0.28), ()),
        ('loss = "dppo"\nclip_low = 0.0\nclip_high = 0.0', (), ()),
    ],
)
def test_a_run_whose_pairs_were_single_keys_keeps_them(
    tmp_path: Path, loss: str, clip: tuple[float, ...], bounds: tuple[float, ...]
) -> None:
    (tmp_path / "config.toml").write_text(JOINED.replace("{loss}", loss))
    kept = read_config(tmp_path)
    assert (kept.train.clip, kept.train.correction_bounds) == (clip, bounds)
    assert (kept.train.overlong_tokens, kept.train.step_timeout_s) == ((24, 120), 700.0)
    assert kept.gateway.listen == "0.0.0.0:8000"


def test_what_a_run_said_of_servers_and_tasks_is_kept_or_refused(tmp_path: Path) -> None:
    wide = '[engine]\nkind = "vllm"\nreplicas = 2\ntensor_parallel = 2\n'
    (tmp_path / "config.toml").write_text(wide)
    kept = read_config(tmp_path).engine
    assert (kept.gpus, kept.replicas, kept.tensor_parallel) == ((0, 1, 2, 3), 2, 2)
    (tmp_path / "config.toml").write_text("[rollout]\nstart = 40\ncount = 20\n")
    with pytest.raises(ConfigError, match=r"rollout\.start"):
        read_config(tmp_path)


def test_a_start_that_failed_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    class Failed(Exception):
        pass

    def start(folder: Path, *left: str, rollouts: int = 0, text: str = "x") -> bool:
        """Whether the folder is there after a start that fails."""
        with contextlib.suppress(Failed), contextlib.ExitStack() as stack:
            run = stack.enter_context(RunDir.create(config(folder)))
            stack.push(run.drop_unused)
            store = stack.enter_context(run.store())
            for name in left:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
            for slot in range(rollouts):
                store.put_rollout("train", 1, 0, slot, make_rollout(f"r{slot}"))
            raise Failed
        return folder.exists()

    assert not start(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists(), "folders that were made for it go too"
    assert not start(tmp_path / "w", "weights/v0/model.safetensors", "logs/insitu.log")
    assert not start(tmp_path / "line", "logs/learner.log")
    assert start(tmp_path / "log", "logs/learner.log", text="Traceback (most recent call last):")
    assert start(tmp_path / "paid", "sessions/x.jsonl"), "calls that a provider was paid for"
    assert start(tmp_path / "some", rollouts=1)
    (tmp_path / "mine").mkdir()
    assert start(tmp_path / "mine"), "a folder that was there before"
    with RunDir.create(config(tmp_path / "fine")) as run:
        run.drop_unused(None, None, None)
    assert (tmp_path / "fine").exists()
