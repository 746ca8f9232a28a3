"""A key that is set to nothing (0, "", [], false) stays so on every way that a configuration takes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from insitu.config import Config, dump_toml, load_config
from insitu.config.load import tables_of
from insitu.errors import ConfigError
from insitu_train.redaction import Redaction

OFF: tuple[Any, ...] = (0, 0.0, "", [], False)


def keys_that_are_on() -> Iterator[tuple[str, str, Any]]:
    """Yield table, key and value of each key whose default is something."""
    for table, keys in tables_of(Config()):
        for key, value in keys:
            if value not in (None, 0, "", (), False) and not hasattr(value, "model_dump"):
                yield table, key, value


def set_to_nothing() -> list[Any]:
    """Each key with each value by which it can be switched off; those that cannot be are left out."""
    found = []
    for table, key, default in keys_that_are_on():
        for value in OFF:
            try:
                config = load_config(base={table: {key: value}})
            except ConfigError:
                continue
            if getattr(dict(tables_of(config))[table], key) != default:
                found.append(pytest.param(config, id=f"{table}.{key}={value!r}"))
    return found


CASES = set_to_nothing()


def test_many_keys_can_be_switched_off() -> None:
    assert len(CASES) > 30


@pytest.mark.parametrize("config", CASES)
def test_off_stays_off_in_a_stored_configuration_and_in_an_export(config: Config) -> None:
    for written in (config, Redaction().config(config)):
        assert load_config(base=tomllib.loads(dump_toml(written)), stored=True) == config
