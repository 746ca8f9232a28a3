"""`insitu init`: a first configuration file."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Annotated

from insitu.command import Arg
from insitu.errors import ConfigError, boundary

ENGINES = {
    "embedded": """[engine]
kind = "embedded"             # samples on the CPU, inside of the learner
""",
    "vllm": """[engine]
kind = "vllm"
urls = ["http://127.0.0.1:8000"] # docs/servers.md has the options that the server needs

[policy]
kind = "hf"                   # a model of transformers
lora_rank = 16                # 0 = train all weights
""",
    "upstream": """[engine]
kind = "upstream"             # a provider: `insitu rollout` only, nothing can be trained
urls = "https://api.example.com"
model = "its-model"
key_env = "PROVIDER_KEY"      # environment variable with the key
""",
}
"""Part of the file by `engine.kind`."""


def first_config(agent: str, model: str, engine: str, tasks: str) -> str:
    """Return a commented configuration; raise ConfigError if it would not be valid."""
    from insitu.config import load_config  # `insitu --help` needs ENGINES and must not load pydantic

    unset = "empty = the small model of the demo"
    if tasks:
        unset = "set this: empty is the demo's model, which knows only the words of the demo's tasks"
    source = f'source = "jsonl"              # docs/tasks.md has other formats\npath = "{tasks}"'
    text = f"""# All keys with their meaning: insitu train FILE --dry-run

[run]
steps = 50

[model]
path = "{model}"{"" if model else f"                     # {unset}"}

[tasks]
{source if tasks else 'source = "toy"                # generated tasks; "jsonl" with `path` for your own'}

[harness]
agent = "{agent}"
workers = 8                   # rollouts at the same time

[collect]
group_size = 8                # rollouts per task

{ENGINES[engine]}"""
    load_config(tables=tomllib.loads(text))
    return text


def write_config(path: Path, text: str, tasks: str) -> list[str]:
    """Write the file and return the next commands; raise ConfigError if it exists."""
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name")
    with boundary(ConfigError, f"write {path}"):
        path.write_text(text, encoding="utf-8")
    name = shlex.quote(str(path))
    # Of a small set no task may be held out, and the first thing to know is whether they can be solved.
    own = [f"insitu tasks validate {name}", f"insitu rollout {name} rollout.split=train rollout.count=1"]
    first = own if tasks else [f"insitu rollout {name} rollout.count=4"]
    return ["insitu doctor", *first, f"insitu train {name} --dry-run"]


def init(
    file: Annotated[Path, Arg(positional=True, metavar="FILE")] = Path("insitu.toml"),
    agent: Annotated[str, Arg(help="the agent (default: pi)")] = "pi",
    model: Annotated[str, Arg(help="model folder (default: the small model of the demo)")] = "",
    engine: Annotated[str, Arg(choices=tuple(ENGINES), help="the sampler")] = "embedded",
    tasks: Annotated[str, Arg(help="JSONL file with tasks (default: generated tasks)")] = "",
) -> int:
    text = first_config(agent, model, engine, tasks)
    print("\n  ".join([f"wrote {file}; next:", *write_config(file, text, tasks)]))
    return 0
