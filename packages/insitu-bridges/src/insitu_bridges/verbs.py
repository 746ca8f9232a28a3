"""The verbs `export`, `import` and `push`; each imports its dependencies when it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson

from insitu.command import Arg, RunPath
from insitu.errors import ConfigError

EXPORT_FORMS = tuple("jsonl parquet hf atif otlp dpo openenv prime sft skyrl tinker verifiers verl".split())


def export(
    run: RunPath,
    to: Annotated[str, Arg(metavar="FORM", help=f"{', '.join(EXPORT_FORMS)} (default: jsonl)")] = "jsonl",
    out: Annotated[Path | None, Arg(metavar="DIR", help="new folder (default: JSON lines on stdout)")] = None,
    phase: Annotated[str, Arg(help="only these: train, rollout, serve, eval_after ...")] = "",
    steps: Annotated[str, Arg(metavar="A:B", help="steps from A on, without B")] = "",
    check: Annotated[bool, Arg(help="read the export back and compare every value")] = False,
    send: Annotated[str, Arg(metavar="URL", help="otlp: also send the spans to this receiver")] = "",
    checkpoint: Annotated[
        str, Arg(metavar="best|last|N", help="a model instead of rollouts, --to hf, peft or gguf")
    ] = "",
    dtype: Annotated[str, Arg(help="--checkpoint: auto, float32, bfloat16; gguf also q8_0")] = "auto",
    json: Annotated[bool, Arg(help="print the counts as JSON")] = False,
) -> int:
    """Write a run's rollouts in another form, without --out JSON lines on stdout; or a checkpoint."""
    from insitu_bridges.api import export_model
    from insitu_bridges.export import RolloutExport, steps_of, write_export

    if checkpoint and out is None:
        raise ConfigError("--checkpoint needs --out DIR")
    if checkpoint and out is not None:
        form = "hf" if to == "jsonl" else to
        made = export_model(run, out, checkpoint=checkpoint, to=form, dtype=dtype)
        text = "{out}: step {step}, {to}, {dtype}, {bytes:,} bytes".format(**made)
        print(orjson.dumps(made).decode() if json else text)
        return 0
    wanted = RolloutExport(
        run=run, to=to, out=out, phase=phase, steps=steps_of(steps), check=check, send=send
    )
    report = write_export(wanted, sys.stdout.buffer)
    if out is not None:
        print(orjson.dumps(report).decode() if json else "\n".join(_lines(report)))
    return 0


def _lines(report: Mapping[str, Any]) -> list[str]:
    """Return the counts and the account of tokens for people."""
    account = report["account"]
    left_out = "".join(f", {tokens:,} {reason}" for reason, tokens in account["excluded"].items())
    lines = [
        f"{report['out']}: {report['rollouts']:,} rollouts, {report['rows']:,} rows, {report['tokens']:,}"
        f" tokens, {report['bytes']:,} bytes",
        f"sampled tokens: {account['captured']:,}; trained {account['trained']:,}{left_out}",
    ]
    if report["lost"]:
        lines.append(f"{report['to']} has no place for: {', '.join(report['lost'])}")
    if report.get("checked"):
        lines.append("read back: every value equals the run's")
    return lines


def import_(
    folder: Annotated[Path, Arg(positional=True, metavar="DIR", help="folder of jsonl, parquet or hf")],
    out: Annotated[Path | None, Arg(metavar="RUN", help="new run directory (default: in runs/)")] = None,
    overrides: Annotated[
        Sequence[str], Arg(positional=True, metavar="a.b=c", help="override a key: model.path=FOLDER")
    ] = (),
) -> int:
    """Make a run directory from an export."""
    from insitu_bridges.api import import_run

    run = import_run(folder, out, overrides)
    print(f"{run.path}: {len(run.steps)} steps; see insitu show {run.path}")
    return 0


def push(
    what: Annotated[Path, Arg(positional=True, metavar="RUN|CHECKPOINT", help="run directory or checkpoint")],
    to: Annotated[str, Arg(required=True, metavar="hub:ORG/NAME", help="repository at Hugging Face")] = "",
    public: Annotated[bool, Arg(help="visible to everybody (default: private)")] = False,
    dry_run: Annotated[bool, Arg(help="list what would be uploaded")] = False,
    json: Annotated[bool, Arg(help="print the report as JSON")] = False,
) -> int:
    """Upload a checkpoint or the rollouts of a run."""
    from insitu_bridges.api import push as push_what

    report = push_what(what, to, public=public, dry_run=dry_run)
    if json:
        print(orjson.dumps(report).decode())
        return 0
    for name, size in report["files"].items():
        print(f"{size:>14,}  {name}")
    for rollout_id in report["left_out"]:
        print(f"left out, holds what looks like a secret: {rollout_id}")
    seen = "private" if report["private"] else "public"
    print(f"{seen} {report['kind']} {report['repo']}: {report['url'] or 'not uploaded (--dry-run)'}")
    return 0
