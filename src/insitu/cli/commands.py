"""The verbs of the core, in the order of the help text."""

from __future__ import annotations

from insitu.command import Command

COMMANDS = (
    Command(
        name="rollout",
        group="train",
        text="run many rollouts without training and report pass@k",
        example="my.toml rollout.count=8 rollout.samples=4",
        run="insitu.cli.verbs:rollout",
    ),
    Command(
        name="grade",
        group="look",
        text="grade a run's stored rollouts again and report differences",
        example="runs/DIR",
        run="insitu.cli.verbs:grade",
    ),
    Command(
        name="serve",
        group="tools",
        text="serve the model to an agent that you run yourself",
        example="my.toml --agent claude_code",
        run="insitu.cli.verbs:serve",
    ),
    Command(
        name="recover",
        group="tools",
        text="store the sessions of a killed `insitu serve`",
        example="runs/DIR",
        run="insitu.cli.verbs:recover",
    ),
    Command(
        name="install",
        group="tools",
        text="install agents into the cache, for use without a network",
        example="pi claude_code",
        run="insitu.cli.verbs:install",
    ),
    Command(
        name="completion",
        group="tools",
        text="print the completion script of a shell",
        example="bash",
        run="insitu.cli.completion:completion",
    ),
    Command(
        name="doctor",
        group="tools",
        text="check this machine for insitu's requirements",
        example="",
        run="insitu.cli.verbs:doctor",
    ),
)
