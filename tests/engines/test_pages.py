"""The pool of pages: places, sharing, names, moves, and what is given up first."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from insitu.errors import EngineError
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.pages import HIDDEN, PAGE, TILES, Page, PagePool, tile_names

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(vocab_size=8, num_hidden_layers=2, num_key_value_heads=1, head_dim=4)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def marked(pool: PagePool, page: Page, mark: float) -> Page:
    pool.keys[:, page.at], pool.values[:, page.at] = mark, -mark
    return page


def mark_of(pool: PagePool, page: Page) -> float:
    """Also checks that the whole page has one content."""
    found = torch.cat([pool.keys[:, page.at].flatten(), -pool.values[:, page.at].flatten()]).unique()
    assert len(found) == 1
    return float(found[0])


def test_pages_of_one_user_lie_low_and_shared_ones_high() -> None:
    pool = PagePool(CONFIG, 6)
    first, second, third = (marked(pool, pool.take(), i + 1) for i in range(3))
    assert [first.at, second.at, third.at] == [0, 1, 2]
    pool.share(second)
    assert (second.at, second.shared, pool.used) == (5, True, 3)
    assert pool.take().at == 1
    pool.release([second])
    pool.release([second])
    assert (second.shared, pool.used) == (False, 3)
    assert [mark_of(pool, page) for page in (first, third)] == [1, 3]


def test_named_pages_stay_until_their_place_is_needed_the_start_of_a_prompt_longest() -> None:
    pool = PagePool(CONFIG, 4)
    pages = [marked(pool, pool.take(), i + 1) for i in range(3)]
    names = tile_names(np.arange(3 * PAGE, dtype=np.int32))
    for index, name in enumerate(names):
        pool.name(pages[index // TILES], index % TILES, name)
    pool.release(pages)
    assert (pool.used, len(pool)) == (0, len(names))
    made = pool.take()
    assert made.at == 0
    assert not pool.keys[:, 0].any()
    assert (pool.seen[0] == HIDDEN).all()
    assert [pool.find(names[8 * i]) for i in range(3)] == pages, "the free place took what lay there"
    pool.take()
    assert [pool.find(names[8 * i]) for i in range(3)] == [*pages[:2], None]
    assert [mark_of(pool, page) for page in pages[:2]] == [1, 2]
    again = pool.share(pages[0])
    assert (again.users, again.shared, mark_of(pool, again)) == (1, False, 1)
    pool.take()
    with pytest.raises(EngineError, match="all 4 pages of keys and values are in use"):
        pool.take()
    assert (pool.find(names[8]), pool.evicted) == (None, 2)


def test_any_order_of_uses_keeps_every_content() -> None:
    """A thousand random takes, shares, releases and compactions against a plain record."""
    rng, pool = random.Random(0), PagePool(CONFIG, 12)
    held: list[tuple[Page, float]] = []
    named: dict[bytes, float] = {}
    for turn in range(1000):
        choice = rng.random()
        if choice < 0.4 and pool.used < 12:
            held.append((marked(pool, pool.take(), turn + 1), turn + 1))
        elif choice < 0.5 and held:
            page, mark = rng.choice(held)
            held.append((pool.share(page), mark))
        elif choice < 0.95 and held:
            page, mark = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.5:
                name = b"%d" % turn
                pool.name(page, TILES - 1, name)
                named[name] = mark
            pool.release([page])
        else:
            pool.compact()
        for page, mark in held:
            assert mark_of(pool, page) == mark
            assert page.users == sum(one is page for one, _ in held)
        for name, mark in named.items():
            if (kept := pool.find(name)) is not None:
                assert mark_of(pool, kept) == mark
    assert pool.evicted > 10
    assert pool.moves > 10


def test_compaction_brings_pages_together() -> None:
    pool = PagePool(CONFIG, 64)
    pages = [marked(pool, pool.take(), i) for i in range(40)]
    pool.release(pages[:38])
    pool.compact()
    assert max(page.at for page in pages[38:]) < 13
    assert [mark_of(pool, page) for page in pages[38:]] == [38, 39]
