"""Names and meanings of the metrics that trackers get; scripts/docs.py writes the reference page from them.

A metric of metrics.jsonl is sent as GROUP/NAME. The group `all` holds numbers over all rollouts of a step,
the group `effective` the same over those that were trained on: failures and groups without a gradient do
not dilute them. In metrics.jsonl the latter begin with `effective_`. With several [[tasks]], the counts and
means of each are there and sent as NAME/metric, those of an evaluation as GROUP/NAME/metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from insitu_train.phases import eval_name

HELDOUT = "heldout"
EFFECTIVE = "effective_"

STEP: Mapping[str, Mapping[str, str]] = {
    "all": {
        "rollouts": "rollouts of the step, also those that were not graded",
        "solve_rate": "share of graded rollouts with reward 1 or more",
        "reward_mean": "mean reward of graded rollouts",
        "calls_mean": "model calls per rollout",
        "tokens_mean": "sampled tokens per rollout",
        "parts_left_out": "calls with a new image, sound or file that the model could not read",
        "malformed_calls": "replies with a tool call that did not parse",
        "unknown_tools": "replies with a call of a tool that was not offered",
        "unparsed_share": "share of replies with either of them",
        "groups": "groups of the step",
        "unscorable": "rollouts without a reward",
    },
    "effective": {
        "effective_rollouts": "rollouts that were trained on",
        "effective_solve_rate": "share of them with reward 1 or more",
        "effective_reward_mean": "their mean reward",
        "effective_calls_mean": "model calls per rollout",
        "effective_tokens_mean": "sampled tokens per rollout",
        "effective_parts_left_out": "calls with a new image, sound or file that the model could not read",
        "effective_malformed_calls": "replies with a tool call that did not parse",
        "effective_unknown_tools": "replies with a call of a tool that was not offered",
        "effective_unparsed_share": "share of replies with either of them",
        "effective_groups": "groups whose rewards differ",
    },
    "loss": {
        "loss": "minimised weighted sum, before the first update",
        "entropy": "mean entropy in nats of trained tokens",
        "grad_norm": "global gradient norm before clipping",
        "lr": "learning rate",
        "clip_fraction": "share of tokens clipped by the loss",
        "clip_low_fraction": "the part of it with negative advantage",
        "clip_high_fraction": "the part of it with positive advantage",
        "ref_kl": "mean estimated KL from the reference policy",
        "optimizer_steps": "optimizer steps so far",
        "version": "policy version after the step",
        "rows": "rows of the step's plan",
        "row_tokens": "tokens of these, prompts included",
        "micro_batches": "micro-batches of the step",
    },
    "mismatch": {
        "max_logprob_gap": "largest |trainer - sampler| log-probability of trained tokens",
        "max_logprob_gap_seen": "the same over all compared tokens",
        "mismatched": "tokens excluded because of the gap",
        "mismatch_kl": "mean of rho - 1 - log rho, tokens of the current version",
        "off_policy_kl": "the same over all trained tokens, so with staleness",
        "corrected_fraction": "share of tokens bounded or excluded by a correction",
        "ess": "effective sample size over the number of trained tokens, 0 to 1",
    },
    "tokens": {
        "tokens": "tokens of the step's update",
        "tokens_sampled": "tokens sampled for the step",
        "tokens_trained": "tokens trained, without mismatched ones",
        "excluded_share": "share of sampled tokens excluded due to agent behaviour",
    },
    "time": {
        "step_s": "seconds of the step: collecting and training",
        "cycle_s": "seconds since the previous commit, so with publication and evaluation",
        "collect_s": "seconds until the rollouts of the step were there",
        "train_s": "seconds of training and checkpoint",
        "checkpoint_s": "seconds until the checkpoint of the step was begun",
        "evaluate_s": "seconds that the step waited for evaluations beside it",
        "publish_s": "seconds until the engine had the weights",
        "seconds": "seconds of the update alone",
        "mfu": "share of the GPUs' peak that the update reached, where it is known",
        "ranks": "ranks that took part in the update, on all hosts",
        "shared_rows": "rows that no rank holds, computed by several together",
        "shared_s": "the part of `seconds` in which they were computed",
    },
    "async": {
        "staleness_max": "most versions that a trained rollout was behind",
        "staleness_mean": "mean of it over rollouts",
        "waited_s": "seconds in which the trainer waited for rollouts",
        "rollout_s": "seconds of all rollouts, added up",
        "wasted_s": "the part of it that was thrown away",
        "wasted": "share of rollout time that was thrown away",
        "groups_drawn": "groups begun so far",
        "groups_running": "groups under way",
        "groups_ready": "groups that wait for the trainer",
        "rollouts_late": "rollouts stopped at the group's deadline",
    },
    "health": {
        "tries": "attempts that ended in the step",
        "masked": "attempts that failed by infrastructure",
        "infra_failure_rate": "their share, over the last steps",
        "bad": "1 = the step was refused",
        "learner_restarts": "restarts of the learner so far",
        "tampered": "rollouts that tampered with the tests",
        "tamper_rate": "their share of judged rollouts",
        "checker_failed": "rollouts with an output on which tasks.checker failed",
        "dropped": "rollouts whose changes of protected paths were dropped",
        "weak": "rollouts with a weak verdict",
        "reward_rise": "rise of the mean reward over earlier steps",
        "infra_failure_alarm": "1 = too many infrastructure failures",
        "tamper_alarm": "1 = too many rollouts tampered",
        "reward_alarm": "1 = the mean reward jumped",
        "tokens_lost_alarm": "1 = too many tokens excluded due to agent behaviour",
        "unparsed_alarm": "1 = more replies have calls that do not parse, or of unknown tools",
    },
    "sft": {
        "tasks": "tasks of the step (insitu sft)",
    },
}
"""Metrics of a step: group -> name in metrics.jsonl -> meaning."""
EVALUATION: Mapping[str, str] = {
    "solve_rate": "mean over held-out tasks of the share of their graded rollouts with reward 1 or more",
    "reward_mean": "mean over held-out tasks of the mean reward of their graded rollouts",
    "solved": "held-out rollouts with reward 1 or more",
    "total": "graded held-out rollouts",
    **{name: STEP["all"][name] for name in ("malformed_calls", "unknown_tools", "unparsed_share")},
    "tries": "attempts of the evaluation",
    "masked": "attempts that failed by infrastructure",
    "version": "policy version of the evaluation",
    "solve_rate_low": "lower bound of the 95 % interval of solve_rate, over tasks",
    "solve_rate_high": "upper bound of it",
    "solve_rate_tasks": "tasks with a graded rollout",
    "pass_at_K": "pass@K, one of K rollouts of a task is solved; with _low, _high, _tasks as solve_rate",
    "pass_all_K": "pass^K, all of K rollouts of a task are solved; with _low and _high its interval",
}
"""Metrics of an evaluation, in the group `heldout`, at the step after which it was made; of any but the first
evaluation in the group `heldout.NAME`."""
TEXTS = frozenset({"schema_version", "time_s", "event", "step", "skipped", "alarm", "weights"})
"""Keys of a line that are not metrics."""
_OTHER = "other"
_GROUP_OF = {name: group for group, names in STEP.items() for name in names}


def sent_name(name: str) -> str:
    """Return the name under which a step's metric is sent; unknown ones are in the group `other`."""
    if "/" in name:  # of one task set of a mix, whose name is the group
        return name
    return f"{_GROUP_OF.get(name, _OTHER)}/{name.removeprefix(EFFECTIVE)}"


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of metrics.jsonl under the names that are sent."""
    evaluation = line["event"] != "step"
    other = eval_name(line["event"])
    group = f"{HELDOUT}.{other}" if other else HELDOUT
    values = {name: value for name, value in line.items() if name not in TEXTS}
    if evaluation and values.get("total") and "solve_rate" not in values:
        values["solve_rate"] = values.get("solved", 0) / values["total"]
    return {
        (f"{group}/{name}" if evaluation else sent_name(name)): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def table() -> Iterator[tuple[str, str, str]]:
    """Yield (sent name, name in metrics.jsonl, meaning) of every metric."""
    for names in STEP.values():
        for name, meaning in names.items():
            yield sent_name(name), name, meaning
    for name, meaning in EVALUATION.items():
        yield f"{HELDOUT}/{name}", name, meaning
