"""Exact pauses for simulated time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses between attempts exact, so that simulated times are."""
    monkeypatch.setattr("insitu.backoff._random.uniform", lambda low, high: high)
