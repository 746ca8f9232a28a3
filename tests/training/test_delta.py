"""Deltas of weights: exact for any change, small for small ones, and refused on any base but their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from insitu.engines.safetensors_file import StoredTensor, read_folder, sums_of, write_manifest, write_tensors
from insitu.errors import EngineError
from insitu_train.weights.delta import apply_delta, difference, read_delta, write_delta


def stored(values: np.ndarray, dtype: str) -> StoredTensor:
    return StoredTensor(dtype=dtype, shape=values.shape, data=values.reshape(-1).view(np.uint8))


def rounded(values: np.ndarray) -> StoredTensor:
    return stored(
        torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), "BF16"
    )


def folder_of(path: Path, version: int, tensors: dict[str, StoredTensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / "model.safetensors", tensors)
    write_manifest(path, version, sums_of(tensors))
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(
    "places", [[], [0], [4999], [255], [254, 255, 256], [0, 510, 4999], list(range(0, 5000, 97))]
)
def test_any_places_come_back_exactly(places: list[int], dtype: str, tmp_path: Path) -> None:
    kind = np.uint16 if dtype == "BF16" else np.uint32
    random = np.random.default_rng(0)
    old = random.integers(0, 60000, 5000).astype(kind)
    new = old.copy()
    new[places] ^= kind(5)
    base = folder_of(tmp_path / "a", 1, {"w": stored(old, dtype)})
    target = folder_of(tmp_path / "b", 2, {"w": stored(new, dtype)})
    write_delta(tmp_path / "d", base, target)
    apply_delta(tmp_path / "d", base, tmp_path / "c")
    assert sums_of(read_folder(tmp_path / "c")) == sums_of(read_folder(target))
    assert (tmp_path / "c" / "config.json").exists()


def test_random_changes_of_any_share(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for number, share in enumerate([0.0005, 0.01, 0.2, 0.4, 0.9]):
        old = random.integers(0, 60000, (60, 70)).astype(np.uint16)
        new = np.where(random.random(old.shape) < share, old + 1, old).astype(np.uint16)
        base = folder_of(tmp_path / f"a{number}", 1, {"w": stored(old, "BF16")})
        target = folder_of(tmp_path / f"b{number}", 2, {"w": stored(new, "BF16")})
        size = write_delta(tmp_path / f"d{number}", base, target)
        apply_delta(tmp_path / f"d{number}", base, tmp_path / f"c{number}")
        assert sums_of(read_folder(tmp_path / f"c{number}")) == sums_of(read_folder(target))
        assert size < 9000


def test_a_small_step_of_bfloat16_weights_is_a_small_delta() -> None:
    """The update of lr 1e-6 by Adam, about as large everywhere, hardly moves a bfloat16."""
    random = np.random.default_rng(2)
    weights = random.normal(scale=0.02, size=(512, 512)).astype(np.float32)
    moved = weights + np.float32(1e-6) * random.choice(np.float32([-1, 1]), weights.shape)
    old, new = rounded(weights), rounded(moved)
    found = difference(old, new)
    assert found is not None
    assert 0 < len(found[0]) + len(found[1]) < 0.1 * len(old.data)


def test_new_changed_and_dropped_tensors(tmp_path: Path) -> None:
    one, two = np.arange(50, dtype=np.uint16), np.arange(60, dtype=np.uint16)
    base = folder_of(tmp_path / "a", 1, {"same": stored(one, "BF16"), "gone": stored(one, "BF16")})
    target = folder_of(tmp_path / "b", 2, {"same": stored(one, "BF16"), "new": stored(two, "BF16")})
    write_delta(tmp_path / "d", base, target)
    made = apply_delta(tmp_path / "d", base, tmp_path / "c")
    assert sorted(made.tensors) == ["new", "same"]
    assert sums_of(read_folder(tmp_path / "c")) == made.tensors


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, Path, Path]:
    """(base, target, delta)."""
    old = np.arange(3000, dtype=np.uint16)
    new = old.copy()
    new[7] += 1
    base = folder_of(tmp_path / "a", 1, {"w": stored(old, "BF16")})
    target = folder_of(tmp_path / "b", 2, {"w": stored(new, "BF16")})
    write_delta(tmp_path / "d", base, target)
    return base, target, tmp_path / "d"


def test_another_base_is_refused(chain: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, target, delta = chain
    with pytest.raises(EngineError, match=r"needs version 1 .* holds version 2"):
        apply_delta(delta, target, tmp_path / "c")
    other = folder_of(tmp_path / "o", 1, {"w": stored(np.zeros(3000, np.uint16), "BF16")})
    with pytest.raises(EngineError, match="needs version 1"):
        apply_delta(delta, other, tmp_path / "c")
    (base / "weights.json").unlink()
    with pytest.raises(EngineError, match="it has no checksums"):
        apply_delta(delta, base, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_damaged_delta_or_base_writes_nothing(chain: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, delta = chain
    whole = delta.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole[:40], b"", b"\0" * 64):
        delta.write_bytes(damaged)
        with pytest.raises(EngineError) as caught:
            apply_delta(delta, base, tmp_path / "c")
        assert "\n" not in str(caught.value)
    delta.write_bytes(whole)
    raw = bytearray((base / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (base / "model.safetensors").write_bytes(raw)
    with pytest.raises(EngineError, match="w has not the checksum it was published with"):
        apply_delta(delta, base, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert read_delta(delta).base == 1
