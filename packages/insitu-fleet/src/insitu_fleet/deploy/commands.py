"""The verb that starts runs elsewhere."""

from __future__ import annotations

from insitu.command import Command

COMMANDS = (
    Command(
        name="deploy",
        group="tools",
        text="write the files that start a run as a container, Space or cluster job",
        example="slurm my.toml --out job",
        run="insitu_fleet.deploy.verbs:deploy",
    ),
)
