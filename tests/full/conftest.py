"""Tests that `make test` skips and `make test-full` runs: they need a real server or many minutes."""

from __future__ import annotations
