"""Stores as version 5 of the schema left them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

ADDED = {
    "rollouts": ("calls",),
    "attempts": ("began_s", "ended_s"),
    "turns": ("began_s", "first_s", "ended_s", "cached", "spans"),
    "verdicts": ("evidence",),
}
"""Columns that version 6 added."""


def make_old(path: Path) -> None:
    """Take from a store what version 5 did not have."""
    db = sqlite3.connect(path)
    for table, columns in ADDED.items():
        for column in columns:
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    db.execute("DROP TABLE diffs")
    db.execute("UPDATE meta SET value = '5' WHERE key = 'schema_version'")
    db.commit()
    db.close()
