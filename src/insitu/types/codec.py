"""Values between processes and on disk: the one place that writes and reads the fields of a dataclass.

Between processes of one version a `ValueCodec` carries any value as named arrays. For what is kept, `dumps`
writes JSON, and `read` and `pick` make values of JSON by the annotations of their fields: what is absent has
the field's default. Reading executes nothing; malformed input raises ValueError with the name of the field.
"""

from __future__ import annotations

import enum
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import orjson

import insitu.types
from insitu.types.keys import Keys

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
T = TypeVar("T")
Reader = Callable[[Any], Any]

_MAX_INT = 1 << 63
_SEQUENCES: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset)
}
_MALFORMED = (KeyError, TypeError, IndexError, AttributeError)
_VALUE = "value"
"""Name of the JSON among the arrays of a value; the other names are dtypes."""


class ValueCodec:
    """Carries values made of the dataclasses, enums and options of `insitu.types`, and of `kinds`.

    Containers become JSON lists whose first item is a tag; arrays and bytes are joined by dtype, and lists
    say where each one is: a rollout has four arrays, however many turns it has.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds: dict[str, Any] = {
            kind.__name__: kind
            for kind in (*vars(insitu.types).values(), *kinds)
            if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, enum.Enum | Keys))
        }
        self._names = {kind: _names(kind) for kind in self._kinds.values() if is_dataclass(kind)}
        self._listed = {name: list(self._names.get(kind, ())) for name, kind in self._kinds.items()}
        self._make = {
            "map": lambda values: dict(zip(values[::2], values[1::2], strict=True)),
            **_SEQUENCES,
            **{name: _maker(kind) for name, kind in self._kinds.items()},
        }

    def pack(self, value: object) -> Arrays:
        """Return a value as arrays. Raises ValueError for a type that is not carried."""
        writer = _ValueWriter(self._names, self._kinds)
        packed = writer.pack(value)
        used = {kind.__name__: self._names[kind] for kind in writer.used}
        return writer.joined() | {_VALUE: np.frombuffer(orjson.dumps([used, packed]), np.uint8)}

    def unpack(self, kind: type[T], arrays: Mapping[str, Array]) -> T:
        """Return the value of `pack`, a `kind`, with views of the arrays. Raises ValueError."""
        try:
            used, packed = orjson.loads(arrays[_VALUE].data)
            for name, names in used.items():
                if names != self._listed.get(name):
                    _refuse(name, names, self._listed.get(name, ()))
            value = self._unpack(packed, arrays)
        except _MALFORMED as error:
            raise ValueError(f"malformed {kind.__name__}: {error!r}") from error
        if not isinstance(value, kind):
            raise ValueError(f"a {type(value).__name__} came for a {kind.__name__}")
        return value

    def _unpack(self, packed: Any, arrays: Mapping[str, Array]) -> Any:
        if type(packed) is not list:
            return packed
        tag = packed[0]
        if tag == "array":
            return _array(*packed[1:], arrays=arrays)
        if tag == "bytes":
            return _array(*packed[1:], arrays=arrays).tobytes()
        if tag == "text":
            return _array(*packed[1:], arrays=arrays).tobytes().decode("utf-8", "surrogatepass")
        if tag in ("int", "float"):
            return int(packed[1]) if tag == "int" else float(packed[1])
        unpack = self._unpack
        return self._make[tag]([unpack(one, arrays) if type(one) is list else one for one in packed[1:]])


class _ValueWriter:
    """Packs one value; its arrays are joined by dtype."""

    def __init__(self, names: Mapping[Any, Sequence[str]], kinds: Mapping[str, Any]) -> None:
        self._names, self._kinds = names, kinds
        self._parts: dict[str, list[Array]] = {}
        self._sizes: dict[str, int] = {}
        self.used: set[Any] = set()
        """Dataclasses in the value."""

    def joined(self) -> Arrays:
        """Return one array per dtype, the widest first: every one stays aligned in the body."""
        names = sorted(self._parts, key=lambda name: -self._parts[name][0].itemsize)
        return {name: _joined(self._parts[name]) for name in names}

    def pack(self, value: Any) -> Any:
        kind = type(value)  # the exact types first: most values, and the checks of `_other` take time
        if kind is str and value.isascii():
            return value
        if kind is np.ndarray:
            return ["array", *self._add(value)]
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_MAX_INT <= value < _MAX_INT else ["int", str(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", str(value)]
        pack = self.pack
        if kind is tuple:
            return ["tuple", *[pack(item) for item in value]]
        if (names := self._names.get(kind)) is not None:
            self.used.add(kind)
            return [kind.__name__, *[pack(getattr(value, name)) for name in names]]
        return self._other(value)

    def _other(self, value: Any) -> Any:
        name = type(value).__name__
        if isinstance(value, enum.Enum) and self._kinds.get(name) is type(value):
            return [name, value.value]
        if isinstance(value, str):
            return self._text(str(value))
        if isinstance(value, np.generic | np.ndarray):
            return self.pack(value.item() if isinstance(value, np.generic) else np.asarray(value))
        if isinstance(value, bytes | bytearray | memoryview):
            return ["bytes", *self._add(np.frombuffer(value, dtype=np.uint8))]
        if isinstance(value, Keys) and self._kinds.get(name) is type(value):
            return [name, self.pack(value.model_dump())]
        if isinstance(value, Mapping):
            return ["map", *[self.pack(item) for pair in value.items() for item in pair]]
        if name in _SEQUENCES:
            return [name, *[self.pack(item) for item in value]]
        raise ValueError(f"a value of type {name} is not carried")

    def _text(self, text: str) -> Any:
        try:
            text.encode()
        except UnicodeEncodeError:  # a lone surrogate, which JSON does not carry
            return ["text", *self._add(np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8))]
        return text

    def _add(self, array: Array) -> list[Any]:
        """Return where the array will be: dtype, first item, shape."""
        dtype = array.dtype.str
        start = self._sizes.get(dtype, 0)
        self._parts.setdefault(dtype, []).append(array if array.ndim == 1 else array.reshape(-1))
        self._sizes[dtype] = start + array.size
        return [dtype, start, *array.shape]


def _refuse(name: str, sent: Sequence[str], own: Sequence[str]) -> NoReturn:
    """Raise ValueError where the sender's fields of a class are not its fields here."""
    if not own:
        raise ValueError(f"a value of type {name} is not carried")
    different = sorted({*sent} ^ {*own})
    raise ValueError(f"{name} {'lacks' if {*different} & {*own} else 'has no'} {', '.join(different)}")


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if len(parts) > 1 else np.ascontiguousarray(parts[0])


