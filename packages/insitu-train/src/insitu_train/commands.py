"""The verbs of training."""

from __future__ import annotations

from insitu.command import Command

COMMANDS = (
    Command(
        name="init",
        group="train",
        text="write a first configuration file",
        example="my.toml --agent pi --tasks tasks.jsonl --model models/MODEL",
        run="insitu_train.init:init",
    ),
    Command(
        name="demo",
        group="train",
        text="watch a small model learn to use a coding agent, on a CPU",
        example="--agent script run.seed=3",
        run="insitu_train.demo.verbs:demo",
    ),
    Command(
        name="train",
        group="train",
        text="train from a configuration file",
        example="my.toml run.steps=8 train.lr=1e-4",
        run="insitu_train.verbs:train",
    ),
    Command(
        name="sft",
        group="train",
        text="imitate the best rollouts of a run (supervised fine-tuning)",
        example="runs/DIR sft.min_reward=0.5",
        run="insitu_train.verbs:sft",
    ),
    Command(
        name="ranks",
        group="train",
        text="on another host: run ranks for the learner of a run (train.ranks)",
        example="10.0.0.1:29400 --ranks 4",
        run="insitu_train.verbs:ranks",
    ),
    Command(
        name="replay",
        group="look",
        text="repeat a stored run's training and compare it bit for bit",
        example="runs/DIR",
        run="insitu_train.verbs:replay",
    ),
)
