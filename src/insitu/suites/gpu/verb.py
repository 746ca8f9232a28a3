"""The verb `gpu-check`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from insitu.cli.console import print_json
from insitu.cli.report import EXIT_FAILED
from insitu.command import Arg, Json


def gpu_check(
    slices: Annotated[
        Sequence[str], Arg(positional=True, metavar="SLICE", help="default: all, see --list")
    ] = (),
    listed: Annotated[bool, Arg(flag="--list", help="list the slices")] = False,
    out: Annotated[Path, Arg(metavar="DIR", help="for the reports")] = Path("gpu-check"),
    deadline: Annotated[float, Arg(metavar="S", help="begin nothing after S seconds (540)")] = 540.0,
    rehearse: Annotated[bool, Arg(help="toy sizes on the CPU")] = False,
    json: Json = False,
) -> int:
    """Run the checks; exit code 1 when one failed."""
    from insitu.suites.gpu.run import GpuCheckOptions, check_gpu
    from insitu.suites.gpu.slices import SLICES

    if listed:
        print("\n".join(f"{one.name:8}  {one.text}" for one in SLICES))
        return 0
    found = check_gpu(
        GpuCheckOptions(out=out, slices=slices, deadline_s=deadline, rehearse=rehearse),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    if json:
        print_json(found)
    else:
        words = {True: "ok", False: "FAILED", None: "not run"}
        for name, one in found["slices"].items():
            skipped = f", {one['skipped']} skipped" if one["skipped"] else ""
            print(f"{name:8}  {words[one['ok']]}{skipped}  {one['seconds']} s")
        print(f"reports in {out}")
    return EXIT_FAILED if any(one["ok"] is False for one in found["slices"].values()) else 0
