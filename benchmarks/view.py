"""What does the viewer's server cost at 100,000 rollouts?

Run `python -m benchmarks view` (--json: one object on the last line). A store of `--rollouts` rollouts in the
real schema is made in a temporary folder: 16 rollouts by the recorder, copied by SQL, and one of a million
tokens. Figures are CPU seconds of the first call of each page in a new process state (nothing kept).
`live_core_share` is the CPU time of one viewer's requests (watch, newest page, overview) per second beside a
writer. `tokens_main_thread_ms` is measured in a browser, not here.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._arguments import Arguments, count
from insitu.config import load_config
from insitu.storage import queries as sql
from insitu.storage.run_dir import RunDir
from insitu.types import (
    CallTimes,
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
from insitu.view.web import pages, token_page
from insitu.view.web.context import Context
from insitu.view.web.query import Query
from insitu.view.web.routes import PAGES
from insitu.view.web.runs import RunHandle, Runs
from insitu.view.web.serve import STATIC

SLOTS = 16
LONG = 1_000_000
TABLES = ("rollouts", "attempts", "turns", "segments", "verdicts", "states")


def rollout(step: int, slot: int, tokens: int = 400) -> Rollout:
    name = f"train/{step:05d}/{slot:03d}/00"
    rng = np.random.default_rng(1000 * step + slot)
    ids = rng.integers(0, 500, tokens, dtype=np.int32)
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
    with sqlite3.connect(path / "run.sqlite") as db:
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


def live_share(run: RunHandle, context: Context, seconds: int) -> float:
    """Return CPU seconds of one viewer's requests per second, with a commit in each."""
    used, began = 0.0, time.monotonic()
    with RunDir.open(run.path) as opened, opened.store() as store:
        for number in range(seconds):
            store.put_rollout("live", 0, number, 0, rollout(90_000, number))

            def look() -> None:
                run.signature()
                with run.reader() as reader:
                    reader.one(sql.WATCH)
                    reader.page({}, limit=50)
                PAGES["overview"](context, run, Query({}))

            used += cpu_s(look)
            time.sleep(max(0.0, began + number + 1 - time.monotonic()))
    return used / (time.monotonic() - began)


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
        "tokens_main_thread_ms": None,
        "served_bytes": sum(file.stat().st_size for file in STATIC.rglob("*") if file.is_file()),
    }
    figures["live_core_share"] = live_share(run, context, live_s)
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
