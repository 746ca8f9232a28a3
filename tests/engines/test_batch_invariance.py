"""The start-up proof must notice kernels that let company show, and cope where it can."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from insitu.errors import EngineError
from insitu.types import RequestKey
from insitu_train.embedded import weights as embedded_weights
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.attention import Layout
from insitu_train.embedded.batch_invariance import verify_batch_invariance
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.embedded.forward import ROWS, CachedForward, PrefillTile
from insitu_train.embedded.model import initialise
from insitu_train.embedded.pages import TILES, PagePool
from insitu_train.embedded.slots import draw, stream
from insitu_train.embedded.weights import SamplerWeights

Ids = npt.NDArray[np.int64]

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

CONFIG = ModelConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, head_dim=8, intermediate_size=48)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(kind: type[CachedForward] = CachedForward, places: int = 40) -> CachedForward:
    with torch.inference_mode():
        weights = SamplerWeights(CONFIG, initialise(CONFIG, 0).tensors(), 256)
        return kind(weights, PagePool(CONFIG, places), 16, 4)


class LengthShows(CachedForward):
    """A machine whose attention rounds by the length it reads."""

    def decode(self, ids: Ids, positions: Ids, layout: Layout) -> Tensor:
        read = 0 if self.fixed else layout.places.shape[1]
        return super().decode(ids, positions, layout) * (1 + read * 2.0**-20)


class FewRowsShow(CachedForward):
    """A machine whose small kernels end at more rows than elsewhere."""

    def decode(self, ids: Ids, positions: Ids, layout: Layout) -> Tensor:
        few = self.step < 16 and layout.rows <= 8
        return super().decode(ids, positions, layout) * (1 + few * 2.0**-20)


class NeighbourShows(CachedForward):
    """A machine on which rows leak into each other."""

    def decode(self, ids: Ids, positions: Ids, layout: Layout) -> Tensor:
        logits = super().decode(ids, positions, layout)
        return logits + 2.0**-20 * logits.roll(1, 0)


class SharingShows(CachedForward):
    """A machine on which reading a shared page at once rounds in another way."""

    def decode(self, ids: Ids, positions: Ids, layout: Layout) -> Tensor:
        shared = 0 if self.fixed else layout.most
        return super().decode(ids, positions, layout) * (1 + shared * 2.0**-20)


class CutShows(CachedForward):
    """A machine on which a tile's place in the pass shows, whatever is pinned."""

    def prefill(self, jobs) -> None:  # type: ignore[no-untyped-def]
        super().prefill(jobs)
        self.pool.keys[:, jobs[0].pages[jobs[0].index // TILES].at] *= 1 + 2.0**-20


@pytest.mark.parametrize("tiles", [1, 2, 40])
def test_any_number_of_tiles_can_be_proven(tiles: int) -> None:
    options = EngineOptions(max_rows=8, max_context=128, prefill_tiles=tiles)
    assert EmbeddedCore(initialise(CONFIG, 0), options).keeps_sampled


def test_this_machine_passes_without_pinning_and_the_pool_is_not_touched() -> None:
    forward = make()
    verify_batch_invariance(forward, 2)
    assert (forward.step, forward.fixed, forward.unified) == (ROWS, False, True)
    assert not forward.pool.keys.any()
    assert not forward.pool.values.any()
    assert forward.pool.used == 0


def test_where_few_rows_show_more_are_computed_and_nothing_is_pinned() -> None:
    forward = make(FewRowsShow)
    verify_batch_invariance(forward)
    assert (forward.step, forward.fixed) == (16, False)


@pytest.mark.parametrize("kind", [LengthShows, SharingShows])
def test_where_only_free_shapes_show_they_are_pinned(kind: type[CachedForward]) -> None:
    forward = make(kind)
    verify_batch_invariance(forward)
    assert forward.fixed


@pytest.mark.parametrize("kind", [NeighbourShows, CutShows])
def test_where_nothing_helps_the_engine_refuses(kind: type[CachedForward]) -> None:
    with pytest.raises(EngineError, match="results that depend on"):
        verify_batch_invariance(make(kind))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "threads"),
    [(4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2), (8, 4, 1), (3, 3, 1), (6, 2, 1), (2, 1, 1)],
)
def test_other_shapes_pass_too(heads: int, kv_heads: int, threads: int) -> None:
    config = ModelConfig(vocab_size=50, hidden_size=96, num_hidden_layers=2, head_dim=24,
                         num_attention_heads=heads, num_key_value_heads=kv_heads,
                         intermediate_size=256)  # fmt: skip
    options = EngineOptions(max_rows=16, max_context=256, threads=threads)
    core = EmbeddedCore(initialise(config, 0), options)
    assert core.keeps_sampled
    assert not core.shapes_pinned


def test_a_torch_without_packed_products_passes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_weights, "ONEDNN", False)
    config = ModelConfig(vocab_size=600, num_hidden_layers=1)
    assert EmbeddedCore(initialise(config, 0), EngineOptions(max_rows=8, max_context=256)).keeps_sampled


def test_pinned_shapes_give_the_same_results_as_free_ones_here() -> None:
    """Both modes are exact; on a machine that passes freely they agree to rounding."""
    outputs = []
    with torch.inference_mode():
        for fixed in (False, True):
            forward = make()
            forward.fixed = fixed
            prompts = [[forward.pool.take()] for _ in range(3)]
            for pages in prompts:
                forward.prefill([PrefillTile(pages, i, np.arange(16) + i) for i in range(2)])
                forward.pool.show(pages, 20)
            layout = forward.layout(prompts)
            outputs.append(forward.decode(np.arange(3), np.full(3, 20), layout)[:3])
    assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(max_rows=10),
        EngineOptions(max_context=9000),
        EngineOptions(threads=0),
        EngineOptions(cache_tokens=-1),
    ],
)
def test_options_that_cannot_work_are_refused(options: EngineOptions) -> None:
    with pytest.raises(EngineError):
        EmbeddedCore(initialise(CONFIG, 0), options)


def test_streams_depend_on_every_part_of_the_key_and_not_on_length() -> None:
    keys = [RequestKey(seed=s, rollout_id=r, turn=t) for s in (0, 1) for r in ("a", "b") for t in (0, 1)]
    streams = [stream(key, 50) for key in keys]
    assert len({s.tobytes() for s in streams}) == len(keys)
    assert np.array_equal(stream(keys[0], 10), streams[0][:10])
    numbers = stream(RequestKey(seed=3, rollout_id="long", turn=0), 20_000)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.01


def test_draw_never_takes_an_impossible_token() -> None:
    """Tokens of probability 0 in fp32 sit at both ends and in the middle of the distribution."""
    logits = torch.full((5, 9), -200.0)
    logits[:, [2, 6]] = torch.tensor([0.0, 0.3])
    edge = torch.tensor([0.0, 0.4255, 0.4256, 1 - 2.0**-52, 0.9], dtype=torch.float64)
    ids, logprobs = draw(logits, torch.ones(5), edge)
    assert set(ids.tolist()) == {2, 6}
    assert torch.isfinite(logprobs).all()
    assert (logprobs <= 0).all()
    assert ids[0] == 2
    assert ids[3] == 6
