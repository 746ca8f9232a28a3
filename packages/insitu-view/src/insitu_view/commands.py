"""The verbs that look at runs."""

from __future__ import annotations

from insitu.command import Command

COMMANDS = (
    Command(
        name="view",
        group="look",
        text="look at runs in the browser",
        example="runs/DIR --export run.html",
        run="insitu_view.verbs:view",
    ),
    Command(
        name="runs",
        group="look",
        text="list runs: state, step, held-out before and after",
        example="runs",
        run="insitu_view.verbs:runs",
    ),
    Command(
        name="top",
        group="look",
        text="watch a run under way from another terminal",
        example="runs/DIR",
        run="insitu_view.verbs:top",
    ),
    Command(
        name="show",
        group="look",
        text="look at a run, finished or not, or at one rollout",
        example="runs/DIR train/00001/000/00 --diff",
        run="insitu_view.verbs:show",
    ),
    Command(
        name="compare",
        group="look",
        text="compare two runs: scores, tasks, differing keys",
        example="runs/A runs/B",
        run="insitu_view.verbs:compare",
    ),
    Command(
        name="query",
        group="look",
        text="run a SELECT over a run's rollouts, turns and steps",
        example='runs/DIR "SELECT task, AVG(reward) FROM v_rollouts GROUP BY task"',
        run="insitu_view.verbs:query",
    ),
    Command(
        name="digest",
        group="look",
        text="what to read about a run, within so many tokens",
        example="runs/DIR --tokens 4000",
        run="insitu_view.verbs:digest",
    ),
    Command(
        name="skills",
        group="look",
        text="write skills by which a coding agent uses insitu",
        example="--for claude-code",
        run="insitu_view.verbs:skills",
    ),
    Command(
        name="track",
        group="look",
        text="send a run to wandb, trackio, tensorboard or your own",
        example="runs/DIR --to tensorboard",
        run="insitu_view.verbs:track",
    ),
)
