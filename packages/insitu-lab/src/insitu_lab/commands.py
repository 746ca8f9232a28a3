"""The verbs that check insitu, agents and machines."""

from __future__ import annotations

from insitu.command import Command

COMMANDS = (
    Command(
        name="attack",
        group="tasks",
        text="run fifty attacks on the grader, each with an honest control",
        example="my.toml",
        run="insitu_lab.verbs:attack",
    ),
    Command(
        name="conformance",
        group="tools",
        text="run agents against a scripted policy and check every captured token",
        example="--agents pi,codex",
        run="insitu_lab.verbs:conformance",
    ),
    Command(
        name="gpu-check",
        group="tools",
        text="check insitu on this machine's GPU, slice by slice",
        example="",
        run="insitu_lab.verbs:gpu_check",
    ),
)
