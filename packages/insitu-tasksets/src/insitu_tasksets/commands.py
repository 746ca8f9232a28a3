"""The verb that looks at task sets."""

from __future__ import annotations

from insitu.command import Command

COMMANDS = (
    Command(
        name="tasks",
        group="tasks",
        text="list, show, validate or export the tasks of a data set; compare a judge with labels",
        example="validate my.toml --out gate.json",
        run="insitu_tasksets.verbs:tasks",
    ),
)
