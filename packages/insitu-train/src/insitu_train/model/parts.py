"""Opens a model of transformers over several ranks, of which each reads only its part of the files.

The architecture is checked on a copy of the first layers, as many as there are kinds (hf.py, parity.py). The
whole model is made on torch's meta device, sharded there (shard.py), and each rank reads its rows of every
weight. Names and shapes of the files are those that transformers would save; a folder with others (an older
layout, more than text) is None here and must be opened whole.
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open
from torch import Tensor, nn

from insitu_train.part_files import INDEX

_ONE = "model.safetensors"
_FIRST = re.compile(r"(?<=\.experts\.)0(?=\.)")
"""Number of the first expert in the name of a tensor."""
_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number"})
"""Attributes of modules in which equal layers differ."""
Rows = Callable[[int, int], Tensor]
"""Reads rows [start, stop) of a weight."""


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for, whole or some of its rows."""

    def __contains__(self, name: object) -> bool:
        return self.shape(str(name)) is not None

    @abstractmethod
    def shape(self, name: str) -> Sequence[int] | None:
        """Return a tensor's shape, None where there is no such tensor."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop)."""


def shape_of(held: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return the shape of a tensor without reading it if it need not be."""
    shape = held.shape(name) if isinstance(held, LazyTensors) else held[name].shape
    return tuple(shape or ())


class PartFiles(LazyTensors):
    """The safetensors files of a folder, one or several with an index, read in parts; an open context."""

    def __init__(self, folder: Path, name: str = _ONE) -> None:
        """Open the files that transformers would read; none where there is no safetensors file."""
        index = folder / (name + INDEX)
        if index.exists():
            names = sorted({*orjson.loads(index.read_bytes())["weight_map"].values()})
        else:
            names = [name] if (folder / name).exists() else []
        self._stack, self.bytes = ExitStack(), 0
        """`bytes`: read so far."""
        self._of: dict[str, Any] = {}
        for one in names:
            file = self._stack.enter_context(safe_open(folder / one, framework="pt"))
            self._of.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __getitem__(self, name: str) -> Tensor:
        return self._counted(self._of[name].get_tensor(name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape, None where there is no such tensor."""
        file = self._of.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) in the type of the file."""
        return self._counted(self._of[name].get_slice(name)[start:stop])

    def _counted(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.nbytes
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expert:
    """The tensors of one expert, and where they lie in its part of the tensor of all experts."""

    files: PartFiles
    shape: Sequence[int]
    """Of one expert in the tensor of all."""
    places: Mapping[str, Tensor]
    """Name for the first expert -> index of each value."""

    def rows(self, start: int, stop: int) -> Tensor:
        parts = [self._one(number) for number in range(start, stop)]
        return torch.stack(parts) if parts else torch.empty(0, *self.shape)

    def _one(self, number: int) -> Tensor:
        out = torch.empty(0)
        for name, places in self.places.items():
            held = self.files[_FIRST.sub(str(number), name)]
            if not out.numel():
                out = torch.empty(self.shape, dtype=held.dtype)
            out.view(-1)[places] = held.reshape(-1)
        return out


def readers(model: nn.Module, files: PartFiles) -> dict[str, Rows] | None:
    """Return what reads rows of each parameter and stored buffer of a model on the meta device.

    None where a weight is not in the files under the name and in the shape that transformers would save it.
    """
    stored = model.state_dict(keep_vars=True).keys()
    named: dict[str, Tensor] = dict(model.named_parameters())
    named |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    found: dict[str, Rows] = {}
    for name, tensor in named.items():
        reader = _reader(model, name, tensor.detach(), files)
        if reader is None:
            return None
        found[name] = reader
    return found


def _reader(model: nn.Module, name: str, tensor: Tensor, files: PartFiles) -> Rows | None:
    saved = _saved(model, name, tensor)
    if any(files.shape(key) != tuple(one.shape) for key, one in saved.items()):
        return None
    if len(saved) == 1:
        ((key, one),) = saved.items()
        if one.shape != tensor.shape or one.stride() != tensor.stride():
            return None
        return lambda start, stop: files.rows(key, start, stop)
    shape = tuple(tensor.shape[1:])
    size = int(torch.Size(shape).numel())
    first = _saved(model, name, torch.arange(size).view(1, *shape))
    every = {_FIRST.sub(str(number), key) for key in first for number in range(tensor.shape[0])}
    if every != saved.keys() or sum(one.numel() for one in first.values()) != size:
        return None
    places = {key: one.reshape(-1) for key, one in first.items()}
    return _Expert(files=files, shape=shape, places=places).rows


def _saved(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return one weight as the tensors that a checkpoint has of it."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, {name: tensor}))


class ConvertedFiles(LazyTensors):
    """The parameters of a model, as `readers` give them."""

    def __init__(self, sources: Mapping[str, Rows], shapes: Mapping[str, Sequence[int]]) -> None:
        self._sources, self._shapes = sources, shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, self._shapes[name][0])

    def shape(self, name: str) -> Sequence[int] | None:
        return self._shapes.get(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._sources[name](start, stop)


def rows_of(target: Tensor) -> tuple[int, int]:
    """Return the first row of this rank's part of a sharded tensor, and the row after its last."""
    placed: Any = target
    mesh, rows = placed.device_mesh, int(placed.shape[0])
    height = -(-rows // int(mesh.size(mesh.ndim - 1)))
    start = min(int(mesh.get_local_rank(mesh.ndim - 1)) * height, rows)
    return start, start + int(placed.to_local().shape[0])


def fill(policy: Any, sources: Mapping[str, Rows], buffers: Mapping[str, Tensor]) -> None:
    """Read this rank's rows into the weights of a sharded policy; copy buffers that no file has."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in sources:
                parameter.to_local().copy_(sources[name](*rows_of(parameter)))
        for name, buffer in policy.model.named_buffers():
            if name in sources:
                buffer.copy_(sources[name](0, buffer.shape[0]))
            else:
                buffer.copy_(buffers[name])


# ----------------------------------------------------------------------- the layers that are checked


def kinds(config: Any, layers: Sequence[nn.Module]) -> list[str]:
    """Return what distinguishes each layer's code: modules, shapes, plain attributes, entries of lists."""
    return [_kind(config, layer, index) for index, layer in enumerate(layers)]


def _kind(config: Any, layer: nn.Module, index: int) -> str:
    modules = [
        (name, type(module).__name__, sorted(k_v for k_v in vars(module).items() if _distinguishes(*k_v)))
        for name, module in layer.named_modules()
    ]
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    return repr((modules, shapes, [values[index] for _, values in _by_layer(config)]))


def _distinguishes(name: str, value: object) -> bool:
    return isinstance(value, _PLAIN) and name not in _NUMBERS


def _by_layer(config: Any) -> list[tuple[str, list[Any]]]:
    """Return the lists of a configuration that have an entry for each layer."""
    count = config.num_hidden_layers
    return [(k, v) for k, v in vars(config).items() if isinstance(v, list) and len(v) == count]


def first_layers(config: Any, count: int) -> Any:
    """Return a copy of a configuration with its first layers only."""
    short = copy.deepcopy(config)
    for name, values in _by_layer(config):
        setattr(short, name, values[:count])
    short.num_hidden_layers = count
    return short


def enough(found: Sequence[str]) -> int:
    """Return how many first layers have every kind; two at least, so that layers follow each other."""
    return min(len(found), max(2, *(found.index(kind) + 1 for kind in found)))
