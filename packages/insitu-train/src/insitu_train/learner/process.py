"""The learner's child process: what it needs, its GPUs, environment and arguments.

`torch.set_num_threads` sets OpenMP, and MKL only for the calling thread. Inside a parallel kernel (the
backward pass of attention) OpenMP's own threads call MKL too; they use OpenMP's number unless a variable
overrides it. Ranks inherit the learner's environment. A server takes the first GPU by default, so the
learner's order is by memory in use, the last index first among equals; by nvidia-smi, because the controller
has no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from insitu.config import Config, dump_toml, model_folder, model_kind
from insitu.config.training import split_ranks
from insitu.engines.server_command import VISIBLE, place, present_gpus, query_gpus
from insitu.errors import ConfigError, EngineError
from insitu.install_hints import install_extra
from insitu_train.channel.child import Child, python_path
from insitu_train.channel.host_link import SECRET, reachable, secret_of
from insitu_train.embedded.architecture import read_architecture
from insitu_train.host_memory import available_memory
from insitu_train.options import ServiceOptions, TrainConfig, dump_config

_PREDICT_S = 300.0
_EQUAL_MIB = 1024
"""Smaller differences in use do not count: a display, driver overhead."""


def _avoids_server_gpu(config: Config) -> bool:
    """Return whether the trainer should avoid a server's GPU: not where both must share one."""
    served = config.engine.kind in ("vllm", "sglang")
    one = config.engine.share_gpu or config.engine.publish == "ipc"
    return served and not one and config.policy.kind == "hf" and config.policy.device != "cpu"


