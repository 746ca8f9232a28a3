"""`insitu gpu-check`: run checks in processes of their own and write a report for each slice.

An illegal access, a hang or a missing part costs one line of the report. What cannot run is skipped with its
reason and never counts as passed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from insitu.errors import ConfigError
from insitu_lab.gpu.slices import SLICES, GpuCheck, GpuSlice, overrides

SCHEMA = 1
VLLM = "INSITU_VLLM_PYTHON"
"""Environment variable with the environment that has vLLM."""
_MODULE = "insitu_lab.gpu_checks"
_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheckOptions:
    """Options of `insitu gpu-check`."""

    out: Path
    """Folder of the reports."""
    slices: Sequence[str] = ()
    """Names; empty = all."""
    deadline_s: float = 540.0
    """No check begins after it."""
    rehearse: bool = False
    """Toy sizes on the CPU."""


@dataclass(slots=True)
class _Report:
    checks: list[Mapping[str, Any]] = field(default_factory=list)
    skipped: list[Mapping[str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool | None:
        """None when no check ran."""
        return all(check["ok"] for check in self.checks) if self.checks else None


def check_gpu(options: GpuCheckOptions, note: Callable[[str], None]) -> Mapping[str, Any]:
    """Run the slices and return `{"slices": {name: {"ok", "seconds", "skipped"}}}`; `ok` None = nothing ran.

    Raises ConfigError for an unknown slice.
    """
    known = {one.name: one for one in SLICES}
    for name in options.slices:
        if name not in known:
            raise ConfigError(f"no slice {name!r}; there are {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.deadline_s
    found = {}
    for chosen in [known[name] for name in options.slices] or SLICES:
        began = time.monotonic()
        report = _slice(chosen, options, end, note)
        seconds = round(time.monotonic() - began, 1)
        _write(chosen, options, report, seconds)
        found[chosen.name] = {"ok": report.ok, "seconds": seconds, "skipped": len(report.skipped)}
    return {"slices": found}


def _slice(chosen: GpuSlice, options: GpuCheckOptions, end: float, note: Callable[[str], None]) -> _Report:
    report = _Report()
    log = options.out / f"{chosen.name}.log"
    log.write_bytes(b"")
    end = min(end, time.monotonic() + chosen.limit_s)
    for check in chosen.checks:
        left = end - time.monotonic()
        if left <= 0:
            _skip(report, check, "the deadline has passed", note)
            continue
        python = os.environ.get(VLLM, "")
        if check.run is not None and not python and not (options.rehearse and chosen.name == "run"):
            _skip(report, check, f"no vLLM: set {VLLM} to an environment that has it", note)
            continue
        began = time.monotonic()
        command = _command(check, options, python)
        code, last = _process(command, log, min(left, check.limit_s))
        made = _read(check, code, last, options, log)
        if "skipped" in made:
            _skip(report, check, made["skipped"], note)
            continue
        report.figures |= made.get("figures", {})
        report.checks += made["checks"]
        bad = [one for one in made["checks"] if not one["ok"]]
        words = "; ".join(str(one["why"] or one["name"]) for one in bad)
        note(f"{check.name}: {'FAILED: ' + words if bad else 'ok'} ({time.monotonic() - began:.1f} s)")
    return report


def _skip(report: _Report, check: GpuCheck, reason: str, note: Callable[[str], None]) -> None:
    report.skipped.append({"name": check.name, "reason": reason})
    note(f"{check.name}: skipped: {reason}")


def _command(check: GpuCheck, options: GpuCheckOptions, python: str) -> list[str]:
    if check.run is None:
        return [sys.executable, "-P", "-m", _MODULE, check.name, *["--rehearse"] * options.rehearse]
    folder = str((options.out / check.name).absolute())
    keys = overrides(check, folder, python, rehearse=options.rehearse)
    return [sys.executable, "-P", "-m", "insitu", "demo", "--agent", "script", "--plain", "--json", *keys]


def _process(command: Sequence[str], log: Path, limit_s: float) -> tuple[int | None, str]:
    """Run to the end or the limit; return the exit status, None = the limit, and the last line of stdout."""
    path = os.pathsep.join(filter(None, sys.path))
    with log.open("ab") as errors, tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
    return child.returncode, lines[-1] if lines else ""


def _read(
    check: GpuCheck, code: int | None, last: str, options: GpuCheckOptions, log: Path
) -> Mapping[str, Any]:
    """Return the outcome of a check: `checks` and `figures`, or `skipped`."""
    if code is None:
        return _failed(check, f"no end within {check.limit_s} s")
    if code:
        lines = log.read_text(errors="replace").strip().splitlines()[-_LINES:]
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return _failed(check, f"{how}: {' | '.join(line.strip() for line in lines)}")
    try:
        made: dict[str, Any] = orjson.loads(last)
    except orjson.JSONDecodeError:
        return _failed(check, "it printed no result")
    return made if check.run is None else _outcome(check, made, options)


def _failed(check: GpuCheck, why: str) -> Mapping[str, Any]:
    return {"checks": [_one(check.name, ok=False, why=why)]}


def _one(name: str, *, ok: bool, value: object = None, limit: object = None, why: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "value": value, "limit": limit, "unit": "", "why": why}


def _outcome(check: GpuCheck, summary: Mapping[str, Any], options: GpuCheckOptions) -> Mapping[str, Any]:
    """Judge the summary of a run."""
    ledger = summary["ledger"]
    balanced = ledger["captured"] == ledger["trained"] + sum(ledger["excluded"].values())
    made = [_one(f"{check.name}.ledger", ok=balanced, why="" if balanced else "the ledger does not balance")]
    if check.rises and not options.rehearse:
        before, after = summary["heldout_before"], summary["heldout_after"]
        why = "" if after > before else f"held-out went from {before} to {after}"
        made.append(_one(f"{check.name}.heldout", ok=after > before, value=after, limit=before, why=why))
    keys = ("max_logprob_gap", "mismatched", "heldout_before", "heldout_after", "wall_s", "updates")
    return {"checks": made, "figures": {check.name: {key: summary.get(key) for key in keys}}}


def _write(chosen: GpuSlice, options: GpuCheckOptions, report: _Report, seconds: float) -> None:
    body = {
        "schema": SCHEMA,
        "slice": chosen.name,
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds)),
        "seconds": seconds,
        "rehearsal": options.rehearse,
        "ok": report.ok,
        "checks": report.checks,
        "figures": report.figures,
        "skipped": report.skipped,
        "log": f"{chosen.name}.log",
    }
    (options.out / f"{chosen.name}.json").write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2))


def _commit() -> str:
    """Return the commit of a checkout, or empty."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if not done.returncode else ""
