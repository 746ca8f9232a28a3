"""A family for any text and the splitter of its vocabulary."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whet.harness.install import find_pi
from whet.render.template import TemplateFamily
from whet.testing.open_family import Splitter, open_family


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    open_family(folder)
    return folder


@pytest.fixture(scope="session")
def family(model: Path) -> TemplateFamily:
    return open_family(model)


@pytest.fixture
def splitter(model: Path) -> Splitter:
    return Splitter(model / "tokenizer.json", seed=3)


@pytest.fixture
def needs_pi() -> None:
    if os.environ.get("WHET_REQUIRE_PI") != "1" and find_pi() is None:
        pytest.skip("Pi is not installed: python -m whet.harness.install pi (or set WHET_REQUIRE_PI=1)")
