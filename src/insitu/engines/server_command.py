"""What an engine server must be started with: flags and variables, by the configuration; and its GPUs.

`insitu` starts servers with these (`launch.py`); `--dry-run` and docs/servers.md show them for servers of
one's own. SGLang's flags are written to its documentation.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from insitu.config import Config
from insitu.config.training import split_ranks
from insitu.errors import ConfigError

log = logging.getLogger(__name__)

SERVERS = ("vllm", "sglang")
"""Kinds of engines that are servers with an address."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
NAME = "policy"
"""Name under which a server offers the model."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32 takes for --max-lora-rank."""
FEW_CPUS = 4
"""CPUs of a server of which none is left to its scheduler."""
BLOCK_TOKENS = 128
"""Unit of vLLM's memory for keys and values on a CPU."""
_MEMORY = ("--kv-cache-memory", "--gpu-memory-utilization", "VLLM_CPU_KVCACHE_SPACE")
_ASK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How to start one server."""

    module: str
    """Module of the program, run with `python -m`."""
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the shell."""

    @property
    def program(self) -> list[str]:
        """The program as a user calls it."""
        return ["vllm"] if self.module.startswith("vllm.") else ["python3", "-m", self.module]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *self.program, *map(shlex.quote, self.arguments)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """GPUs of a run whose servers insitu starts."""

    servers: Sequence[Sequence[str]]
    """Of each server; an empty one computes on the CPU."""
    learner: Sequence[str] = ()
    """Of its ranks; empty = the CPU, or whichever torch sees."""


def server_command(
    config: Config,
    model: str,
    *,
    cpu: bool,
    port: int = 8000,
    gpus: Sequence[str] = (),
    number: int = 0,
) -> ServerCommand:
    """Return how server `number` of this configuration is started; `gpus`: those that it sees."""
    table = config.engine
    build = _sglang if table.kind == "sglang" else _vllm
    command = build(config, model, port, cpu=cpu)
    placed = {VISIBLE: ",".join(gpus)} if gpus else {}
    flags, variables = _vllm_on_cpu(config, model, number) if cpu and table.kind == "vllm" else ([], {})
    return ServerCommand(
        module=command.module,
        arguments=(*command.arguments, *flags, *table.args),
        environment={**placed, **command.environment, **variables},
    )


def _vllm(config: Config, model: str, port: int, *, cpu: bool) -> ServerCommand:
    table, length = config.engine, str(config.model.max_context_tokens)
    flags = ["serve", model, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME]
    flags += ["--max-model-len", length, "--logprobs-mode", "processed_logprobs"]
    flags += ["--enable-scale-out", "--enable-prompt-tokens-details"]
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    if table.publish_dtype != "auto":
        flags += ["--dtype", table.publish_dtype]
    if table.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(table.tensor_parallel)]
    if config.publishes_adapters:
        rank = next((one for one in LORA_RANKS if one >= config.policy.lora_rank), LORA_RANKS[-1])
        flags += ["--enable-lora", "--max-loras", str(config.collect.max_staleness + 2)]
        flags += ["--max-lora-rank", str(rank)]
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if table.publish in ("ipc", "nccl"):
        flags += ["--weight-transfer-config", f'{{"backend":"{table.publish}"}}']
    if table.publish == "ipc":
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if table.share_gpu:
        flags += ["--enable-sleep-mode"]
    if table.replay_experts:
        flags += ["--enable-return-routed-experts"]
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return ServerCommand(module="vllm.entrypoints.cli.main", arguments=flags, environment=variables)


def _vllm_on_cpu(config: Config, model: str, number: int) -> tuple[list[str], dict[str, str]]:
    """Return the flags and variables of a server on a CPU; those that the user sets are left alone."""
    # vLLM 0.32 dies on a CPU when it cuts the prompt of a request with a seed
    flags = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(config.model.max_context_tokens)]
    # Compiling costs a minute or more at every start, and gains a tenth of the tokens a second.
    flags += ["--enforce-eager"]
    variables = {"VLLM_TARGET_DEVICE": "cpu"}
    set_by_user = (*config.engine.args, *os.environ)
    # Otherwise vLLM wants 92 % of the machine's memory, and does not start where something else runs.
    if not any(one.startswith(_MEMORY) for one in set_by_user) and (cache := _cache_bytes(config, model)):
        flags += ["--kv-cache-memory-bytes", str(cache)]
    bind, each = "VLLM_CPU_OMP_THREADS_BIND", config.engine.tensor_parallel
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // (config.engine.replicas * each)
    # By itself vLLM leaves a core for its scheduler: of two that is half.
    if bind not in os.environ and 0 < share <= FEW_CPUS:
        lists = [cpus[at * share : (at + 1) * share] for at in range(number * each, (number + 1) * each)]
        variables[bind] = "|".join(",".join(map(str, one)) for one in lists)
    return flags, variables


