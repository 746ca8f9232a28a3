"""slime: rollouts as its Samples, through its extension points.

    --custom-generate-function-path insitu_bridges.slime.generate
    --custom-reward-post-process-path insitu_bridges.slime.rewards

The environment variable INSITU_CONFIG names insitu's configuration; its engine is slime's router, whose
address slime's arguments have. `metadata["task_id"]` of a prompt, or the prompt itself, names the task.
slime's own normalisation takes the whole batch as one group when rollouts have several rows, and counts
aborted ones as reward 0: `rewards` is needed.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from insitu.chat.load import load_renderer
from insitu.config import Config, model_folder
from insitu.errors import ConfigError
from insitu.types import Rollout, Segment, Status
from insitu_bridges.process import task_ids
from insitu_bridges.rows import (
    UNTRAINED_REASONS,
    Conversion,
    GroupRows,
    RolloutRows,
    RowKey,
    convert,
    rows_alone,
    rows_of,
    unscored,
)
from insitu_bridges.slime_arguments import check_sampling, read_arguments, rollout_sampling, router_address
from insitu_bridges.target_rows import replayed_experts
from insitu_bridges.thread import SourceThread
from insitu_bridges.to_verifiers import Text, no_text
from insitu_train.plan.step import PlanConfig

STATUS = {Status.OK: "completed", Status.TRUNCATED: "truncated", Status.AGENT_FAILED: "failed"}
ABORTED = "aborted"
NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""Advantage estimators of slime that subtract the mean of the group."""
SCALED = ("grpo", "gspo", "cispo")
"""Those that divide by its standard deviation too."""


def _source(args: Any, parameters: Mapping[str, Any] = MappingProxyType({})) -> tuple[SourceThread, Config]:
    """Open the source of this process at the first rollout; its child ends with the process."""
    asked = {**parameters, **rollout_sampling(args)}
    context = getattr(args, "rollout_max_context_len", None)
    return _opened(router_address(args), asked.get("max_new_tokens") or 0, context or 0)


@functools.cache
def _opened(address: str, call_tokens: int, context_tokens: int) -> tuple[SourceThread, Config]:
    config = read_arguments(address, call_tokens, context_tokens)
    return SourceThread(config), config


