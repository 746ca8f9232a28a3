"""Trainers that `insitu export --to` converts rows for, each with its own file and pure function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from insitu.bridges.rows import Conversion, GroupRows
from insitu.bridges.to_areal import to_areal
from insitu.bridges.to_nemo import to_nemo
from insitu.bridges.to_openenv import to_openenv
from insitu.bridges.to_prime import to_prime
from insitu.bridges.to_rllm import to_rllm
from insitu.bridges.to_skyrl import to_skyrl
from insitu.bridges.to_tinker import to_tinker
from insitu.bridges.to_verifiers import to_verifiers
from insitu.bridges.to_verl import to_verl
from insitu.errors import SetupError
from insitu.install_hints import install_extra

Converter = Callable[[Sequence[GroupRows]], Conversion[Any]]
TARGETS: Mapping[str, Converter] = {
    "areal": to_areal,
    "nemo": to_nemo,
    "openenv": to_openenv,
    "prime": to_prime,
    "rllm": to_rllm,
    "skyrl": to_skyrl,
    "tinker": to_tinker,
    "verifiers": to_verifiers,
    "verl": to_verl,
}


def write_payload(path: Path, to: str, payload: Sequence[Any]) -> None:
    """Write one step: JSON lines; for prime-rl the msgpack that its trainer reads. Raises SetupError."""
    if to != "prime":
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        path.with_suffix(".jsonl").write_bytes(b"".join(orjson.dumps(one, option=options) for one in payload))
        return
    try:
        import msgpack
    except ImportError as error:
        raise SetupError(f"--to prime needs msgpack: {install_extra('prime')}") from error
    path.with_suffix(".bin").write_bytes(msgpack.packb(payload))