def _cache_bytes(config: Config, model: str) -> int:
    """Return the bytes of keys and values of a server's rollouts; 0 for a model that is not known.

    At most half of the free memory, but enough for one context.
    """
    try:
        described = json.loads((Path(model) / "config.json").read_bytes())
        described = described.get("text_config", described)
        heads = described["num_attention_heads"]
        width = described.get("head_dim") or described["hidden_size"] // heads
        kept = described["num_hidden_layers"] * (described.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    dtype: str = config.engine.publish_dtype
    if dtype == "auto":
        dtype = str(described.get("dtype") or described.get("torch_dtype") or "")
    blocks = config.model.max_context_tokens // BLOCK_TOKENS + 2
    context = blocks * BLOCK_TOKENS * 2 * kept * width * (4 if dtype == "float32" else 2)
    rollouts = -(-config.harness.workers // config.engine.replicas)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * config.engine.replicas)
    return int(max(context, min(context * rollouts, free)))


def _sglang(config: Config, model: str, port: int, *, cpu: bool) -> ServerCommand:
    table = config.engine
    flags = ["--model-path", model, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME]
    flags += ["--context-length", str(config.model.max_context_tokens)]
    if table.publish_dtype != "auto":
        flags += ["--dtype", table.publish_dtype]
    if table.tensor_parallel > 1:
        flags += ["--tp-size", str(table.tensor_parallel)]
    if table.share_gpu:
        flags += ["--enable-memory-saver"]
    if cpu:
        flags += ["--device", "cpu"]
    return ServerCommand(module="sglang.launch_server", arguments=flags)


def interpreter(config: Config) -> str:
    """Return the Python that has the server; raise ConfigError if it has not."""
    table = config.engine
    path = Path(table.python) if table.python else Path(sys.executable)
    python = path / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK):
        raise ConfigError(f"engine.python: {python} is not a program")
    ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({table.kind!r}) is None)"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, timeout=60.0, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.python: {python} does not run: {error}") from error
    if done.returncode:
        raise ConfigError(f"engine.python: {python} has no {table.kind}; name the environment that has it")
    return str(python.absolute())


def present_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES if it is set, else those of the machine."""
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    return [line.strip() for line in query_gpus("index") if line.strip().isdecimal()]


def query_gpus(fields: str) -> list[str]:
    """Return a line of these fields of each GPU of the machine; none where nvidia-smi does not work."""
    command = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("GPUs are not known: %s", error)
        return []
    return done.stdout.splitlines()


def place(config: Config, present: Sequence[str]) -> Placement:
    """Return who computes where: the servers on the first GPUs, or on those of `engine.gpus`.

    Raises ConfigError when they do not suffice. The GPUs that the configuration names are taken as given
    where there are none at all, so that a configuration can be looked at on another machine.
    """
    table, chosen = config.engine, [str(one) for one in config.engine.gpus]
    each, ranks = table.tensor_parallel, _learner_gpus(config)
    needed = table.replicas * each
    if not chosen and not present:
        return Placement(servers=[()] * table.replicas)
    if present and (absent := [one for one in chosen if one not in present]):
        raise ConfigError(f"engine.gpus: there is no GPU {', '.join(absent)} here, only {', '.join(present)}")
    servers = chosen or list(present[:needed])
    shared = table.share_gpu or table.publish == "ipc"
    free = servers if shared else [one for one in present if one not in servers]
    if present and (len(servers) < needed or len(free) < ranks):
        both = needed if shared else needed + ranks
        raise ConfigError(
            f"the servers use {needed} GPUs (engine.replicas, engine.gpus), the learner {ranks}"
            f"{' of them' if shared else ''} (train.ranks): {both} in all, {len(present)} are here"
        )
    groups = [servers[at : at + each] for at in range(0, needed, each)]
    return Placement(servers=groups, learner=free[-ranks:] if ranks else ())


def _learner_gpus(config: Config) -> int:
    """Return the GPUs that the learner uses."""
    on_gpu = config.policy.kind == "hf" and config.policy.device != "cpu"
    return split_ranks(config.train.ranks)[0] if on_gpu else 0


def describe_servers(config: Config) -> list[str]:
    """Return who computes where and the command of each server, a line each; none for other engines."""
    table = config.engine
    if table.kind not in SERVERS:
        return []
    model = config.model.path or "MODEL"
    if not table.launch:
        return [f"start each server with: {server_command(config, model, cpu=not _learner_gpus(config))}"]
    placement = place(config, present_gpus())
    lines = [f"learner: {_named(placement.learner) if _learner_gpus(config) else 'CPU'}"]
    for number, gpus in enumerate(placement.servers):
        command = server_command(config, model, cpu=not gpus, port=8000 + number, gpus=gpus, number=number)
        lines.append(f"server {number}: {_named(gpus, 'CPU')}: {command}")
    return lines


def _named(gpus: Sequence[str], none: str = "whichever GPU torch sees") -> str:
    return f"GPU {', '.join(gpus)}" if gpus else none
