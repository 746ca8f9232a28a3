"""Other gateways beside ours, over the same conversations and the same prepared engine server.

    agents (_load) ──HTTP──► gateway under test ──HTTP──► prepared engine server (_peer_engine)

Each peer lives in an environment of its own under the cache, installed from PyPI on first use; one that
cannot be installed is left out with the reason. Replies are not streamed, since not all of them stream.
CPU time is the gateway's whole process: ours includes its tokenizer and its HTTP client here, as does that of
verifiers, while the other two neither tokenize nor parse a reply. Callers: gateway, grpo.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._process import Process, running
from insitu.errors import SetupError
from insitu.storage.temp_dirs import cache_folder

INSTALL_S = 900.0
START_S = 120.0
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A gateway of others."""

    name: str
    requirement: str
    driver: str = ""
    """Script of ours that serves it; empty = its own command line."""
    over: bool = False
    """Its environment adds to this one, which has the large packages, torch above all."""


PEERS = (
    Peer(name="openenv", requirement="openenv==0.10.0", driver="_peer_openenv.py"),
    Peer(name="verifiers", requirement="verifiers==0.4.0", driver="_peer_verifiers.py"),
    Peer(name="rllm-model-gateway", requirement="rllm-model-gateway==0.1.0"),
)


def installed(peer: Peer) -> Path:
    """Its Python; installs it on first use. Raises SetupError with what pip said."""
    below = sysconfig.get_path("purelib") if peer.over else ""
    name = peer.requirement.replace("==", "-") + (f"-{zlib.crc32(below.encode()):x}" if below else "")
    folder = cache_folder() / "peers" / name
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return python
    _run(peer, [sys.executable, "-m", "venv", str(folder)])
    pins = []
    if below:
        # what is not installed here is found in the other environment
        Path(sysconfig.get_path("purelib", vars={"base": str(folder)}), "zz_base.pth").write_text(below)
        pins = ["-c", str(HERE.parent / "requirements" / "bridges.txt")]
    install = ["install", "-q", "--disable-pip-version-check", *pins, peer.requirement]
    _run(peer, [str(python), "-m", "pip", *install])
    done.touch()
    return python


def _run(peer: Peer, command: Sequence[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{peer.requirement} cannot be installed: {error}") from error
    if ran.returncode:
        said = ran.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SetupError(f"{peer.requirement} cannot be installed: {said[0]}")


class Served:
    """A gateway under test, and its process as the kernel counts it."""

    def __init__(self, pid: int, open_sessions: Callable[[int], dict[str, Any]]) -> None:
        self.pid, self.open = pid, open_sessions

    def cpu_s(self) -> float:
        """CPU time of the process, all threads. Linux: the clock of a process by its id."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def ours(model: Path, engine: str) -> Iterator[Served]:
    with running("benchmarks._gateway_process", str(model), engine) as process:
        yield Served(process.child.pid, lambda count: dict(process.ask({"open": count})))


@contextmanager
def theirs(peer: Peer, model: Path, engine: str) -> Iterator[Served]:
    """Raises SetupError when it cannot be installed or does not start."""
    python = installed(peer)
    if not peer.driver:
        with _rllm(python, engine) as served:
            yield served
        return
    command = [str(python), str(HERE / peer.driver), engine, str(model)]
    process = Process.of(command, stderr=subprocess.DEVNULL, env=_environment())
    try:
        try:
            process.receive()
        except RuntimeError as error:
            raise SetupError(f"{peer.name} does not start: {error}") from error
        yield Served(process.child.pid, lambda count: dict(process.ask({"open": count})))
    finally:
        process.end()


@contextmanager
def _rllm(python: Path, engine: str) -> Iterator[Served]:
    """By its command line; a session is what a path names."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker", f"{engine}/v1", "--store", "memory", "--log-level", "WARNING"]
    child = subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL)

    def sessions(count: int) -> dict[str, Any]:
        reported = [{"path": f"/sessions/s{i}/v1/chat/completions", "secret": "none"} for i in range(count)]
        return {"port": port, "sessions": reported}

    try:
        _await_health(child, f"http://127.0.0.1:{port}/health")
        yield Served(child.pid, sessions)
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _await_health(child: subprocess.Popen[bytes], url: str) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if child.poll() is not None:
            raise SetupError(f"rllm-model-gateway ended with status {child.returncode} at its start")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise SetupError(f"rllm-model-gateway did not start within {START_S:g} s")


def _environment() -> dict[str, str]:
    """Without a key or a setting of the user's; nothing is fetched."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def measure(served: Served, job: Mapping[str, Any], sessions: int) -> dict[str, float]:
    """One round of one shape."""
    with running("benchmarks._load") as load:
        load.say({**job, **served.open(sessions)})
        load.receive()
        before = served.cpu_s()
        load.say("go")
        result = load.receive()
        cpu_s = served.cpu_s() - before
    calls = len(result["seconds"])
    latency = 1e3 * np.array(result["seconds"])
    return {
        "cpu_ms": 1e3 * cpu_s / calls,
        "p50": float(np.percentile(latency, 50)),
        "p99": float(np.percentile(latency, 99)),
        "calls_per_s": calls / result["wall_s"],
        "calls": calls,
        "body_bytes": result["body_bytes"],
        "rss_mb": served.rss_bytes() / 1e6,
    }


def compare(
    model: Path, jobs: Mapping[str, tuple[Mapping[str, Any], int]], rounds: int
) -> dict[str, dict[str, Any]]:
    """By gateway: what `reported` makes of its shapes, or `skipped` with the reason. `jobs`: (load, sessions)
    by body size. Rounds go through all gateways in turn, so that all see the same machine."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    skipped: dict[str, str] = {}
    for _ in range(rounds):
        for name in ("insitu", *(peer.name for peer in PEERS)):
            if name not in skipped:
                try:
                    cells = _round(name, model, jobs)
                except (SetupError, RuntimeError) as error:
                    skipped[name] = re.sub(r"\s+", " ", str(error))[:300]
                    continue
                for shape, cell in cells.items():
                    found.setdefault(name, {}).setdefault(shape, []).append(cell)
    by_name = {
        name: reported({size: _medians(cells) for size, cells in sizes.items()})
        for name, sizes in found.items()
    }
    return by_name | {name: {"skipped": reason} for name, reason in skipped.items()}


def reported(cells: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """One gateway's cells by body size under the names that ours have in the benchmark's line."""
    first = next(iter(cells))
    return {
        "cpu_ms": {size: cell["cpu_ms"] for size, cell in cells.items()},
        "added_ms": {size: {"p50": cell["p50"], "p99": cell["p99"]} for size, cell in cells.items()},
        "calls_per_s": cells[first]["calls_per_s"],
        "calls_per_s_at": f"{first}/1",
        "bytes_per_token": None,  # theirs do not say how many tokens they hold
        "shapes": {f"{size}/1": dict(cell) for size, cell in cells.items()},
    }


def _round(
    name: str, model: Path, jobs: Mapping[str, tuple[Mapping[str, Any], int]]
) -> dict[str, dict[str, float]]:
    """Every shape with a fresh gateway."""
    cells = {}
    peer = next((peer for peer in PEERS if peer.name == name), None)
    for shape, (job, sessions) in jobs.items():
        with running("benchmarks._peer_engine", str(model)) as engine:
            url = f"http://127.0.0.1:{engine.receive()['port']}"
            gateway = ours(model, url) if peer is None else theirs(peer, model, url)
            with gateway as served:
                cells[shape] = measure(served, job, sessions)
    return cells


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(float(np.median([r[name] for r in rounds])), 3) for name in rounds[0]}
