"""The command `gpu-check`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from insitu.cli.report import EXIT_FAILED


def add_gpu_check(commands: Any) -> None:
    check = commands.add_parser("gpu-check", description="check insitu on this machine's GPU, slice by slice")
    check.add_argument("slices", nargs="*", metavar="SLICE", help="default: all, see --list")
    check.add_argument("--list", action="store_true", help="list the slices")
    check.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="DIR", help="for the reports")
    check.add_argument(
        "--deadline", type=float, default=540.0, metavar="S", help="begin nothing after S seconds (540)"
    )
    check.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    check.add_argument("--json", action="store_true", help="print the result as JSON, last on stdout")
    check.set_defaults(verb=gpu_check_verb)


def gpu_check_verb(options: argparse.Namespace) -> int:
    """Run the checks; exit code 1 when one failed."""
    from insitu.tools import gpu_check, gpu_slices

    if options.list:
        print("\n".join(f"{name:8}  {text}" for name, text in gpu_slices().items()))
        return 0
    found = gpu_check(
        options.slices,
        out=options.out,
        deadline_s=options.deadline,
        rehearse=options.rehearse,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.json:
        import orjson

        print(orjson.dumps(found).decode())
    else:
        words = {True: "ok", False: "FAILED", None: "not run"}
        for name, one in found["slices"].items():
            skipped = f", {one['skipped']} skipped" if one["skipped"] else ""
            print(f"{name:8}  {words[one['ok']]}{skipped}  {one['seconds']} s")
        print(f"reports in {options.out}")
    return EXIT_FAILED if any(one["ok"] is False for one in found["slices"].values()) else 0
