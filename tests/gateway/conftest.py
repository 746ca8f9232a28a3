"""One family for all tests of this folder."""

from __future__ import annotations

import pytest

from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    from render_families import write_renderer

    return template_renderer(read_folder(write_renderer(tmp_path_factory.mktemp("model") / "hermes")))
