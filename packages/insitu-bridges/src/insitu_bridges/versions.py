"""Releases of trainers that the bridges were made for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from insitu.errors import ConfigError

MADE_FOR = {"trl": "1.16", "verl": "0.9"}
"""Package -> release series, whose experimental classes are used."""


def check_version(package: str) -> None:
    """Raise ConfigError when another series of a trainer is installed. A checkout without metadata passes."""
    wanted = MADE_FOR[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        return
    if not f"{found}.".startswith(f"{wanted}."):
        raise ConfigError(
            f"{package} {found} is installed and this bridge was made for {package} {wanted}: pip install"
            f" '{package}=={wanted}.*'"
        )
