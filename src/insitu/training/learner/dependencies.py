"""What a learner needs that an installation of insitu may lack, found out before anything starts.

Never imports torch: it only looks for it. Called by the CLI.
"""

from __future__ import annotations

from importlib.util import find_spec

from insitu.config import Config
from insitu.errors import ConfigError
from insitu.install_hints import install_extra


def require_learner(config: Config) -> None:
    """Raises ConfigError, saying what to install, where a learner of this configuration could not start."""
    hf = config.policy.kind == "hf"
    names = ("torch", "safetensors", *(["transformers"] if hf else []))
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        extra = "hf" if hf else "train"
        raise ConfigError(f"{' and '.join(missing)} {are} not installed: {install_extra(extra)}")
