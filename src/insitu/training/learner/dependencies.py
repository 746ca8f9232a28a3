"""Checks for packages that a learner needs, without importing them."""

from __future__ import annotations

from importlib.util import find_spec

from insitu.config import Config
from insitu.errors import ConfigError
from insitu.install_hints import install_extra


def require_learner(config: Config) -> None:
    """Raise ConfigError with an install hint when a learner of this configuration could not start."""
    hf = config.policy.kind == "hf"
    names = ("torch", "safetensors", *(["transformers"] if hf else []))
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        extra = "hf" if hf else "train"
        raise ConfigError(f"{' and '.join(missing)} {are} not installed: {install_extra(extra)}")
