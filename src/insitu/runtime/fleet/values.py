"""Values of insitu as frames: what goes to a node, and the finished attempt that comes back.

Containers become JSON lists whose first item is a tag; arrays and bytes are joined by dtype, and lists say
where each one is. Only the dataclasses and enums of `insitu.types` and `AttemptSpec` are carried, so reading
a frame executes nothing.
"""

from __future__ import annotations

import enum
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import orjson

import insitu.types
from insitu.attempt import AttemptSpec
from insitu.engines.rpc import Array, Frame
from insitu.errors import EngineError, boundary
from insitu.types.keys import Keys

_KINDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (*vars(insitu.types).values(), AttemptSpec)
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, enum.Enum | Keys))
}
_NAMES: Mapping[Any, Sequence[str]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values() if is_dataclass(kind)
}
_MAX_INT = 1 << 63
_SEQUENCES: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_VALUE = "value"
"""Name of the JSON in a frame; the other names are dtypes."""


class _Arrays:
    """Arrays of a frame, joined by dtype: a rollout has four, however many turns it has."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Array]] = {}
        self._sizes: dict[str, int] = {}

    def add(self, array: Array) -> list[Any]:
        """Return where the array will be: dtype, first item, shape."""
        dtype = array.dtype.str
        start = self._sizes.get(dtype, 0)
        self._parts.setdefault(dtype, []).append(array.reshape(-1))
        self._sizes[dtype] = start + array.size
        return [dtype, start, *array.shape]

    def joined(self) -> dict[str, Array]:
        """Return one array per dtype, the widest first: every one stays aligned in the body."""
        names = sorted(self._parts, key=lambda name: -self._parts[name][0].itemsize)
        return {name: np.concatenate(self._parts[name]) for name in names}


def pack(value: object) -> Frame:
    """Return a value as a frame with its checksum. Raises EngineError for a type that is not carried."""
    arrays = _Arrays()
    packed = _pack(value, arrays)
    named = arrays.joined() | {_VALUE: np.frombuffer(orjson.dumps(packed), dtype=np.uint8)}
    return Frame(meta={"crc32": _checksum(named)}, arrays=named)


def unpack(frame: Frame) -> Any:
    """Return the value of a frame. Raises EngineError if it is damaged."""
    with boundary(EngineError, "read a frame"):
        if _checksum(frame.arrays) != frame.meta["crc32"]:
            raise ValueError("its checksum is wrong")
        return _unpack(orjson.loads(frame.arrays[_VALUE].data), frame.arrays)


def _checksum(arrays: Mapping[str, Array]) -> int:
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].view(np.uint8).data, crc)
    return crc


def _pack(value: Any, arrays: _Arrays) -> Any:
    if type(value) is str:  # most values, and the checks below take time
        return value if value.isascii() else _pack_text(value, arrays)
    if isinstance(value, np.ndarray):
        return ["array", *arrays.add(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.value]
    if isinstance(value, int):
        return value if -_MAX_INT <= value < _MAX_INT else ["int", str(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", str(value)]
    if isinstance(value, str):
        return _pack_text(value, arrays)
    if isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", *arrays.add(np.frombuffer(value, dtype=np.uint8))]
    return _pack_container(value, arrays)


def _pack_text(text: str, arrays: _Arrays) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON does not carry
        return ["text", *arrays.add(np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8))]
    return text


def _pack_container(value: Any, arrays: _Arrays) -> list[Any]:
    name = type(value).__name__
    if _KINDS.get(name) is type(value):
        if isinstance(value, Keys):
            return [name, _pack(value.model_dump(), arrays)]
        return [name, *[_pack(getattr(value, field), arrays) for field in _NAMES[type(value)]]]
    if isinstance(value, Mapping):
        return ["map", *[_pack(item, arrays) for pair in value.items() for item in pair]]
    if name in _SEQUENCES:
        return [name, *[_pack(item, arrays) for item in value]]
    raise EngineError(f"a value of type {name} cannot be sent to another machine")


def _unpack(packed: Any, arrays: Mapping[str, Array]) -> Any:
    if type(packed) is not list:
        return packed
    tag = packed[0]
    if tag in ("array", "bytes", "text"):
        found = _array(*packed[1:], arrays=arrays)
        if tag == "array":
            return found
        return found.tobytes() if tag == "bytes" else found.tobytes().decode("utf-8", "surrogatepass")
    if tag in ("int", "float"):
        return int(packed[1]) if tag == "int" else float(packed[1])
    return _MAKE[tag]([_unpack(item, arrays) if type(item) is list else item for item in packed[1:]])


def _array(dtype: str, start: int, *shape: int, arrays: Mapping[str, Array]) -> Array:
    found = arrays[dtype][start : start + math.prod(shape)]
    return found if len(shape) == 1 else found.reshape(shape)


def _maker(kind: Any) -> Callable[[Sequence[Any]], Any]:
    """Return what makes a value of an enum, an options table or a dataclass."""
    if issubclass(kind, enum.Enum):
        return lambda values: kind(values[0])
    if issubclass(kind, Keys):
        return lambda values: kind(**values[0])
    names = _NAMES[kind]
    return lambda values: kind(**dict(zip(names, values, strict=True)))


_MAKE: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "map": lambda values: dict(zip(values[::2], values[1::2], strict=True)),
    **_SEQUENCES,
    **{name: _maker(kind) for name, kind in _KINDS.items()},
}
