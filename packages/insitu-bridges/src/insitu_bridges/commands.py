"""The verbs that exchange rollouts and models with other programs."""

from __future__ import annotations

from insitu.command import Command

COMMANDS = (
    Command(
        name="export",
        group="look",
        text="write a run's rollouts for other programs and trainers",
        example="runs/DIR --to parquet --out data",
        run="insitu_bridges.verbs:export",
    ),
    Command(
        name="import",
        group="look",
        text="make a run directory from exported rollouts",
        example="data",
        run="insitu_bridges.verbs:import_",
    ),
    Command(
        name="push",
        group="look",
        text="upload a checkpoint, or a run's rollouts, to a hub",
        example="runs/DIR --to hub:ORG/NAME --dry-run",
        run="insitu_bridges.verbs:push",
    ),
)