def least_used(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows all GPUs, the least used first.

    Empty where it is set, or there are fewer than two.
    """
    if VISIBLE in environment:
        return {}
    found = []
    for at, line in enumerate(query_gpus("uuid,memory.used")):
        uuid, _, used = line.partition(",")
        if not used.strip().isdecimal():  # MIG devices report no memory in use
            return {}
        found.append((int(used) // _EQUAL_MIB, -at, uuid.strip()))
    return {VISIBLE: ",".join(uuid for _, _, uuid in sorted(found))} if len(found) > 1 else {}


DROPPED = frozenset(
    (
        # number of threads: another split, other rounding
        *("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_NESTED", "OMP_MAX_ACTIVE_LEVELS"),
        *("OMP_SCHEDULE", "MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "MKL_NUM_STRIPES"),
        *("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "BLIS_NUM_THREADS"),
        # choice of kernels: other instructions, order of sums or dtype
        *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DISABLE_FAST_MM"),
        *("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OPENBLAS_CORETYPE"),
        *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "BLIS_ARCH_TYPE"),
        *("TORCH_LINEAR_FLATTEN_3D", "TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_MKLDNN_MATMUL_MIN_SIZE"),
        # TF32 products on a GPU, which images of NVIDIA switch on
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"),
    )
)
"""Variables that change a run's bits but are not in its configuration: a resumed or replayed run would
differ. Variables that only place or wake threads stay."""


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""glibc keeps up to 1 GiB of what was freed: a step takes that much again, and each page that the system
gives costs a page fault. Setting one value ends the adaptation of both; the other's ends at 32 MiB."""


def computing(environment: Mapping[str, str], *, shares_tensors: bool = False) -> dict[str, str]:
    """Return `environment` without `DROPPED`, and with defaults for torch.

    Threads sleep between parallel regions: on a busy machine spinning costs many times the work. Freed memory
    is kept for the next step. GPU memory is in expandable segments, since passes differ in length; not where
    another process maps tensors (`shares_tensors`), which such segments prevent.
    """
    kept = {name: value for name, value in environment.items() if name not in DROPPED}
    growing = {} if shares_tensors else {ALLOCATOR: "expandable_segments:True"}
    return {"OMP_WAIT_POLICY": "PASSIVE", **KEPT_MEMORY, **growing, **kept}


_GENERATION_S = 300.0
_GIB = 1 << 30
_MAX_ROWS = 64
"""Most requests that the embedded engine decodes together; more of them wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """Arguments of a learner process."""

    model: Path
    """Model folder; its tokenizer files are copied into checkpoints."""
    train: TrainConfig = field(default_factory=TrainConfig)
    samples: bool = True
    """Run an engine; otherwise a server samples."""
    max_rows: int = 32
    """Concurrent requests of the engine."""
    max_context: int = 2048
    """Prompt plus sampled tokens of one request."""
    engine_threads: int = 1
    cache_tokens: int = 65536
    """Prompt tokens in the engine's prefix cache."""
    log: Path | None = None
    """File for the child's output; None = a temporary one."""
    restarts: int = 0
    """Restarts of a child that is killed while it starts."""
    start_deadline_s: float = 600.0
    """Timeout of a start, save, load, export or publication."""
    call_deadline_s: float = _GENERATION_S
    """Timeout of one generation."""
    beside_server: bool = False
    """Use the least used GPUs, since a server uses another one."""
    placed: Config | None = None
    """Use the GPUs that this configuration leaves to the learner beside the servers it starts."""
    shares_tensors: bool = False
    """A server maps its tensors (CUDA IPC)."""
    service: ServiceOptions | None = None
    """The training service that trains and samples instead of this process."""

    @classmethod
    def of(cls, config: Config, *, model: Path, log: Path | None = None) -> LearnerSpec:
        """Return the learner of a run's configuration."""
        table = config.train
        # calls that come meanwhile wait for the training step to end
        waits_s = table.step_timeout_s if config.samples_while_training else 0.0
        service = ServiceOptions.of(config) if config.engine.kind == "tinker" else None
        return cls(
            model=model,
            train=TrainConfig.of(config),
            samples=config.engine.in_learner,
            service=service,
            max_context=config.model.max_context_tokens,
            # the toy's products are too small to share among threads
            engine_threads=1 if config.policy.kind == "builtin" else table.threads,
            **_engine_size(config),
            log=log,
            restarts=table.restarts,
            start_deadline_s=table.step_timeout_s,
            call_deadline_s=(config.engine.call_timeout_s if service else _GENERATION_S) + waits_s,
            beside_server=_avoids_server_gpu(config),
            placed=config if config.engine.launch else None,
            shares_tensors=config.engine.publish == "ipc",
        )


def _engine_size(config: Config) -> dict[str, int]:
    """Return rows and cached tokens of the embedded engine: a real model's take memory that counts."""
    if config.policy.kind == "builtin":
        return {"max_rows": 32, "cache_tokens": 65536}
    return {"max_rows": 4 * -(-min(config.harness.workers, _MAX_ROWS) // 4), "cache_tokens": 4096}


def _check_sampler(config: Config) -> None:
    """Raise ConfigError if the embedded engine does not run the model, or lacks memory for its contexts."""
    try:
        model = read_architecture(model_folder(config))
    except EngineError as error:
        raise ConfigError(f"model.path: {error}") from error
    size, context = _engine_size(config), config.model.max_context_tokens
    bits = 16 if config.policy.dtype == "bfloat16" else 32
    tokens = size["max_rows"] * context + size["cache_tokens"]
    need, free = tokens * model.token_values * bits // 8, available_memory()
    if need > free:
        less = "" if bits == 16 else ', or set policy.dtype = "bfloat16"'
        raise ConfigError(
            f"model.max_context_tokens {context:,}: keys and values of {size['max_rows']} sessions"
            f" (harness.workers) may take {need / _GIB:.1f} GiB, {model.token_values * bits // 8:,} bytes a"
            f" token, and {free / _GIB:.1f} GiB of memory are available: lower either{less}"
        )


def absolute(path: Path) -> str:
    return str(path.absolute())


def _program(spec: LearnerSpec) -> tuple[str, list[str]]:
    """Return the module of the process and the arguments that only it takes."""
    if spec.service is not None:
        return "insitu_train.service.main", ["--service", spec.service.model_dump_json()]
    engine = {
        "max_rows": spec.max_rows,
        "max_context": spec.max_context,
        "threads": spec.engine_threads,
        "cache_tokens": spec.cache_tokens,
    }
    return "insitu_train.learner.main", ["--engine", json.dumps(engine) if spec.samples else ""]


async def spawn_learner(spec: LearnerSpec, socket: Path, log: Path, *, again: bool = False) -> Child:
    """Start a learner, which listens at `socket`; again: one of this run died."""
    program, own_arguments = _program(spec)
    if again and spec.train.meeting and spec.service is None:
        own_arguments.append("--again")
    arguments = [
        *("--socket", str(socket), "--model", absolute(spec.model), "--parent", str(os.getpid())),
        *("--train", dump_config(spec.train), *own_arguments),
    ]
    environment = computing(os.environ, shares_tensors=spec.shares_tensors)
    if spec.placed is not None:
        gpus = place(spec.placed, await asyncio.to_thread(present_gpus)).learner
        environment |= {VISIBLE: ",".join(gpus)} if gpus else {}
    elif spec.beside_server:
        environment |= await asyncio.to_thread(least_used, environment)
    return await Child.start(program, arguments, environment, socket, log)


def describe_hosts(config: Config) -> list[str]:
    """Return the command that brings ranks of other hosts; none without hosts."""
    here, world, address = split_ranks(config.train.ranks)
    if not address:
        return []
    return [
        f"train.ranks: other hosts bring {world - here} of {world} ranks, each with {SECRET} as here:"
        f" insitu ranks {reachable(address)} --ranks K"
    ]


def say_hosts(config: Config, say: Callable[[str], None]) -> None:
    """Say before the learner starts which hosts it waits for."""
    for line in describe_hosts(config):
        say(line)


def describe_learner(config: Config) -> list[str]:
    """Return who takes part from other hosts, and the memory of a GPU, a line each."""
    return [*describe_hosts(config), *_describe_memory(config)]


def _describe_memory(config: Config) -> list[str]:
    """Return what a model of transformers takes of a GPU, a line each, or why that is not known."""
    if config.policy.kind != "hf":
        return []
    if not model_kind(config.model.path) and not (Path(config.model.path) / "config.json").exists():
        return [
            f"memory: not predicted: {config.model.path} has no config.json here (that file is enough,"
            " without weights)"
        ]
    command = [sys.executable, "-P", "-m", "insitu_train.memory.describe"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": python_path()},
            input=dump_toml(config, comments=False),
            capture_output=True,
            text=True,
            timeout=_PREDICT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"memory: not predicted within {_PREDICT_S:g} s"]
    if done.returncode:
        return [f"memory: not predicted: {done.stderr.strip().splitlines()[-1]}"]
    return [f"memory: {line}" for line in done.stdout.splitlines()]


def require_learner(config: Config) -> None:
    """Raise ConfigError with an install hint when a learner of this configuration could not start."""
    further = {"hf": "transformers", "tinker": "tinker"}.get(config.policy.kind)
    if config.engine.kind == "tinker":
        further = "tinker"
    names = ("torch", "safetensors", *filter(None, [further]))
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        extra = {"transformers": "hf", "tinker": "tinker"}.get(further or "", "train")
        raise ConfigError(f"{' and '.join(missing)} {are} not installed: {install_extra(extra)}")
    if split_ranks(config.train.ranks)[2]:
        secret_of(os.environ)
    if config.engine.kind == "embedded" and (model_folder(config) / "config.json").exists():
        _check_sampler(config)
