"""The start script and the Slurm job, run with small programs in place of engine, insitu and Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from insitu_fleet.deploy.folder import DeployOptions, deploy

pytestmark = pytest.mark.slow

ENGINE = """
import http.server, os, signal, subprocess, sys, threading
open("engine.pid", "w").write(str(os.getpid()))
child = subprocess.Popen(["sleep", "1000"])
open("child.pid", "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
if os.environ.get("DIES"): sys.exit(7)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
INSITU = """#!/bin/bash
if [[ $1 == ranks ]]; then
  echo "$* $INSITU_RANKS_SECRET" >> ranks.calls; rm dies 2>/dev/null && kill -9 $$; exit 0
fi
echo "$@" >> calls; echo $$ > insitu.pid
echo "$INSITU_RANKS_SECRET" > secret
[[ -f stay ]] && exec sleep 1000
exit "$(cat code)"
"""
SRUN = """#!/bin/bash
# One process per node on this machine; the first that fails ends the others (--kill-on-bad-exit).
nodes=1; while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#*=}; shift; done
pids=(); for ((i = 0; i < nodes; i++)); do SLURM_NODEID=$i setsid "$@" & pids+=($!); done
trap 'for p in "${pids[@]}"; do kill -TERM -- "-$p" 2>/dev/null; done; wait; exit 143' TERM
for ((i = 0; i < nodes; i++)); do
  wait -n; code=$?
  ((code)) && { for p in "${pids[@]}"; do kill -TERM -- "-$p" 2>/dev/null; done; wait; exit $code; }
done
"""
RAY = """#!/bin/bash
# `ray symmetric-run OPTIONS -- COMMAND`: the head runs the command, the others wait for its end.
echo "node $SLURM_NODEID: $*" >> ray.calls
echo "${RAY_AUTH_MODE:-}" >> modes
while [[ $1 != -- ]]; do shift; done; shift
if [[ $SLURM_NODEID == 0 ]]; then "$@"; code=$?; echo $code > ended; exit $code; fi
while [[ ! -f ended ]]; do sleep 0.1; done
"""


def made(tmp_path: Path, port: int, more: str = "", name: str = "job") -> Path:
    config = tmp_path / f"{name}.toml"
    config.write_text(
        f'[model]\npath = "m"\n[engine]\nkind = "vllm"\nurls = ["http://127.0.0.1:{port}"]\n'
        f'[policy]\nkind = "hf"\n{more}'
    )
    deploy(DeployOptions(target="slurm", config=config, out=tmp_path / name, nodes=3))
    return tmp_path / name


@pytest.fixture
def folder(tmp_path: Path, unused_port: int) -> Path:
    out = made(tmp_path, unused_port)
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "engine.py").write_text(ENGINE)
    for name, text in {
        "vllm": f'#!/bin/sh\nexec python3 {tmp_path}/engine.py "$@"\n',
        "insitu": INSITU,
        "srun": SRUN,
        "ray": RAY,
        "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (out / "code").write_text("0")
    return out


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def start(folder: Path, script: str, **variables: str) -> subprocess.Popen[str]:
    path = f"{folder.parent}/bin:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n[1-3]"}
    slurm["HOME"] = str(folder.parent)
    return subprocess.Popen(
        ["bash", script], cwd=folder, env=os.environ | slurm | {"PATH": path} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def gone(folder: Path) -> None:
    """Raise unless engine, its child and insitu end within 20 s."""
    deadline = time.monotonic() + 20
    for name in ("engine.pid", "child.pid", "insitu.pid"):
        if (folder / name).exists():
            pid = (folder / name).read_text().strip()
            while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
                assert time.monotonic() < deadline, name
                time.sleep(0.05)


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return int(path.read_text())


@pytest.mark.parametrize("code", ["3", pytest.param("0", marks=pytest.mark.full)])
def test_the_exit_code_is_insitus_and_the_engine_ends(folder: Path, code: str) -> None:
    (folder / "code").write_text(code)
    process = start(folder, "start.sh")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == int(code), said
    gone(folder)
    assert (folder / "calls").read_text() == "train insitu.toml --plain run.dir=runs/main\n"


def test_a_run_that_exists_is_resumed(folder: Path) -> None:
    (folder / "runs" / "main").mkdir(parents=True)
    (folder / "runs" / "main" / "config.toml").write_text("")
    start(folder, "start.sh").communicate(timeout=120)
    assert (folder / "calls").read_text() == "train --resume runs/main\n"


def test_an_engine_that_does_not_start_ends_it(folder: Path) -> None:
    process = start(folder, "start.sh", DIES="1")
    said, _ = process.communicate(timeout=120)
    assert (process.returncode, "the engine ended before it was ready" in said) == (1, True)
    gone(folder)
    assert not (folder / "calls").exists()


@pytest.mark.parametrize("script", ["start.sh", pytest.param("job.sbatch", marks=pytest.mark.full)])
def test_everything_ends_with_the_engine(folder: Path, script: str) -> None:
    (folder / "stay").write_text("")
    process = start(folder, script)
    wait_for(folder / "insitu.pid")
    os.kill(wait_for(folder / "engine.pid"), signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, "the engine ended; the run ends with it" in said) == (1, True), said
    gone(folder)


@pytest.mark.parametrize("script", [pytest.param("start.sh", marks=pytest.mark.full), "job.sbatch"])
def test_everything_ends_when_it_is_stopped(folder: Path, script: str) -> None:
    (folder / "stay").write_text("")
    process = start(folder, script)
    wait_for(folder / "insitu.pid")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    gone(folder)


def test_a_slurm_job_starts_ray_on_every_node_and_insitu_on_one(folder: Path) -> None:
    (folder / "code").write_text("5")
    process = start(folder, "job.sbatch")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 5, said
    gone(folder)
    assert (folder / "job_id.txt").read_text() == "41\n"
    assert f"RUN_DIR={folder}/runs/main\nHEAD=n1\nNODES=3\n" == (folder / "run.env").read_text()
    lines = sorted((folder / "ray.calls").read_text().splitlines())
    assert lines[0].startswith("node 0: symmetric-run --address n1:6379 --min-nodes 3 -- bash -c ")
    assert lines[0].endswith("exec bash start.sh")
    assert len((folder / "calls").read_text().splitlines()) == 1
    assert "run directory: " in said
    assert set((folder / "modes").read_text().split("\n")) == {""}


@pytest.mark.parametrize(("given", "mode"), [({}, "token"), ({"RAY_AUTH_MODE": "disabled"}, "disabled")])
def test_a_slurm_job_brings_the_token_that_rays_head_finds(
    folder: Path, given: dict[str, str], mode: str
) -> None:
    token = folder.parent / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0" * 64)
    (folder / "code").write_text("5")
    process = start(folder, "job.sbatch", **given)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 5, said
    assert (folder / "modes").read_text().split() == [mode] * 3


def test_a_slurm_job_starts_ranks_on_the_other_nodes(folder: Path, unused_port: int) -> None:
    """The agent of one node is killed and begins again; the secret is one of the job and in no file of it."""
    out = made(folder.parent, unused_port, '[train]\nranks = "2+4@anywhere:29400"\n', "ranks")
    (out / "code").write_text("5")
    (out / "dies").write_text("")
    files = {path.name for path in out.iterdir()}
    process = start(out, "job.sbatch", MODEL_DIR="/models/m", RAY_PORT="1")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 5, said
    gone(out)
    assert not (out / "ray.calls").exists(), "nothing needs Ray"
    wanted = f"train insitu.toml --plain run.dir={out}/runs/main train.ranks=2+4@0.0.0.0:29400\n"
    assert (out / "calls").read_text() == wanted
    secret = (out / "secret").read_text().strip()
    assert len(secret) == 64
    deadline = time.monotonic() + 20
    while len(calls := (out / "ranks.calls").read_text().splitlines()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert calls == [f"ranks n1:29400 --ranks 2 --forever --model /models/m {secret}"] * 3
    texts = [(out / name).read_text() for name in files if (out / name).is_file()]
    assert not [text for text in texts if secret in text]


@pytest.mark.full
def test_a_slurm_job_of_one_node_needs_no_other_ranks(folder: Path, unused_port: int) -> None:
    out = made(folder.parent, unused_port, '[train]\nranks = "2+4@anywhere:29400"\n', "ranks")
    (out / "code").write_text("0")
    (out / "runs" / "main").mkdir(parents=True)
    (out / "runs" / "main" / "config.toml").write_text("")
    said, _ = start(out, "job.sbatch", SLURM_JOB_NUM_NODES="1").communicate(timeout=120)
    assert (out / "calls").read_text() == f"train --resume {out}/runs/main train.ranks=2\n", said
    assert not (out / "ranks.calls").exists()
