"""Settings of an environment's server, from environment variables: `uvicorn` starts it without arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu_bridges.versions import Need

CONFIG, MOST, CALLERS = "INSITU_ENV_CONFIG", "MAX_CONCURRENT_ENVS", "INSITU_ENV_TRUST_CALLERS"
TOKEN = "INSITU_ENV_TOKEN"
APP = Need(
    ("openenv.core.env_server.http_server:create_app",),
    (
        "env", "action_cls", "observation_cls", "env_name", "concurrency_config", "state_cls",
        "reset_observation_cls",
    ),
    complete=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What the operator of a server decides."""

    config: Config
    """Tasks, sandboxes and grader, for an agent's environment also agent and model. INSITU_ENV_CONFIG: its
    TOML file; without one, generated bug-fix tasks."""
    max_episodes: int = 8
    """Concurrent episodes. MAX_CONCURRENT_ENVS."""
    trust_callers: bool = False
    """Whether a call may define a task by its own commands, and name its own model endpoint.
    INSITU_ENV_TRUST_CALLERS = 1."""
    token: str = field(default="", repr=False)
    """What `Authorization: Bearer` must hold, except at /health; empty = none. INSITU_ENV_TOKEN."""

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> ServerSettings:
        """Read the environment. Raises ConfigError."""
        most, trust = env.get(MOST, "8"), env.get(CALLERS, "0")
        if not most.isdigit() or int(most) < 1:
            raise ConfigError(f"{MOST} = {most!a} is not a number from 1")
        if trust not in ("0", "1"):
            raise ConfigError(f"{CALLERS} = {trust!a} is neither 0 nor 1")
        config = load_config(env.get(CONFIG) or None)
        return cls(
            config=config, max_episodes=int(most), trust_callers=trust == "1", token=env.get(TOKEN, "")
        )
