"""Starts a real vLLM server (made by scripts/setup-vllm) on loopback and ends it, with all its children.

For tests and benches that want the real thing on a CPU. It serves one model folder, in float32 unless asked
for another type, so that its logprobs can be compared with insitu's own forward. Every wait has a deadline; a
server that dies or does not come up in time is an EngineError with the end of its log.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from insitu.errors import EngineError

START_S = 300.0
"""Start and first generation, on two busy cores."""
STOP_S = 20.0
INSITU_WORKER = "insitu.engines.vllm_worker.InsituWorker"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealVllm:
    """A running server."""

    url: str
    model: Path
    pid: int
    log: Path
    start_s: float
    """Seconds from the start of the process to the first answer of /health."""


@contextmanager
def start_vllm(
    venv: Path,
    model: Path,
    log: Path,
    *,
    processed: bool = True,
    scale_out: bool = True,
    max_model_len: int = 4096,
    adapters: int = 0,
    dtype: str = "float32",
    port: int = 0,
    extension: str = "",
    extra: Sequence[str] = (),
) -> Iterator[RealVllm]:
    """Serve `model`; `processed` and `scale_out` as in `fakes.vllm`, `adapters`: most at once, of any
    rank up to 16. port: 0 = a free one. extension: class whose methods its workers get; vLLM 0.26 needs
    INSITU_WORKER. Raises EngineError."""
    port = port or _free_port()
    arguments = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"]
    arguments += ["--dtype", dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", "16"]
    arguments += ["--logprobs-mode", "processed_logprobs" if processed else "raw_logprobs"]
    # On a CPU, vLLM 0.32 dies when it cuts the prompt of a request with a seed: it cannot rewind the stream.
    arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(2 * max_model_len)]
    arguments += ["--enforce-eager", "--enable-prompt-tokens-details", *extra]
    # vLLM 0.26 wants ray for it
    arguments += [] if extension else ["--weight-transfer-config", '{"backend":"ipc"}']
    arguments += ["--enable-scale-out"] if scale_out else []
    arguments += ["--worker-extension-cls", extension] if extension else []
    arguments += ["--enable-lora", "--max-loras", str(adapters)] if adapters else []
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments,
            env=_environment()
            | ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if adapters else {})
            | ({"PYTHONPATH": f"{_ROOT}:{_ROOT / 'src'}"} if extension else {}),
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _await_health(process, url, log, began)
        yield RealVllm(url=url, model=model, pid=process.pid, log=log, start_s=time.monotonic() - began)
    finally:
        _end(process)


def _environment() -> dict[str, str]:
    """Without a variable of ours or a key of the user's; nothing is fetched or reported."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    return kept | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path, began: float) -> None:
    while time.monotonic() - began < START_S:
        if process.poll() is not None:
            raise EngineError(f"vLLM ended with code {process.returncode} at its start: {_tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                healthy = answer.status == 200
        except OSError:
            healthy = False
        if healthy:
            return
        time.sleep(0.5)
    raise EngineError(f"vLLM did not come up within {START_S:g} s: {_tail(log)}")


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-6:])[-1500:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: the server's engine is a child of its own."""
    for signum, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=wait_s)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def untied_copy(model: Path, folder: Path) -> Path:
    """The same function with an output head of its own. Reads and writes safetensors as bytes."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model / name, folder / name)
    config = orjson.loads((model / "config.json").read_bytes())
    (folder / "config.json").write_bytes(orjson.dumps({**config, "tie_word_embeddings": False}))
    raw = (model / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    head, body = orjson.loads(raw[8 : 8 + size]), raw[8 + size :]
    start, end = head["model.embed_tokens.weight"]["data_offsets"]
    offsets = [len(body), len(body) + end - start]
    head["lm_head.weight"] = {**head["model.embed_tokens.weight"], "data_offsets": offsets}
    header = orjson.dumps(head)
    header += b" " * (-len(header) % 8)
    written = len(header).to_bytes(8, "little") + header + body + body[start:end]
    (folder / "model.safetensors").write_bytes(written)
    return folder


def installed_vllm(setup: Path) -> Path:
    """The environment that `scripts/setup-vllm` makes, which is run here if need be. Raises EngineError."""
    bash = shutil.which("bash") or "/bin/bash"
    done = subprocess.run([bash, str(setup)], capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise EngineError(f"scripts/setup-vllm failed: {done.stderr.strip()[-500:]}")
    return Path(done.stdout.strip().splitlines()[-1])
