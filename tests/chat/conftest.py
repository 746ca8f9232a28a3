"""Builds the codec of each vocabulary once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from insitu.chat.codec import Codec

_codecs: dict[tuple[str, tuple[str, ...] | None], Codec] = {}


def _codec(tokenizer_json: str, control: Sequence[str] | None = None) -> Codec:
    key = tokenizer_json, None if control is None else tuple(control)
    if key not in _codecs:
        _codecs[key] = Codec(*key)
    return _codecs[key]


@pytest.fixture(autouse=True)
def one_codec_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen's real vocabulary takes a second of CPU time to build; a codec keeps no state but a cache."""
    monkeypatch.setattr("insitu.chat.load.Codec", _codec)