async def generate(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
    """Return one Sample per row of a rollout of the sample's task, all with one `rollout_id`.

    An evaluation gives the last row only. Raises ConfigError, and what ended the source.
    """
    made = await _samples(args, sample, sampling_params, evaluation)
    return made[-1] if evaluation else made


async def generate_final(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
    """Return the last row only, for runs whose rollouts must be one Sample each."""
    return (await _samples(args, sample, sampling_params, evaluation))[-1]


async def _samples(
    args: Any, sample: Any, parameters: Mapping[str, Any] | None, evaluation: bool
) -> list[Any]:
    _check_sample(sample)
    source, config = _source(args, {} if evaluation else parameters or {})
    for asked in (rollout_sampling(args), parameters or {}):
        check_sampling(asked, config, partial(_stop_ids, config))
    task = (sample.metadata or {}).get("task_id") or sample.prompt
    if not isinstance(task, str):
        raise ConfigError("slime: a prompt needs the id of a task in its metadata (task_id)")
    run = source.submit(lambda child: child.run(task, int(sample.index), evaluation=evaluation))
    rollout = await asyncio.wrap_future(run)
    item = rows_alone(rollout, PlanConfig.of(config))
    return [_filled(sample, fields) for fields in _rows(item, _decoder(config))]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the next groups of insitu's own tasks, per rollout a list of all rows, for slime's trainer.

    This is a whole rollout function: insitu's collector decides which groups are used. `data_source` only
    gives the Samples that are filled. An evaluation runs `eval.count` held-out tasks. Raises ConfigError,
    and what ended the source.
    """
    return _rollout(args, rollout_id, data_source, evaluation)


def generate_rollout_final(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the same with the last row of each rollout only, without the inner lists."""
    made = _rollout(args, rollout_id, data_source, evaluation)
    return made if evaluation else [[rows[-1] for rows in group] for group in made]


def _rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
    source, config = _source(args)
    check_sampling(rollout_sampling(args, evaluation=evaluation), config, partial(_stop_ids, config))
    _check_sizes(args, config)
    if evaluation:
        return {"insitu": _evaluated(source, config, rollout_id, data_source)}
    batch = source.call(lambda child: child.next())
    groups = rows_of(batch.groups, PlanConfig.of(config))
    made = []
    for group, samples in zip(groups, data_source.get_samples(len(groups)), strict=True):
        rollouts = [rows for _, rows in _group_rows(group, _decoder(config))]
        # slime wants all places of a group, also those that never got a rollout.
        rollouts += [[_aborted({}, "no rollout")] for _ in samples[len(rollouts) :]]
        made.append(
            [
                [_filled(sample, fields) for fields in rows]
                for sample, rows in zip(samples, rollouts, strict=True)
            ]
        )
    return made


def _check_sizes(args: Any, config: Config) -> None:
    """Raise ConfigError where slime's batches are not insitu's."""
    pairs = (
        ("n_samples_per_prompt", "collect.group_size", config.collect.group_size),
        ("rollout_batch_size", "collect.groups_per_step", config.collect.groups_per_step),
    )
    for name, key, value in pairs:
        if getattr(args, name, value) != value:
            raise ConfigError(
                f"slime: {key} = {value} must be --{name.replace('_', '-')} {getattr(args, name)}"
            )
    if config.collect.max_staleness:
        raise ConfigError("slime: collect.max_staleness must be 0, since slime does not report its updates")


def _evaluated(source: SourceThread, config: Config, rollout_id: int, data_source: Any) -> dict[str, Any]:
    """Run held-out tasks; one without a reward is left out, since slime would count it as 0."""
    tasks = task_ids(config, config.eval[0].count, split="eval")
    [[sample, *_]] = data_source.get_samples(1)

    def start(number: int, task: str) -> Future[Rollout]:
        key = rollout_id * len(tasks) + number
        return source.submit(lambda child: child.run(task, key, evaluation=True))

    rollouts = [run.result() for run in [start(number, task) for number, task in enumerate(tasks)]]
    plan = PlanConfig.of(config)
    graded = [rows_alone(rollout, plan) for rollout in rollouts if rollout.reward is not None]
    samples = [_filled(sample, _rows(item, _decoder(config))[-1]) for item in graded]
    return {
        "rewards": [one.reward for one in samples],
        "truncated": [one.status.value == STATUS[Status.TRUNCATED] for one in samples],
        "samples": samples,
    }


def _check_sample(sample: Any) -> None:
    """Raise ConfigError for the Sample of another slime."""
    lacking = [name for name in ("rollout_id", "metadata", *_ABORT) if not hasattr(sample, name)]
    if lacking:
        raise ConfigError(f"slime: its Sample has no {lacking[0]}: this bridge was made for slime 624b824a8")


def _filled(sample: Any, fields: dict[str, Any]) -> Any:
    """Return a copy of a Sample with the fields of one row."""
    _check_sample(sample)
    made = copy.deepcopy(sample)
    if made.rollout_id is None:
        made.rollout_id = sample.index
    for name, value in fields.items():
        setattr(made, name, value)
    made.status = type(sample.status)(fields["status"])
    made.metadata = {**(sample.metadata or {}), **fields["metadata"]}
    return made


def _group_rows(group: GroupRows, text: Text) -> Iterator[tuple[bool, list[dict[str, Any]]]]:
    """Yield, per rollout, whether its rows are in the Samples, and the fields of those."""
    kept = {item.rollout.id for item in group.scored}
    for item in group.rollouts:
        if item.rollout.id in kept:
            yield not item.reward_only, _rows(item, text)
        else:
            name = {"insitu_rollout": item.rollout.id}
            yield False, [_aborted(name, item.reason or "alone in its group")]


def _rows(item: RolloutRows, text: Text) -> list[dict[str, Any]]:
    """Return the fields of the Samples of a rollout; of an aborted one where it has no reward.

    A graded one that is not trained (over the caps, masked, without tokens) is one Sample without trained
    tokens, so that its reward counts in the group's mean, as it does in insitu.
    """
    rollout = item.rollout
    metadata = {"insitu_rollout": rollout.id}
    if rollout.reward is None:
        return [_aborted(metadata, rollout.error or "not graded")]
    shared = {"reward": rollout.reward, "status": STATUS[rollout.status]}
    segments = item.segments
    if item.reason == "evaluation":  # its tokens are excluded, but slime shows the text
        segments = tuple(one for one in rollout.trajectory.segments if one.mask.any())
    if item.reason in UNTRAINED_REASONS or not segments:
        return [{**_NO_TOKENS, **shared, "metadata": {**metadata, "insitu_left_out": item.reason}}]
    return [
        {**_row(segment, text), **shared, "metadata": {**metadata, **_place(segment, len(segments))}}
        for segment in segments
    ]


def _place(segment: Segment, count: int) -> dict[str, Any]:
    """Return where a row stands in its rollout, by the names of slime's coding agent."""
    return {"segment_idx": segment.index, "num_segments": count, "segment_kind": segment.label}


_NO_TOKENS: dict[str, Any] = {
    "tokens": [0, 0],
    "response": "",
    "response_length": 1,
    "loss_mask": [0],
    "rollout_log_probs": [0.0],
    "weight_versions": [],
    "remove_sample": True,
}
_ABORT = {**_NO_TOKENS, "reward": 0.0, "status": ABORTED}
"""slime's own form of an aborted rollout; a reward must not be None."""


def _aborted(metadata: Mapping[str, Any], why: str) -> dict[str, Any]:
    return {**_ABORT, "metadata": {**metadata, "abort_reason": why}}


def _row(segment: Segment, text: Text) -> dict[str, Any]:
    """Return the fields of a row: the response is what follows the first prompt."""
    first = int(segment.mask.argmax())
    end = len(segment.mask) - int(segment.mask[::-1].argmax())
    mask = segment.mask[first:end]
    versions = np.unique(segment.versions[segment.mask])
    return {
        "tokens": segment.ids[:end].tolist(),
        "response": text(segment.ids[first:end]),
        "response_length": end - first,
        "loss_mask": mask.astype(int).tolist(),
        "rollout_log_probs": np.where(mask, segment.logprobs[first:end], 0.0).tolist(),
        "weight_versions": [str(version) for version in versions.tolist()],
    }


@functools.cache
def _tokenizer(folder: Path) -> Any:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _decoder(config: Config) -> Text:
    """Return a decoder of the model's ids."""
    folder = model_folder(config)
    return lambda ids: str(_tokenizer(folder).decode(ids.tolist(), skip_special_tokens=False))


def _stop_ids(config: Config) -> frozenset[int]:
    return load_renderer(model_folder(config), config.model.renderer).stop_ids


def to_samples(groups: Sequence[GroupRows], *, text: Text = no_text) -> Conversion[list[dict[str, Any]]]:
    """Return Samples as dictionaries (`Sample.to_dict`), for slime's `--load-debug-rollout-data`.

    That file is `torch.save({"rollout_id": 0, "samples": payload}, path)`. Every rollout has a Sample, which
    is aborted where it cannot be compared with others of its group. text: decodes the responses.
    `rollout_routed_experts` is set where a
    sampler returned the experts of every row.
    """
    payload: list[dict[str, Any]] = []
    segments: list[Segment | None] = []
    taken: list[RowKey] = []
    index = 0
    for number, group in enumerate(groups):
        for item, (whole, rows) in zip(group.rollouts, _group_rows(group, text), strict=True):
            place = {"group_index": number, "index": index, "rollout_id": index, "prompt": group.task_id}
            payload += [{**place, **row} for row in rows]
            segments += item.segments if whole else [None]
            taken += [(item.rollout.id, segment.index) for segment in item.segments if whole]
            index += 1
    _add_experts(payload, segments)
    return convert(payload, groups, taken, unscored(groups), lost=("weights", "versions per token"))


def _add_experts(payload: list[dict[str, Any]], segments: Sequence[Segment | None]) -> None:
    """Set the experts [tokens - 1, layers, k] of all rows, or of none, as slime reads them.

    An aborted row, None among `segments`, is not trained and gets the first ones.
    """
    rows = [
        None if segment is None else replayed_experts(segment.experts, len(row["tokens"]))
        for row, segment in zip(payload, segments, strict=True)
    ]
    known = [experts for experts in rows if experts is not None]
    if not known or len(known) != sum(segment is not None for segment in segments):
        return
    first = np.broadcast_to(np.arange(known[0].shape[2]), (1, *known[0].shape[1:]))
    for row, experts in zip(payload, rows, strict=True):
        row["rollout_routed_experts"] = (first if experts is None else experts).astype(np.int32)


def rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return raw and normalised rewards: groups apart, one vote per rollout, aborted ones without."""
    key = getattr(args, "reward_key", None)
    raw = [float(sample.reward[key] if key else sample.reward) for sample in samples]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in NORMALISED or not getattr(args, "rewards_normalization", True):
        return raw, raw
    votes: dict[Any, dict[Any, float]] = {}
    for sample, value in zip(samples, raw, strict=True):
        if sample.status.value != ABORTED:
            votes.setdefault(sample.group_index, {})[_rollout_id(sample)] = value
    scaled = estimator in SCALED and getattr(args, "grpo_std_normalization", False)
    found = []
    for sample, value in zip(samples, raw, strict=True):
        group = list(votes.get(sample.group_index, {}).values())
        if sample.status.value == ABORTED or len(group) < 2:
            found.append(0.0)
        else:
            width = statistics.stdev(group) + 1e-6 if scaled else 1.0
            found.append((value - statistics.fmean(group)) / width)
    return raw, found


def _rollout_id(sample: Any) -> Any:
    return sample.index if sample.rollout_id is None else sample.rollout_id