def _array(dtype: str, start: int, *shape: int, arrays: Mapping[str, Array]) -> Array:
    size = math.prod(shape)
    found = arrays[dtype][start : start + size]
    if len(found) != size:
        raise ValueError(f"an array of {shape} is cut after {len(found)}")
    return found if len(shape) == 1 else found.reshape(shape)


def _maker(kind: Any) -> Callable[[Sequence[Any]], Any]:
    """Return what makes a value of an enum, an options table or a dataclass."""
    if issubclass(kind, enum.Enum):
        return lambda values: kind(values[0])
    if issubclass(kind, Keys):
        return lambda values: kind(**values[0])
    names = _names(kind)
    return lambda values: kind(**dict(zip(names, values, strict=True)))


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


VALUES = ValueCodec()
"""Carries the values of `insitu.types`."""


def dumps(value: object) -> bytes:
    """Return JSON: dataclasses as objects, arrays as lists. Raises TypeError, also for lone surrogates."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)


def _plain(value: object) -> object:
    """Convert what orjson does not write: arrays that are views, mappings."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


def head(value: Any, *apart: str) -> dict[str, Any]:
    """Return the fields of a dataclass that are no arrays, without those `apart`."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _head_names(kind) if name not in apart}


@functools.cache
def _head_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name, hint in get_type_hints(kind).items() if dtype_of(hint) is None)


def read(kind: Any, value: Any) -> Any:
    """Return the value of JSON as `kind`: a type, or an annotation. Raises ValueError."""
    return reader(kind)(value)


def pick(kind: type[T], found: Mapping[str, Any], **given: Any) -> T:
    """Return a dataclass of `given` fields and those in `found`, which may have other keys too.

    Raises ValueError.
    """
    made = dict(given)
    described: Any = kind
    for name, one, required in _fields(described):
        if name in made:
            continue
        if name in found:
            try:
                made[name] = one(found[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        elif required:
            raise ValueError(f"{kind.__name__} lacks {name}")
    return kind(**made)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Reader, bool], ...]:
    """Return name, reader and whether there is no default, for each field."""
    hints = get_type_hints(kind)
    return tuple(
        (f.name, reader(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(kind)
    )


def dtype_of(hint: Any) -> np.dtype[Any] | None:
    """Return the dtype of an array's annotation, also of one that may be None; None = no array."""
    for one in (hint, *get_args(hint)):
        if get_origin(one) is np.ndarray:
            return _dtype(get_args(get_args(one)[1])[0])
        if get_origin(one) is npt.NDArray:  # from numpy 2.5 on an alias with a name
            return _dtype(get_args(one)[0])
    return None


