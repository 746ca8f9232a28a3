#!/usr/bin/env python3
"""Compare what a change of structure must not change with its records in tests/frozen.

`scripts/frozen [NAME...]` compares what is quick; `--all` also runs the demo as on other kinds of CPU, the
attacks and the agents. `--record NAME...` writes records again; their difference is reviewed like code. One
line per record, status 1 after a difference. Everything is reached by the public API, the command line and
other scripts, so that modules may move.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, Literal

import frozen_names
import frozen_runs

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tests" / "frozen"
RESULTS = ROOT / "benchmarks" / "results"
Mode = Literal["quick", "all", "record"]
SHOWN = 12
"""Differences printed of one record."""
KINDS: Mapping[str, Mapping[str, str]] = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512f": {},
}
"""Kinds of CPU by the flag they need, and what makes torch compute as on them."""
DEMO = (
    "demo --agent script --plain --json run.steps=2 eval.count=4 collect.groups_per_step=2"
    " collect.group_size=4 harness.workers=2 train.threads=1 train.min_groups=1"
).split()
TIMES = re.compile(r"_s$|^seconds$|^time_s$")


class NotComparable(Exception):
    """The record was made on a machine that computes other bits."""


@functools.cache
def work() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="insitu-frozen-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def insitu_main() -> Callable[[Sequence[str]], int]:
    """Return the command line, wherever it lives."""
    (point,) = entry_points(group="console_scripts", name="insitu")
    main: Callable[[Sequence[str]], int] = point.load()
    return main


def insitu(*arguments: str) -> str:
    """Run a verb in this process and return what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = insitu_main()(arguments)
    if code:
        raise RuntimeError(f"insitu {' '.join(arguments)} ended with {code}")
    return said.getvalue()


