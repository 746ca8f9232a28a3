"""What the cells of the transfer benchmark say: rates, gains and intervals, and a heat map as SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from benchmarks._transfer_runs import AGENTS, ALL, START, Cell, Workshop
from insitu.storage.pass_at_k import wilson_interval

RESAMPLES = 2000
LABELS = {
    "pi": "Pi",
    "mini_swe": "mini-swe-agent",
    "terminus": "Terminus",
    "script": "100-line agent",
    "codex": "Codex",
    START: "before training",
    ALL: "all five",
}
Outcomes = NDArray[np.float64]
"""[seeds, tasks]: 1 = solved, 0 = not, nan = not graded."""


def outcomes(texts: Sequence[str]) -> Outcomes:
    """Return the outcomes of equally many tasks for each seed."""
    values = {"1": 1.0, "0": 0.0, "-": np.nan}
    return np.array([[values[mark] for mark in text] for text in texts], np.float64)


def _resampled(found: Outcomes, tasks: NDArray[np.int64], rng: np.random.Generator) -> Outcomes:
    """Return one mean per resample; `tasks` is [resamples, tasks]."""
    seeds = rng.integers(0, len(found), (len(tasks), len(found)))
    drawn = found[seeds[:, :, None], tasks[:, None, :]]
    graded = np.isfinite(drawn).sum(axis=(1, 2))
    means: Outcomes = np.nansum(drawn, axis=(1, 2)) / np.maximum(graded, 1)
    return means


def rate(found: Outcomes, base: Outcomes | None = None) -> dict[str, float]:
    """Return the mean solve rate, or its gain over `base` on the same tasks, with a 95 % interval.

    The interval is a bootstrap over tasks and seeds; of one seed, over tasks alone.
    """
    rng = np.random.default_rng(0)
    tasks = rng.integers(0, found.shape[1], (RESAMPLES, found.shape[1]))
    value, drawn = float(np.nanmean(found)), _resampled(found, tasks, rng)
    if base is not None:
        value, drawn = value - float(np.nanmean(base)), drawn - _resampled(base, tasks, rng)
    low, high = np.percentile(drawn, [2.5, 97.5]).tolist()
    if base is None and value in (0.0, 1.0):
        # Every resample is the same: the interval would have no width.
        count = int(np.isfinite(found).sum())
        low, high = wilson_interval(value, count)
    return {"value": round(value, 3), "low": round(low, 3), "high": round(high, 3)}


def matrix(files: Mapping[Cell, str]) -> list[dict[str, Any]]:
    """Return a row per pair of (trained in, evaluated in) that has outcomes, in the order of the table."""
    made = []
    for row in (START, *AGENTS, ALL):
        for agent in AGENTS:
            texts = {c.seed: text for c, text in sorted(files.items(), key=lambda item: item[0].seed)
                     if (c.row, c.agent) == (row, agent)}  # fmt: skip
            if not texts:
                continue
            found = outcomes(list(texts.values()))
            cell = {"row": row, "agent": agent, "seeds": list(texts), "rate": rate(found)}
            base = [text for c, text in files.items() if (c.row, c.agent) == (START, agent)]
            if row != START and base:
                cell["gain"] = rate(found, outcomes(base))
            made.append({**cell, "outcomes": list(texts.values())})
    return made


def read_cells(shop: Workshop, planned: Sequence[Cell]) -> dict[Cell, str]:
    """Return the outcomes of the planned cells that are there."""
    files = {cell: shop.cell_file(cell) for cell in planned}
    return {cell: json.loads(path.read_text())["outcomes"] for cell, path in files.items() if path.exists()}


def costs(folder: Path, planned: Sequence[Cell], tasks: int) -> dict[str, float]:
    """Return CPU seconds per held-out rollout by agent, with engine, grading and start of the command."""
    spent: dict[str, list[float]] = {}
    for cell in planned:
        path = folder / "costs" / f"heldout-{cell.name}.json"
        if path.exists():
            spent.setdefault(cell.agent, []).append(json.loads(path.read_text())["cpu_s"] / tasks)
    return {agent: round(sum(each) / len(each), 2) for agent, each in spent.items()}


_SIDE, _HIGH, _LEFT, _TOP = 104, 48, 150, 76
_STYLE = """<style>
.paper{fill:#fff}text{fill:#30363d}.none{fill:#e3e6ea}.dark{fill:#fff}
@media (prefers-color-scheme:dark){.paper{fill:#0d1117}text{fill:#d1d7de}.none{fill:#30363d}
.light{fill:#30363d}}
</style>"""


def _square(x: int, y: int, cell: Mapping[str, Any] | None) -> str:
    where = f'x="{x}" y="{y}" width="{_SIDE - 2}" height="{_HIGH - 2}"'
    if cell is None:
        return f'<rect {where} class="none"/>'
    value = cell["rate"]["value"]
    colour = f"rgb({round(234 - 187 * value)},{round(241 - 134 * value)},{round(250 - 71 * value)})"
    shade, middle = "dark" if value > 0.5 else "light", x + _SIDE // 2 - 1
    interval = f"{cell['rate']['low']:.2f} to {cell['rate']['high']:.2f}"
    return (
        f'<rect {where} style="fill:{colour}"/>'
        f'<text x="{middle}" y="{y + 21}" class="{shade}" font-size="14">{value:.2f}</text>'
        f'<text x="{middle}" y="{y + 37}" class="{shade}" font-size="10">{interval}</text>'
    )


def heat_map(made: Sequence[Mapping[str, Any]]) -> str:
    """Return the matrix as SVG: a row per agent of training, a column per agent of evaluation."""
    known = {(cell["row"], cell["agent"]): cell for cell in made}
    rows = (START, *AGENTS, ALL)
    width, height = _LEFT + _SIDE * len(AGENTS) + 16, _TOP + _HIGH * len(rows) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" text-anchor="middle">{_STYLE}',
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text x="{_LEFT + _SIDE * len(AGENTS) // 2}" y="24" font-size="14">'
        "Held-out solve rate: trained inside (rows), evaluated inside (columns)</text>",
    ]
    for at, agent in enumerate(AGENTS):
        middle = _LEFT + _SIDE * at + _SIDE // 2
        parts.append(f'<text x="{middle}" y="{_TOP - 12}">{escape(LABELS[agent])}</text>')
    for down, row in enumerate(rows):
        y = _TOP + _HIGH * down
        seeds = sorted({seed for cell in made if cell["row"] == row for seed in cell["seeds"]})
        note = f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}" if seeds else "not run"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 22}" text-anchor="end">{escape(LABELS[row])}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 37}" text-anchor="end" font-size="10">{note}</text>')
        parts += [_square(_LEFT + _SIDE * at, y, known.get((row, agent))) for at, agent in enumerate(AGENTS)]
    return "\n".join([*parts, "</svg>", ""])
