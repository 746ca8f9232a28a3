"""Tables of the commands that look at runs, as text without control characters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.progress.base import change_text, duration, printable, rounded
from insitu_train.phases import is_heldout
from insitu_view.web.findings import compare_runs, compare_tasks
from insitu_view.web.runs import RunHandle, Runs, run_info

_RUN_COLUMNS = ("name", "agent", "model", "kind", "step", "state", "before -> after", "last write")

_CELL_NAMES = (
    {
        "both": "solved both times", "only_a": "only before", "only_b": "only after", "neither": "never",
        "better": "better after", "worse": "worse after", "equal": "equal",
    },
    {
        "both": "both solved", "only_a": "only A solved", "only_b": "only B solved", "neither": "neither",
        "better": "B better", "worse": "A better", "equal": "equal",
    },
)  # fmt: skip
"""Names of the cells of a pair of evaluations of one run, and of two."""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table whose columns are as wide as their values."""
    cells = [list(columns), *([printable("" if v is None else v) for v in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def runs_found(folder: Path) -> list[Mapping[str, Any]]:
    """Return what the viewer shows of each run below a folder, the last written first."""
    return [run_info(run) for run in Runs([folder]).all()]


def runs_text(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of runs."""
    if not runs:
        yield "no runs"
        return
    yield from table(_RUN_COLUMNS, [_run_row(info) for info in runs])


def _run_row(info: Mapping[str, Any]) -> list[object]:
    before, now, last_s = info["heldout_before"], info["heldout_now"], info["last_write_s"]
    rates = "" if before is None else f"{rounded(before)} -> " + ("" if now is None else rounded(now))
    state = f"{info['state']}: {info['problem']}" if info["problem"] else info["state"]
    step = f"{info['step']} of {info['steps']}" if info["steps"] is not None else info["step"]
    age = "" if last_s is None else f"{duration(max(0.0, time.time() - last_s))} ago"
    return [info["name"], info["agent"], info["model"], info["kind"], step, state, rates.rstrip(), age]


def comparison(a: RunHandle, b: RunHandle) -> dict[str, Any]:
    """Return the viewer's comparison of two runs, and of their evaluations on the same tasks.

    `pairs`: before and after of each run, and the last evaluations of both, where there are two.
    """
    found = compare_runs([a, b])
    points = [_evaluations(shown) for shown in found["runs"]]
    sides = [(run, run, own[0], own[-1]) for run, own in zip((a, b), points, strict=True) if len(own) > 1]
    if all(points) and a.path != b.path:
        sides.append((a, b, points[0][-1], points[1][-1]))
    pairs = [
        {
            "runs": 1 if x is y else 2,
            "a": [x.name, *of_x],
            "b": [y.name, *of_y],
            **compare_tasks(x, y, of_x, of_y),
        }
        for x, y, of_x, of_y in sides
    ]
    return {**found, "pairs": pairs}


def _evaluations(shown: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return (phase, step) of the evaluations on held-out tasks, in order."""
    points = [p for p in shown["heldout"] if is_heldout(p["phase"]) and not p["category"]]
    # An evaluation after a run without steps has the step of the one before it.
    ordered = sorted(points, key=lambda p: (p["step"], p["phase"] != "eval_before"))
    return [(point["phase"], point["step"]) for point in ordered]


def comparison_text(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the comparison as text: scores, tables of tasks, differing keys."""
    rows = [
        (name, f"{p['phase']} {p['step']}", rounded(p["rate"]),
         f"{rounded(p['low'])} to {rounded(p['high'])}",
         f"{p['solved']} of {p['total']}")
        for name, shown in zip("AB", found["runs"], strict=True)
        for p in shown["heldout"] if not p["category"]
    ]  # fmt: skip
    for name, shown in zip("AB", found["runs"], strict=True):
        yield printable(f"{name} = {shown['info']['name']}")
    yield from ("", *table(("run", "evaluation", "solved", "95 %", "rollouts"), rows))
    for pair in found["pairs"]:
        cells = pair["table"]
        yield from ("", printable("{} {} {} against {} {} {}, tasks:".format(*pair["a"], *pair["b"])))
        names = _CELL_NAMES[pair["runs"] - 1]
        yield from table([names[cell] for cell in cells], [list(cells.values())])
        if pair["change"]:
            yield f"change {change_text(pair['change'])}"
        test = "McNemar's exact test" if "both" in cells else "sign-flip test"
        yield f"{test}: p = {pair['p']:.3g}"
    yield ""
    if not found["differences"]:
        yield "no key of the configurations differs"
        return
    yield from table(("key", "A", "B"), [(d["key"], *d["values"]) for d in found["differences"]])
