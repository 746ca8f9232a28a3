"""What does the viewer's server cost at 100,000 rollouts?

Run `python -m benchmarks view` (--json: one object on the last line). A store of `--rollouts` rollouts in the
real schema is made in a temporary folder: 16 rollouts by the recorder, copied by SQL, and one of a million
tokens. Figures are CPU seconds of the first call of each page (nothing kept). `served_bytes` are all files of
the pages as they are sent, compressed. With Chromium and playwright, else null: `tokens_main_thread_ms` to
open a row and jump to its next pages, 20,480 coloured tokens in five pages, `tokens_read_ms` to scroll
through as many window by window; beside a writer of one commit per second the server's share of a core with
a tab on the overview (`live_core_share`) and without one (`idle_core_share`), and the median wall time of
those commits (`commit_viewed_ms`, `commit_ms`).
"""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._arguments import Arguments, count
from benchmarks._view_tab import beside_a_writer, browser, main_thread_ms, server
from insitu.chat.load import load_renderer
from insitu.config import WARM_START, load_config
from insitu.storage.run_dir import RunDir
from insitu.types import (
    CallTimes,
    IntArray,
    Ledger,
    Outcome,
    Rollout,
    Segment,
    Status,
    Timings,
    Trajectory,
    Turn,
    Verdict,
)
from insitu_view.web import pages, token_page
from insitu_view.web.context import Context
from insitu_view.web.query import Query
from insitu_view.web.routes import PAGES
from insitu_view.web.runs import Runs
from insitu_view.web.serve import _TYPES, STATIC, _read_static

SLOTS = 16
LONG = 1_000_000
VOCABULARY = 454
OF_BROWSER = (
    "tokens_main_thread_ms", "tokens_read_ms", "live_core_share", "idle_core_share", "commit_ms",
    "commit_viewed_ms",
)  # fmt: skip
TABLES = ("rollouts", "attempts", "turns", "segments", "verdicts", "states")


@functools.cache
def _text_ids() -> IntArray:
    """Return ids of the demo's vocabulary that are 1 to 12 printable characters, 4 on average, as in code."""
    pieces = load_renderer(WARM_START).codec.pieces(np.arange(VOCABULARY, dtype=np.int32))
    texts = [bytes(piece).decode("latin-1").replace("\n", " ") for piece in pieces]
    fits = [
        i for i, text in enumerate(texts) if 1 <= len(text) <= 12 and text.isascii() and text.isprintable()
    ]
    return np.array(fits, dtype=np.int32)


def rollout(step: int, slot: int, tokens: int = 400) -> Rollout:
    name = f"train/{step:05d}/{slot:03d}/00"
    rng = np.random.default_rng(1000 * step + slot)
    ids = rng.choice(_text_ids(), tokens)
    half = tokens // 2
    mask = np.arange(tokens) >= half
    logprobs = np.where(mask, -rng.random(tokens), 0).astype(np.float32)
    turn = Turn(
        index=0, parent=-1, context_ids=ids[:half], ids=ids[half:], logprobs=logprobs[half:], finish="stop",
        version_runs=((0, step),), times=CallTimes(began_s=1e9 + step, ended_s=1e9 + step + 1),
    )  # fmt: skip
    segment = Segment(
        rollout_id=name, index=0, kind="sampled", label="final", ids=ids, mask=mask, logprobs=logprobs,
        versions=np.where(mask, step, 0).astype(np.int32),
    )  # fmt: skip
    solved = float(slot % 3 == 0)
    return Rollout(
        id=name, task_id=f"task-{slot}", category="swap", status=Status.OK, reward=solved,
        trajectory=Trajectory(
            segments=(segment,), turns=(turn,), ledger=Ledger(captured=tokens - half, trained=tokens - half)
        ),
        verdict=Verdict(
            outcome=Outcome.RESOLVED if solved else Outcome.UNRESOLVED, reward=solved, trust="strong",
            passed=slot, total=SLOTS, reason=f"{slot} of {SLOTS} cases pass",
        ),
        changed={}, deleted=(), timings=Timings(agent_s=float(rng.random()), total_s=float(rng.random())),
        began_s=1e9 + step,
    )  # fmt: skip


