"""The folder of a deployment, from a configuration and the templates in files/."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from insitu.config import Config, load_config
from insitu.config.base import is_path
from insitu.engines.server_command import SERVERS, server_command
from insitu.errors import ConfigError, SetupError
from insitu.storage.files import write_text
from insitu_fleet.deploy import Target
from insitu_fleet.deploy.placement import LOOPBACK, Spread, placement, spread

TARGETS: tuple[Target, ...] = get_args(Target)
OWN_FILE: Mapping[Target, tuple[str, str]] = {
    "space": ("space.md", "README.md"),
    "slurm": ("job.sbatch", "job.sbatch"),
    "ray": ("job.sh", "job.sh"),
    "k8s": ("job.yaml", "job.yaml"),
}
"""Template and name of the file that a target adds."""
SHARED = ("Dockerfile", "compose.yaml", "start.sh")
SPACE_PORT, PORT = 7860, 8080
CPU_BASE, GPU_BASE = "python:3.12-slim", "vllm/vllm-openai:v0.32.0"
NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
"""A Kubernetes name; longer ones do not fit all of its uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """Options of one deployment."""

    target: Target
    config: Path
    out: Path
    """New or empty folder."""
    name: str = "insitu"
    """Name of the job."""
    nodes: int = 1
    gpus: int = 0
    """GPUs of a node; 0 = a CPU image."""
    image: str = ""
    """k8s: reference of the pushed image; empty = NAME:latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What was written."""

    files: tuple[Path, ...]
    needs: tuple[str, ...]
    """What the user must add: files that the configuration names, secrets."""


def deploy(options: DeployOptions) -> Deployment:
    """Write the folder. Raises ConfigError, SetupError; nothing is written then."""
    _check(options)
    config = load_config(options.config)
    values = _values(options, config, spread(config, options.nodes, options.gpus))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if any(options.out.iterdir()):
            raise SetupError(f"--out {options.out} is not empty")
        written = [_write(options.out / name, _filled(name, values)) for name in SHARED]
        if options.target == "space":
            written.append(_write(options.out / "push.py", _filled("push.py", values)))
        template, name = OWN_FILE[options.target]
        written.append(_write(options.out / name, _filled(template, values)))
        written.append(_write(options.out / "insitu.toml", options.config.read_text(encoding="utf-8")))
        written.append(_write(options.out / ".dockerignore", "runs\n.env\n*.log\n"))
        (options.out / "wheels").mkdir()
        written.append(_write(options.out / "wheels" / "README", "The wheels of insitu, or nothing.\n"))
    except OSError as error:
        raise SetupError(f"cannot write {options.out}: {error.strerror or error}") from error
    return Deployment(files=tuple(written), needs=tuple(_needs(config, options.out)))


def place(options: DeployOptions) -> list[str]:
    """Return the lines that say which host has which part. Raises ConfigError."""
    _check(options)
    return placement(load_config(options.config), options.nodes, options.gpus)


def _check(options: DeployOptions) -> None:
    if NAME.fullmatch(options.name) is None:
        raise ConfigError(f"--name {options.name}: lower-case letters, digits and - only, at most 42")
    if options.nodes < 1 or options.gpus < 0:
        raise ConfigError("--nodes counts from 1, --gpus from 0")
    if options.nodes > 1 and options.target in ("space", "k8s"):
        raise ConfigError(f"--nodes {options.nodes}: {options.target} runs on one machine")


def secrets_of(config: Config) -> list[str]:
    """Return the environment variables with secrets that a run reads."""
    names = {config.engine.key_env, config.run.hub and "HF_TOKEN"}
    names |= {"WANDB_API_KEY" for tracker in config.track.to if tracker == "wandb"}
    return sorted(name for name in names if name)


def _engine(config: Config, gpus: int) -> tuple[str, str, str]:
    """Return command, variables and URL of the engine that runs beside insitu; empty for none.

    Raises ConfigError.
    """
    engine = config.engine
    here = [url for url in engine.urls if urlsplit(url).hostname in LOOPBACK]
    if engine.kind not in SERVERS or not here:  # elsewhere, or started by insitu (no engine.urls)
        return "", "", ""
    if len(engine.urls) > 1:
        raise ConfigError("engine.urls: start.sh starts one engine; without urls insitu starts several")
    url = here[0].rstrip("/").removesuffix("/v1")
    command = server_command(config, config.model.path, cpu=not gpus, port=urlsplit(url).port or 80)
    program = ["vllm"] if engine.kind == "vllm" else ["python3", "-m", command.module]
    variables = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    return shlex.join([*program, *command.arguments]), " ".join(variables), url


def _values(options: DeployOptions, config: Config, ranks: Spread) -> dict[str, str]:
    gpus, space = options.gpus, options.target == "space"
    command, variables, url = _engine(config, gpus)
    limits = {"cpu": "8", "memory": "32Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    device = f"{{driver: nvidia, count: {gpus}, capabilities: [gpu]}}"
    extras = ["all", "hf", "renderers", *(["hub"] if config.run.hub else []), *config.track.to]
    return {
        "BASE": GPU_BASE if gpus else CPU_BASE,
        "COMPOSE_GPUS": f"    deploy: {{resources: {{reservations: {{devices: [{device}]}}}}}}\n"
        if gpus
        else "",
        "ENGINE": command,
        "ENGINE_ENV": variables,
        "ENGINE_URL": url,
        "EXTRAS": ",".join(extras),
        "GPUS": str(gpus),
        "HARDWARE": ("cpu-basic", "a10g-small", "a10g-largex2", "a10g-largex4")[min(gpus, 3)],
        "IMAGE": options.image or f"{options.name}:latest",
        "K8S_LIMITS": json.dumps(limits),
        "NAME": options.name,
        "NODES": str(options.nodes),
        "RANKS_EACH": str(ranks.each),
        "RANKS_HERE": str(ranks.here),
        "RANKS_PORT": str(ranks.port),
        "PORT": str(SPACE_PORT if space else PORT),
        "SBATCH_GPUS": f"#SBATCH --gpus-per-node={gpus}" if gpus else "",
        "SBATCH_NO_KILL": "#SBATCH --no-kill" if ranks.each else "",
        "SECRETS": ", ".join(secrets_of(config)),
        "USES_RAY": str(int(options.nodes > 1 and (config.fleet.kind == "ray" or not ranks.each))),
    }


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = (files("insitu_fleet.deploy") / "files" / template).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_0-9]+)@", lambda found: values[found[1]], text)


def _write(path: Path, text: str) -> Path:
    write_text(path, text)
    if path.suffix in (".sh", ".sbatch"):
        path.chmod(0o755)
    return path


def _needs(config: Config, out: Path) -> list[str]:
    """Return what to add before the folder can be used."""
    named = [("model.path", config.model.path), *(("tasks.path", table.path) for table in config.tasks)]
    needs = [f"{key}: copy {path} there" for key, path in named if path and is_path(path)]
    return [*needs, *(f"set {name} where it runs" for name in secrets_of(config))]
