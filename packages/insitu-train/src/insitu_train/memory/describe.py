"""Prints what the longest possible row of a configuration takes of a GPU: `python -m` reads TOML on stdin.

For `insitu train FILE --dry-run`, whose process never loads torch. Only the model's config.json is read.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from insitu.config import Config, load_config, model_folder, model_kind
from insitu.errors import InsituError, TrainError, boundary
from insitu.install_hints import install_extra
from insitu_train.memory.meta_run import BatchShape
from insitu_train.memory.plan import KEPT_FREE, LADDER, sharing_sizes
from insitu_train.memory.predict import GIB, MemoryModel
from insitu_train.model.base import MemoryOptions
from insitu_train.model.parity import opened_config, why_by_rows
from insitu_train.options import TrainConfig, shards_of


def _shards(train: TrainConfig) -> int:
    """Return the ranks of one copy if every host brings as many ranks as this one."""
    here, world = train.ranks_here, train.world
    return world if world % here else shards_of([here] * (world // here))


def describe(config: Config) -> Iterator[str]:
    """Yield a line each: what is held, the pass of the longest row, and a server's weights."""
    model = _model_of(config)
    train, length = TrainConfig.of(config), config.model.max_context_tokens
    shards = _shards(train) if train.shard else 1
    on_cpu = train.policy.device == "cpu"
    predictor = MemoryModel(
        model,
        dtype=torch.float32 if on_cpu or train.policy.dtype == "float32" else torch.bfloat16,
        lora=train.policy.lora,
        kernels="cpu" if on_cpu else "cuda",
        shards=shards,
    )
    where = "the CPU" if on_cpu else "a GPU" if shards == 1 else f"each of {shards} GPUs"
    parameters = predictor.parameters
    # trained tokens of one row: no more than a session samples
    load = BatchShape(prefix=0, rows=1, width=length, trained=min(length, config.limits.max_session_tokens))
    ladder = [
        t
        for t in LADDER
        if not (on_cpu and t.offload_activations) and not (shards > 1 and t.offload_optimizer)
    ]

    def peak(techniques: MemoryOptions) -> int:
        return predictor.predict(load, techniques, first=False).peak

    def shared(ranks: int, techniques: MemoryOptions) -> int:
        part = replace(load, width=length - 1, parts=ranks)
        part = replace(part, trained=min(load.trained, part.tokens))
        return predictor.predict(part, techniques, first=False).peak

    yield (
        f"{parameters / 1e9:.2f} billion parameters, {predictor.trained / 1e6:,.1f} million of them trained;"
        f" the learner holds {_gib(predictor.held)} on {where} between steps"
    )
    limit = _limit(config, on_cpu=on_cpu)
    yield f"a row of {length:,} tokens takes {_choice(ladder, peak, limit)}"
    if train.world > 1 and limit and not _fitting(ladder, peak, limit) and not why_by_rows(model):
        sizes = sharing_sizes(train.world, sharded=train.shard)
        ranks = next((n for n in sizes if _fitting(ladder, partial(shared, n), limit)), train.world)
        yield f"shared by {ranks} ranks it takes {_choice(ladder, partial(shared, ranks), limit)} on each"
    if config.engine.launch and not on_cpu:
        held = 2 * parameters / config.engine.tensor_parallel
        yield f"a server holds about {_gib(held)} of weights on each of its GPUs, the rest is its cache"


def _choice(ladder: Sequence[MemoryOptions], peak: Callable[[MemoryOptions], int], limit: float) -> str:
    """Return the first memory options that fit; without a limit what the first and the last ones take."""
    if not limit:
        return ", ".join(f"{_gib(peak(t))} {t}" for t in dict.fromkeys([*ladder[:2], ladder[-1]]))
    techniques = _fitting(ladder, peak, limit)
    if techniques is not None:
        return f"{_gib(peak(techniques))} of {_gib(limit)}: {techniques}"
    return f"{_gib(peak(ladder[-1]))} with all memory options, of {_gib(limit)}: it does not fit"


def _fitting(
    ladder: Sequence[MemoryOptions], peak: Callable[[MemoryOptions], int], limit: float
) -> MemoryOptions | None:
    return next((techniques for techniques in ladder if peak(techniques) <= limit), None)


def _limit(config: Config, *, on_cpu: bool) -> float:
    """Return the bytes that training may fill; 0 = not known here."""
    if config.policy.memory_gib:
        return config.policy.memory_gib * GIB
    if on_cpu or not torch.cuda.is_available():
        return 0.0
    return (1 - KEPT_FREE) * min(
        torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())
    )


def _model_of(config: Config) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise TrainError(f"transformers is missing: {install_extra('hf')}") from error
    path = model_folder(config) if model_kind(config.model.path) else config.model.path
    with boundary(TrainError, f"read {config.model.path}/config.json"):
        try:
            return opened_config(AutoConfig.from_pretrained(path, local_files_only=True))
        except (KeyError, TypeError) as error:
            raise TrainError(f"{config.model.path}/config.json is none of a model: {error!r}") from error


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


if __name__ == "__main__":
    try:
        for line in describe(load_config(base=tomllib.loads(sys.stdin.read()))):
            print(line)
    except InsituError as error:
        sys.exit(str(error))
