"""Map published tensors to engine parameters, and verify their checksums.

Servers fuse matrices (q, k and v into one; gate and up; the experts of a layer) and prefix names with the
shard. The mapping is closed: a parameter without a source, or a published tensor without a use, is an error,
since either would be sampled with old weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from insitu.engines.safetensors_file import (
    StoredTensor,
    check_manifest,
    digest,
    read_folder,
    read_manifest,
    sums_of,
    total,
)
from insitu.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFolder:
    """Contents of a folder when it was inspected."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    sums: Mapping[str, str]

    @property
    def checksum(self) -> str:
        return total(self.sums)

    def expected(self, mapping: WeightMapping) -> dict[str, str]:
        """Return the checksum of each parameter of a server with these bytes."""
        return {
            name: self.sums[parts[0]] if len(parts) == 1 else digest([self.tensors[p].data for p in parts])
            for name, parts in mapping.sources.items()
        }

    def check_unchanged(self) -> None:
        """Raise EngineError when the files are no longer those that were inspected."""
        if sums_of(read_folder(self.folder)) != self.sums:
            raise EngineError(f"{self.folder} was written to while the engine loaded it")


def inspect(folder: Path, version: int) -> PublishedFolder:
    """Read and digest a folder. Raises EngineError when it is damaged or was published as another version."""
    tensors = read_folder(folder)
    sums = sums_of(tensors)
    manifest = read_manifest(folder)
    if manifest is not None:
        check_manifest(folder, manifest, sums)
        if manifest.version != version:
            raise EngineError(f"{folder} holds version {manifest.version}, not version {version}")
    return PublishedFolder(folder=folder, tensors=tensors, sums=sums)


_SHARD = re.compile(r"^(?:[a-z]+\d+:)+")
"""Shard prefix, e.g. `dp0:pp0:pcp0:tp1:`."""
_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_EXPERTS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
"""Parts of one expert in the fused tensor, by the names that architectures use."""
_ONE_TENSOR: Mapping[str, str] = {
    "w13_weight": "gate_up_proj",
    "w13_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj",
    "w2_bias": "down_proj_bias",
}
"""Tensors of all experts, where a checkpoint has them as one too (gpt-oss)."""
_RENAMED = ((".attn.", ".self_attn."), ("model.embedding.", "model.embed_tokens."))
"""vLLM's names for gpt-oss, and those of its checkpoint."""
_WRAPPERS = (".base_layer.", ".routed_experts.")
"""Modules of a server that a checkpoint does not have: around adapted layers, and between experts and their
tensors (vLLM 0.32)."""
_TEXT = "language_model."
"""Module of a multimodal model that holds its text part; servers and checkpoints place it differently."""
_NUMBER = re.compile(r"\d+")
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
EMPTY = digest([])
"""Checksum that a server reports for a tensor whose bytes it has packed."""


def plain(name: str) -> str:
    """Return the parameter's own name, without shard, wrappers and text module."""
    found = _SHARD.sub("", name)
    for wrapper in _WRAPPERS:
        found = found.replace(wrapper, ".")
    return found.replace(_TEXT, "")


def _sources(name: str, published: Mapping[str, object]) -> tuple[str, ...]:
    """Return the published tensors that parameter `name` consists of, in order; empty = none found."""
    if name in published:
        return (name,)
    if name == _HEAD and _EMBED in published:
        return (_EMBED,)
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    wanted: tuple[str, ...] = ()
    if module in _FUSED:
        wanted = tuple(f"{parent}.{part}.{leaf}" for part in _FUSED[module])
    elif f"{path}.{_ONE_TENSOR.get(leaf)}" in published:
        wanted = (f"{path}.{_ONE_TENSOR[leaf]}",)
    elif leaf in _EXPERTS:
        wanted = _of_experts(path, _EXPERTS[leaf], published)
    if wanted and all(part in published for part in wanted):
        return wanted
    renamed = name
    for theirs, ours in _RENAMED:
        renamed = renamed.replace(theirs, ours)
    return _sources(renamed, published) if renamed != name else ()


def _of_experts(
    path: str, known: Sequence[tuple[str, ...]], published: Mapping[str, object]
) -> tuple[str, ...]:
    """Return the tensors of all experts in order."""
    for parts in known:
        count = 0
        while f"{path}.{count}.{parts[0]}.weight" in published:
            count += 1
        if count:
            return tuple(f"{path}.{e}.{part}.weight" for e in range(count) for part in parts)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMapping:
    """Mapping from one engine's parameters to one published set."""

    sources: Mapping[str, tuple[str, ...]]
    """Engine's own name of a parameter -> published tensors, in the order they lie in it."""
    alike: Mapping[str, str] = field(default_factory=dict)
    """Parameter that one vector feeds (a norm) -> a name that those of the other layers share. An engine does
    not fuse or pad them, so it holds all of a name as published or, sharded or of another type, none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamChecksums:
    """Checksums that an engine reports for its parameters, by its own names."""

    before: Mapping[str, str]
    after: Mapping[str, str]
    exact: Collection[str] = ()
    """Parameters that matched the published bytes exactly after an earlier update."""


def map_weights(engine_names: Iterable[str], published: Mapping[str, Sequence[int]]) -> WeightMapping:
    """Map parameters to published tensors (`published`: shapes by name).

    Raises EngineError with the first parameter without a source, or tensor without a use.
    """
    sources: dict[str, tuple[str, ...]] = {}
    alike: dict[str, str] = {}
    names = {name.replace(_TEXT, ""): name for name in published}
    for name in sorted(engine_names):
        found = tuple(names[part] for part in _sources(plain(name), names))
        if not found:
            raise EngineError(f"the engine's parameter {name} would receive none of the published tensors")
        sources[name] = found
        if len(found) == 1 and len(published[found[0]]) == 1:
            alike[name] = _NUMBER.sub("#", plain(name))
    used = {part for parts in sources.values() for part in parts}
    idle = sorted(published.keys() - used)
    if idle:
        raise EngineError(f"{idle[0]} was published and feeds no parameter of the engine")
    return WeightMapping(sources=sources, alike=alike)


def check_received(
    mapping: WeightMapping,
    expected: Mapping[str, str],
    changed: Iterable[str] | None,
    checksums: ParamChecksums,
) -> frozenset[str]:
    """Return the parameters that match the published bytes exactly.

    `expected`: checksum by parameter. A parameter must match if it ever did, before this update or after an
    earlier one, or if the same one of another layer does. Others (sharded, padded, of another type) must at
    least have changed when one of their tensors did; `changed` None = unknown. Packed ones are not checked.
    Raises EngineError for a mismatch.
    """
    moved = None if changed is None else set(changed)
    exact = frozenset(name for name in mapping.sources if checksums.after.get(name) == expected[name])
    could = {mapping.alike[name] for name in exact & mapping.alike.keys()}
    for name, parts in mapping.sources.items():
        after = checksums.after.get(name)
        if after is None:
            raise EngineError(f"the engine no longer reports its parameter {name} after the update")
        if name in exact:
            continue
        if moved is not None and moved.intersection(parts) and checksums.before.get(name) == after != EMPTY:
            raise EngineError(f"the engine's parameter {name} still has its old weights after the update")
        once = name in checksums.exact or checksums.before.get(name) == expected[name]
        if once or (after != EMPTY and mapping.alike.get(name) in could):
            raise EngineError(f"the engine's parameter {name} has other weights than were published")
    return exact