def _dtype(scalar: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(scalar)
    return found


@functools.cache
def reader(kind: Any) -> Reader:
    """Return what reads the values of an annotation, see `read`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        [one] = [reader(option) for option in inner if option is not types.NoneType]
        return lambda value: None if value is None else one(value)
    if origin is Literal:
        return _one_of(inner.__contains__, " or ".join(map(str, inner)))
    if (dtype := dtype_of(kind)) is not None:
        return functools.partial(_read_array, dtype)
    if origin is tuple and inner[-1] is not Ellipsis:
        return functools.partial(_read_tuple, list(inner), [reader(one) for one in inner])
    if origin in (tuple, frozenset):
        return functools.partial(_read_sequence, origin, reader(inner[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return functools.partial(_read_mapping, reader(inner[1]))
    return _class_reader(kind)


def _class_reader(kind: Any) -> Reader:
    """Return what reads a value of a class; of one that is no JSON, as it is."""
    if is_dataclass(kind):
        return functools.partial(_read_record, kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if kind is float:
        return _one_of(lambda value: type(value) in (float, int), "a number")
    if kind in (bool, int, str):
        return _one_of(lambda value: type(value) is kind, kind.__name__)
    return lambda value: value


def _one_of(fits: Callable[[Any], bool], wanted: str) -> Reader:
    def one(value: Any) -> Any:
        if fits(value):
            return value
        raise _unfit(value, wanted)

    return one


def _unfit(value: object, wanted: str) -> ValueError:
    return ValueError(f"{str(value)[:40]!r} is not {wanted}")


def _read_tuple(kinds: Sequence[Any], readers: Sequence[Reader], value: Any) -> tuple[Any, ...]:
    if type(value) is list and [*map(type, value)] == kinds:
        return tuple(value)  # of scalars: the most there are
    if not isinstance(value, list | tuple) or len(value) != len(readers):
        raise _unfit(value, f"a list of {len(readers)}")
    return tuple([one(item) for one, item in zip(readers, value, strict=True)])


def _read_sequence(kind: Callable[[list[Any]], Any], one: Reader, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _unfit(value, "a list")
    return kind([one(item) for item in value])


def _read_mapping(one: Reader, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unfit(value, "an object")
    return {name: one(item) for name, item in value.items()}


def _read_record(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _unfit(value, "an object")
    if unknown := value.keys() - {*_names(kind)}:
        raise ValueError(f"{kind.__name__} has no {min(unknown)}")
    return pick(kind, value)


def _read_array(dtype: np.dtype[Any], value: Any) -> Array:
    """Return an array as it is, a list as an array; ValueError where a value would have to be changed."""
    if isinstance(value, np.ndarray) and value.dtype == dtype:
        return value
    found = np.array(value)
    # JSON of others writes 0.0 as 0
    kinds = "fi" if dtype.kind == "f" else dtype.kind
    if not isinstance(value, list) or found.ndim != 1 or (value and found.dtype.kind not in kinds):
        raise ValueError("no list of one type without gaps")
    return np.array(value, dtype)
