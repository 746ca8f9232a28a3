"""Values of insitu as frames: what goes to a node, and the finished attempt that comes back.

Containers become JSON lists whose first item is a tag; arrays and bytes are in the frame's body. Only the
dataclasses and enums of `insitu.types` and `AttemptSpec` are carried, so reading a frame executes nothing.
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


def pack(value: object) -> Frame:
    """Return a value as a frame with its checksum. Raises EngineError for a type that is not carried."""
    arrays: list[Array] = []
    packed = _pack(value, arrays)
    # The widest first: every array stays aligned in the body.
    order = sorted(range(len(arrays)), key=lambda at: -arrays[at].itemsize)
    named = {str(at): arrays[at] for at in order}
    return Frame(meta={"value": packed, "crc32": _checksum(packed, named)}, arrays=named)


def unpack(frame: Frame) -> Any:
    """Return the value of a frame. Raises EngineError if it is damaged."""
    with boundary(EngineError, "read a frame"):
        packed = frame.meta["value"]
        if _checksum(packed, frame.arrays) != frame.meta["crc32"]:
            raise ValueError("its checksum is wrong")
        return _unpack(packed, frame.arrays)


def _checksum(packed: object, arrays: Mapping[str, Array]) -> int:
    crc = zlib.crc32(orjson.dumps(packed))
    for name in sorted(arrays):
        crc = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, crc)
    return crc


def _pack(value: Any, arrays: list[Array]) -> Any:
    if type(value) is str:  # most values, and the checks below take time
        return value if value.isascii() else _pack_text(value, arrays)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -_MAX_INT <= value < _MAX_INT else ["int", str(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", str(value)]
    if isinstance(value, str):
        return _pack_text(value, arrays)
    if isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", _add(np.frombuffer(value, dtype=np.uint8), arrays)]
    if isinstance(value, np.ndarray):
        return ["array", _add(value, arrays)]
    return _pack_container(value, arrays)


def _pack_text(text: str, arrays: list[Array]) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON does not carry
        return ["text", _add(np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8), arrays)]
    return text


def _add(array: Array, arrays: list[Array]) -> int:
    arrays.append(array)
    return len(arrays) - 1


def _pack_container(value: Any, arrays: list[Array]) -> list[Any]:
    name = type(value).__name__
    if _KINDS.get(name) is type(value):
        if isinstance(value, Keys):
            return [name, _pack(value.model_dump(), arrays)]
        return [name, *(_pack(getattr(value, field), arrays) for field in _NAMES[type(value)])]
    if isinstance(value, Mapping):
        return ["map", *(_pack(item, arrays) for pair in value.items() for item in pair)]
    if name in _SEQUENCES:
        return [name, *(_pack(item, arrays) for item in value)]
    raise EngineError(f"a value of type {name} cannot be sent to another machine")


def _unpack(packed: Any, arrays: Mapping[str, Array]) -> Any:
    if not isinstance(packed, list):
        return packed
    tag, *items = packed
    if tag == "array":
        return arrays[str(items[0])]
    if tag in ("bytes", "text"):
        raw = arrays[str(items[0])].tobytes()
        return raw if tag == "bytes" else raw.decode("utf-8", "surrogatepass")
    if tag in ("int", "float"):
        return int(items[0]) if tag == "int" else float(items[0])
    values = [_unpack(item, arrays) for item in items]
    if tag == "map":
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](values)
    return _instance(_KINDS[tag], values)


def _instance(kind: Any, values: Sequence[Any]) -> Any:
    if issubclass(kind, enum.Enum):
        return kind(values[0])
    if issubclass(kind, Keys):
        return kind(**values[0])
    return kind(**dict(zip(_NAMES[kind], values, strict=True)))