def insitu_json(*arguments: str, env: Mapping[str, str] = os.environ) -> Any:
    """Run a verb in a process and return the JSON of its last line."""
    command = [sys.executable, "-m", "insitu", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=5400, check=False)
    if done.returncode:
        raise RuntimeError(
            f"insitu {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


# Runs


def demo(mode: Mode) -> Any:
    """Return what each step of the demo computed, in each kind of CPU."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    vendor = re.search(r"^vendor_id\s*: (\w+)", cpu, re.MULTILINE)
    machine = {"torch": version("torch"), "vendor": vendor[1] if vendor else ""}
    if mode != "record" and (known := record("demo")["machine"]) != machine:
        raise NotComparable(f"recorded with {known}, here {machine}")
    kinds = [kind for kind in KINDS if kind == "default" or (mode != "quick" and f" {kind} " in cpu)]
    return {"machine": machine, **{kind: demo_steps(kind) for kind in kinds}}


def demo_steps(kind: str) -> Any:
    site, run = work() / f"site-{kind}", work() / f"demo-{kind}"
    site.mkdir()
    # insitu drops such variables from the environment of its learner, so each Python sets them by itself.
    (site / "sitecustomize.py").write_text(f"import os\nos.environ.update({dict(KINDS[kind])!r})\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    summary = insitu_json(*DEMO, f"run.dir={run}", env={**os.environ, "PYTHONPATH": path})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as db:
        plans = dict(db.execute("SELECT 'step ' || step, plan_hash FROM steps"))
    events = {
        f"{line['event']} {line['step']}": {
            name: value for name, value in sorted(line.items()) if value and not TIMES.search(name)
        }
        for line in lines
    }
    return {"plans": plans, "ledger": summary["ledger"], "weights": summary["weights"], "metrics": events}


def exports(mode: Mode) -> Any:
    """Return what is exported of a run that an earlier version stored; a new one may not differ."""
    stored, written = frozen_runs.exports(RECORDS / "run.tar.xz", work())
    return {"stored": stored, "differences of a new run": list(differences(stored, written))}


def store(mode: Mode) -> Any:
    """Return the tables of a run's store and the views that `insitu query` offers."""
    run = frozen_runs.written_run(work())
    views = {
        view: insitu("query", str(run), f"SELECT * FROM {view} LIMIT 1", "--csv").splitlines()[0].split(",")
        for view in ("v_rollouts", "v_turns", "v_steps", "v_attempts")
    }
    return {"tables": frozen_runs.tables(run), "views": views}


# Tests and results


def cases(mode: Mode) -> Any:
    """Return the tests of each adversarial case of the gateway, by name alone: files may move."""
    command = [sys.executable, str(ROOT / "scripts" / "cases.py")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False).stdout
    found: dict[str, list[str]] = {}
    for line in said.splitlines():
        if match := re.match(r" ?(\d+)  \S", line):
            tests = found.setdefault(match[1], [])
        elif "::" in line:
            tests.append(line.rpartition("::")[2])
    return {number: sorted(tests) for number, tests in found.items()}


def attacks(mode: Mode) -> Any:
    """Return what each attack on the grader must come to, and the counts of a run of all of them."""
    table = [line.strip("| ").split(" | ") for line in insitu("attack", "--markdown").splitlines()]
    required = {row[0]: " | ".join(row[1:]) for row in table if row[0].isdigit()}
    found = insitu_json("attack", "--json") if mode == "all" else result("attack")
    counts = {name: found[name] for name in ("attacks", "defeated", "twins", "twins_ok", "failed")}
    return {"required": required, "counts": counts}


def conformance(mode: Mode) -> Any:
    """Return what each agent's tokens come to; their number varies with what an agent writes of itself."""
    found = insitu_json("conformance", "--json") if mode == "all" else result("conformance")
    return {
        name.removesuffix("_agent"): {
            **{key: agent[key] for key in ("version", "compactions", "subagents")},
            "excluded": sorted(agent["excluded"]),
            "unexplained": agent["sampled"] - agent["trained"] - sum(agent["excluded"].values()),
        }
        for name, agent in found["agents"].items()
    }


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["result"]


# The command


ORACLES: Mapping[str, Callable[[Mode], Any]] = {
    "demo": demo,
    "exports": exports,
    "store": store,
    "cases": cases,
    "kills": lambda mode: frozen_names.kill_tests(record("kills")),
    "attacks": attacks,
    "conformance": conformance,
    "api": lambda mode: frozen_names.api(),
    "config": lambda mode: frozen_names.config(),
    "verbs": lambda mode: frozen_names.verbs(insitu_main()),
    "extensions": lambda mode: frozen_names.extensions(),
    "metrics": lambda mode: frozen_names.metrics(),
}
AT_LEAST = ("cases", "kills")
"""Records to which tests may be added."""


def differences(recorded: Any, found: Any, *, more: bool = False, at: str = "") -> Iterator[str]:
    """Yield one line per difference; `more`: what is only in `found` is none."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in recorded | found:
            here = f"{at}.{name}" if at else name
            if name not in found:
                yield f"{here} is gone: {brief(recorded[name])}"
            elif name in recorded:
                yield from differences(recorded[name], found[name], more=more, at=here)
            elif not more:
                yield f"{here} is new: {brief(found[name])}"
    elif isinstance(recorded, list) and isinstance(found, list):
        before, now = (Counter(map(json.dumps, items)) for items in (recorded, found))
        here = f"{at}: " if at else ""
        yield from (f"{here}{brief(json.loads(item))} is gone" for item in (before - now).elements())
        if not more:
            yield from (f"{here}{brief(json.loads(item))} is new" for item in (now - before).elements())
            if before == now and recorded != found:
                yield f"{here}the order changed"
    elif recorded != found:
        pairs = zip(str(recorded), str(found), strict=False)
        same = next((n for n, (before, now) in enumerate(pairs) if before != now), 0)
        start = same - 20 if isinstance(recorded, str) and isinstance(found, str) and same > 60 else 0
        yield f"{at}: {brief(recorded, start)} became {brief(found, start)}"


def brief(value: Any, start: int = 0) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{'...' if start else ''}{text[start : start + 120]}{'...' if len(text) > start + 120 else ''}"


def record(name: str) -> Any:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def compare(name: str, mode: Mode) -> bool:
    """Print how a record compares, and return whether nothing differs."""
    try:
        found = json.loads(json.dumps(ORACLES[name](mode)))
    except NotComparable as why:
        print(f"frozen: {name:12} not compared: {why}", flush=True)
        return True
    except (RuntimeError, importlib.import_module("insitu").InsituError) as error:
        print(f"frozen: {name:12} FAILED: {error}", flush=True)
        return False
    recorded, equal = record(name), "ok"
    if name == "demo":  # some kinds of CPU may be left out
        recorded = {part: recorded[part] for part in found}
        equal = f"ok: {', '.join(kind for kind in KINDS if kind in found)}"
    lines = list(differences(recorded, found, more=name in AT_LEAST))
    print(f"frozen: {name:12} {f'{len(lines)} DIFFERENCES' if lines else equal}", flush=True)
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  and {len(lines) - SHOWN} more")
    return not lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        choices=[[], *ORACLES],
        metavar="NAME",
        help=f"of {', '.join(ORACLES)}; default: all",
    )
    parser.add_argument("--all", action="store_true", help="also what takes minutes")
    parser.add_argument("--record", action="store_true", help="write these records instead")
    options = parser.parse_args()
    if options.record and not options.names:
        parser.error("--record needs names")
    names = options.names or list(ORACLES)
    if not options.record:
        differ = [name for name in names if not compare(name, "all" if options.all else "quick")]
        if differ:
            print(f"frozen: what is meant is recorded by scripts/frozen --record {' '.join(differ)}")
        return 1 if differ else 0
    for name in names:
        text = json.dumps(ORACLES[name]("record"), indent=1, ensure_ascii=False)
        (RECORDS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
