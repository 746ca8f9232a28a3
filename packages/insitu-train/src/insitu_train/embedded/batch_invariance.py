"""Start-up check that results do not depend on batch composition, on this machine, for the shapes in use.

Which kernel a library picks, and so the last bits, may depend on every dimension of a product. The check runs
the real forward passes on noise and compares bits: of the first layers only, since all have the same shapes.
Variable shapes are tried first, with increasing minimum rows (where small kernels end differs between CPUs);
if bits still differ, all shapes are pinned (slower); if they differ even then, the engine refuses to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from insitu.errors import EngineError
from insitu_train.embedded.forward import ROWS, CachedForward, PrefillTile
from insitu_train.embedded.pages import HIDDEN, PAGE, TILE, TILES, Page, PagePool

STEPS = (ROWS, 8, 16)
"""Minimum rows of a decode pass that are tried before all shapes are pinned."""
LAYERS = 2
"""Layers of the trial; the keys and values of the last one go nowhere in a prefill."""
_LONG = 3
"""Most pages of a row in the trial; the longest contexts are tried with one row."""

Tables = Sequence[Sequence[Page]]


def verify_batch_invariance(forward: CachedForward, max_pages: int = _LONG, seed: int = 0) -> None:
    """Set `forward.step`, `.fixed` and `.unified` as this machine needs, or raise EngineError.

    max_pages: most pages of a request. In bfloat16 nothing is promised: only finite logits are.
    """
    with torch.inference_mode():
        trial = _Trial(forward, max_pages, seed)
        if forward.weights.dtype != torch.float32:
            trial.check_finite()
            forward.unified = True
            return
        for step in [*(s for s in STEPS if s <= forward.rows), 0]:
            trial.forward.step, trial.forward.fixed = step or forward.rows, not step
            if not (wrong := trial.decode_depends() or trial.prefill_depends()):
                break
        forward.step, forward.fixed = trial.forward.step, trial.forward.fixed
        forward.unified = not wrong and trial.decode_equals_prefill()
    if wrong:
        raise EngineError(f"this machine's torch gives results that depend on {wrong}; cannot sample exactly")


class _Trial:
    """A forward of few layers over pages of its own, filled with noise."""

    def __init__(self, forward: CachedForward, max_pages: int, seed: int) -> None:
        rows, self.seed = forward.rows, seed
        lengths = [1 + row % min(_LONG, max_pages) for row in range(rows)]
        lengths[-1] = max_pages
        prompt = -(-forward.tiles // TILES) + 1
        weights = forward.weights.shortened(LAYERS, max(max_pages, prompt) * PAGE)
        c = weights.config
        pool = PagePool(c, sum(lengths) + prompt, len(weights.layers), weights.dtype)
        self.forward = type(forward)(weights, pool, rows, forward.tiles)
        self.tables = [[pool.take() for _ in range(length)] for length in lengths]
        self.prompt = [pool.take() for _ in range(prompt)]
        rng = self._rng()
        self.ids = torch.randint(0, c.vocab_size, (rows,), generator=rng).numpy()
        inside = torch.randint(0, PAGE, (rows,), generator=rng).numpy()
        self.positions = np.array(lengths) * PAGE - PAGE + inside
        self._fill(self.tables, rng)
        for table, position in zip(self.tables, self.positions, strict=True):
            pool.show(table, int(position))

    def _rng(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _fill(self, tables: Tables, rng: torch.Generator) -> None:
        pool = self.forward.pool
        for page in chain.from_iterable(tables):
            for held in (pool.keys, pool.values):
                held[:, page.at] = torch.randn(held[:, page.at].shape, generator=rng)

    def _decode(self, rows: Sequence[int], tables: Tables | None = None) -> Tensor:
        tables = [(tables or self.tables)[row] for row in rows]
        layout = self.forward.layout(tables)
        chosen = list(rows)
        return self.forward.decode(self.ids[chosen], self.positions[chosen], layout)[: len(chosen)]

    def check_finite(self) -> Tensor:
        """Return the logits of all rows. Raises EngineError."""
        whole = self._decode(range(self.forward.rows))
        if not torch.isfinite(whole).all():
            raise EngineError("these weights give logits that are not finite")
        return whole

    def decode_depends(self) -> str:
        """Return what a decode row depends on besides its own pages, or ""."""
        rows = self.forward.rows
        every = range(rows)
        whole = self.check_finite()
        if not torch.equal(self._decode(every), whole):
            return "chance"
        for n in sorted({1, 2, 3, *range(4, rows, 4), rows - 1}):
            if not torch.equal(self._decode(range(n)), whole[:n]):
                return "the number of running requests"
        for length in range(1, 1 + max(map(len, self.tables))):
            short = [row for row in every if len(self.tables[row]) <= length]
            if short and not torch.equal(self._decode(short), whole[short]):
                return "the length of other contexts"
        order = torch.randperm(rows, generator=self._rng()).tolist()
        if not torch.equal(self._decode(order), whole[order]):
            return "the order of requests"
        even = [row for row in every if row % 2 == 0]
        rng = self._rng()
        self._fill(self.tables[1::2], rng)
        if not torch.equal(self._decode(every)[even], whole[even]):
            return "the content of other requests"
        return self._sharing_depends()

    def _sharing_depends(self) -> str:
        """Return what differs when pages are read once for several rows."""
        pool, rows = self.forward.pool, range(self.forward.rows)
        long = [row for row in rows if len(self.tables[row]) > 1]
        for sharers in (long[:2], long[: len(long) // 2], long) if len(long) > 1 else ():
            page = Page(self.tables[sharers[0]][0].at)
            page.shared = True
            tables = [list(table) for table in self.tables]
            for row in sharers:
                for held in (pool.keys, pool.values):  # each has a page of its own with the same content
                    held[:, tables[row][0].at] = held[:, page.at]
                tables[row][0] = page
            if not torch.equal(self._decode(rows), self._decode(rows, tables)):
                return "a prefix shared with other requests"
        return ""

    def _jobs(self, count: int) -> list[PrefillTile]:
        rng = np.random.default_rng(self.seed)
        vocab = self.forward.weights.config.vocab_size
        return [PrefillTile(self.prompt, index, rng.integers(0, vocab, TILE)) for index in range(count)]

    def _values(self, job: PrefillTile) -> Tensor:
        pool, page = self.forward.pool, job.pages[job.index // TILES]
        cut = slice(job.index % TILES * TILE, (job.index % TILES + 1) * TILE)
        return torch.cat([held[:, page.at, :, cut].flatten() for held in (pool.keys, pool.values)])

    def prefill_depends(self) -> str:
        """Return what a prefilled tile depends on besides the request's earlier tiles, or ""."""
        tiles = self.forward.tiles
        jobs = self._jobs(tiles + TILES)
        for at in range(0, len(jobs), tiles):
            self.forward.prefill(jobs[at : at + tiles])
        together = [self._values(job) for job in jobs]
        other = [PrefillTile(self.tables[0], 0, job.ids) for job in jobs[:1]]
        for cut in sorted({1, 2, max(1, tiles // 2), max(1, tiles - 1)}):
            for at in range(0, len(jobs), cut):
                # with a tile of another request before it, where there is room
                self.forward.prefill((other if cut < tiles else []) + jobs[at : at + cut])
            if any(not torch.equal(self._values(j), t) for j, t in zip(jobs, together, strict=True)):
                return "how prompts are cut and batched"
        return ""

    def decode_equals_prefill(self) -> bool:
        """Return whether DECODE leaves the keys and values that PREFILL would: then they may be kept."""
        jobs = self._jobs(min(self.forward.tiles + TILES, 2 * TILES))
        pool, tiles = self.forward.pool, self.forward.tiles
        for at in range(0, len(jobs), tiles):
            self.forward.prefill(jobs[at : at + tiles])
        expected = [self._values(job) for job in jobs]
        for index in sorted({0, len(jobs) // 2, len(jobs) - 1}):
            pages = self.prompt[: index // TILES + 1]
            pool.seen[[page.at for page in pages]] = 0.0
            pool.seen[pages[-1].at, index % TILES * TILE :] = HIDDEN
            others = index % self.forward.rows
            layout = self.forward.layout([pages, *self.tables[:others]])
            for offset in range(TILE):
                ids = np.array([jobs[index].ids[offset], *self.ids[:others]])
                positions = np.array([index * TILE + offset, *self.positions[:others]])
                self.forward.decode(ids, positions, layout)
            if not torch.equal(self._values(jobs[index]), expected[index]):
                return False
        return True
