"""A demonstration through the real mini-swe-agent equals its rendering (others: tests/benchmarks)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import _transfer_warm as warm
from insitu.agents.install import find
from insitu.agents.recipe import named_recipe
from insitu_train.demo.make_warm_start import write_renderer

pytestmark = pytest.mark.full


def test_a_recording_through_mini_swe_equals_its_rendering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find(named_recipe("mini_swe")) is None:
        pytest.skip("mini_swe is not installed: insitu install mini_swe")
    monkeypatch.setattr(warm, "RECORDED", 6)
    write_renderer(tmp_path / "model", warm.first_text("mini_swe", tmp_path))
    found, _ = warm.recording("mini_swe", tmp_path / "model", tmp_path / "recorded")
    assert sum(len(rows) for rows in found.rows.values()) == 6
