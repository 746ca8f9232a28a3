"""What sandboxes a run is made with: what the configuration asks for and this machine cannot is refused."""

from __future__ import annotations

from functools import partial

import pytest

from insitu.config import Config, load_config
from insitu.errors import SetupError
from insitu.runtime import sandboxes as sandboxes
from insitu.sandbox.cgroup import CgroupSupport
from insitu.sandbox.local import LocalBackend

pytestmark = pytest.mark.slow


def config(*overrides: str) -> Config:
    return load_config(overrides=list(overrides))


def test_a_limit_of_whole_sandboxes_is_kept_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    none = partial(LocalBackend, cgroups=lambda: CgroupSupport(cgroups=None, why="not delegated"))
    monkeypatch.setattr("insitu.runtime.sandboxes.LocalBackend", none)
    sandboxes.make_backend(config())
    with pytest.raises(SetupError, match=r"sandbox.memory_mb needs control groups; here: not delegated"):
        sandboxes.make_backend(config("sandbox.memory_mb=1024"))
