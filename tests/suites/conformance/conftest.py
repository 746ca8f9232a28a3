"""A family for any text and the splitter of its vocabulary."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from insitu.agents.install import find
from insitu.agents.pi import RECIPE
from insitu.chat.template import TemplateRenderer
from insitu_lab.open_renderer import Splitter, open_renderer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    open_renderer(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(model: Path) -> TemplateRenderer:
    return open_renderer(model)


@pytest.fixture
def splitter(model: Path) -> Splitter:
    return Splitter(model / "tokenizer.json", seed=3)


@pytest.fixture
def needs_pi() -> None:
    if os.environ.get("INSITU_REQUIRE_PI") != "1" and find(RECIPE) is None:
        pytest.skip("Pi is not installed: insitu install pi (or set INSITU_REQUIRE_PI=1)")
