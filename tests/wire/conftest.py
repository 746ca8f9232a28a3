"""Puts helpers on the path of these tests; one family for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(_TESTS / "gateway"), str(_TESTS / "chat")]


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    from render_families import write_renderer

    return template_renderer(read_folder(write_renderer(tmp_path_factory.mktemp("model") / "hermes")))