def make(path: Path, rollouts: int) -> None:
    """Write a run of about this many rollouts."""
    config = load_config(tables={"run": {"dir": str(path)}})
    with RunDir.create(config) as run, run.store() as store:
        for slot in range(SLOTS):
            store.put_rollout("train", 1, slot, 0, rollout(1, slot))
        store.assign(1, [rollout(1, slot).id for slot in range(SLOTS)])
        ledger = Ledger(captured=200 * SLOTS, trained=200 * SLOTS)
        ids = [rollout(1, slot).id for slot in range(SLOTS)]
        store.commit_step(1, {"loss": 0.5, "kl": 0.1}, "checkpoints/step-00001", "", ledger, trained=ids)
    with closing(sqlite3.connect(path / "run.sqlite")) as db, db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("CREATE TEMP TABLE k (n INTEGER PRIMARY KEY)")
        db.executemany("INSERT INTO k VALUES (?)", [(n,) for n in range(1, rollouts // SLOTS)])
        changed = {
            "rollout_id": "printf('train/%05d', k.n + 1) || substr(t.rollout_id, 12)",
            "owner": "printf('train/%05d', k.n + 1) || substr(t.owner, 12)",
            "step": "t.step + k.n",
            "account": "t.account + k.n",
            "task_id": "t.task_id || '-' || (k.n % 400)",
        }
        for table in TABLES:
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(changed.get(name, f"t.{name}") for name in names)
            db.execute(
                f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM {table} t, k ORDER BY k.n"
            )
        db.execute(
            "INSERT INTO steps SELECT step + k.n, schema_version, committed_s, checkpoint, plan_hash, metrics"
            " FROM steps, k"
        )
        db.execute("INSERT INTO ledger SELECT step + k.n, entry, schema_version, tokens FROM ledger, k")
    db.close()
    with RunDir.open(path) as run, run.store() as store:
        store.put_rollout("long", 0, 0, 0, rollout(0, 0, LONG))


def cpu_s(function: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    began = time.process_time()
    function()
    return time.process_time() - began


def measure(path: Path, live_s: int) -> dict[str, Any]:
    """Return the figures."""
    run = Runs([path]).all()[0]
    context = Context(runs=Runs([path]))
    words, _ = context.words_of(run)

    def read(use: Callable[[Any], object]) -> Callable[[], object]:
        def run_it() -> object:
            with run.reader() as reader:
                return use(reader)

        return run_it

    long = "train/00000/000/00"
    figures: dict[str, Any] = {
        "overview_s": cpu_s(lambda: pages.overview(run, -1)),
        "list_s": cpu_s(read(lambda reader: (reader.page({}), reader.count({})))),
        "facets_s": cpu_s(lambda: PAGES["facets"](context, run, Query({}))),
        "sort_s": cpu_s(read(lambda reader: reader.page({}, sort="-agent_s"))),
        "tokens_page_s": cpu_s(read(lambda reader: token_page.token_page(reader, words, long, 0, 0, 4096))),
        "served_bytes": sum(
            len(_read_static(file)[1]) for file in STATIC.rglob("*") if file.suffix in _TYPES
        ),
        **dict.fromkeys(OF_BROWSER),
    }
    with (
        RunDir.open(path) as opened,
        opened.store() as store,
        browser() as chromium,
        server(path) as (url, pid),
    ):
        slots = itertools.count()

        def commit() -> None:
            number = next(slots)
            store.put_rollout("live", 0, number, 0, rollout(90_000, number))

        if chromium is not None:
            figures |= beside_a_writer(chromium, url, pid, path.name, commit, live_s)
            figures |= main_thread_ms(chromium, url, path.name, long)
    return {name: round(v, 4) if isinstance(v, float) else v for name, v in figures.items()}


def main(argv: list[str]) -> int:
    parser = Arguments(prog="benchmarks view", description=__doc__)
    parser.add_argument("--rollouts", type=count, default=100_000)
    parser.add_argument("--live-s", type=count, default=60, help="seconds beside a writer")
    parser.add_argument("--json", action="store_true", help="no table, only the JSON line")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        make(path, options.rollouts)
        figures = measure(path, options.live_s)
    if not options.json:
        for name, value in figures.items():
            print(f"{name:24} {value}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
